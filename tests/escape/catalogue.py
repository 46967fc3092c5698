"""Every attack, in the order of the table."""

from __future__ import annotations

from tests.escape import (
    attacks_bombs,
    attacks_files,
    attacks_kernel,
    attacks_network,
    attacks_output,
    attacks_server,
    attacks_shared,
    attacks_verdicts,
)
from tests.escape.attack import Attack

_MODULES = (
    attacks_files,
    attacks_kernel,
    attacks_bombs,
    attacks_network,
    attacks_shared,
    attacks_output,
    attacks_server,
    attacks_verdicts,
)
ALL: tuple[Attack, ...] = tuple(attack for module in _MODULES for attack in module.ATTACKS)
