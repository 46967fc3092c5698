"""The table of attacks in docs/attacks.md is the one that is run."""

from __future__ import annotations

from tests.escape.attack import BACKENDS
from tests.escape.catalogue import ALL
from tests.escape.table import PATH, table

_ASKED = (
    "paths",
    "proc",
    "ptrace",
    "devices",
    "mounts",
    "privileges",
    "bombs",
    "time",
    "calls",
    "network",
    "neighbours",
    "secrets",
    "output",
    "archives",
    "grpc",
    "access",
    "reward",
)


def test_the_document_agrees_with_the_attacks() -> None:
    assert PATH.read_text() == table(), "run `python -m tests.escape.table`"


def test_there_are_enough_attacks_of_every_family_with_names_of_their_own() -> None:
    assert len(ALL) >= 60 and len({attack.name for attack in ALL}) == len(ALL)
    assert set(_ASKED) <= {attack.family for attack in ALL}


def test_exceptions_name_backends_and_reasons() -> None:
    for attack in ALL:
        for exceptions in (attack.unseen_on, attack.harmless_on, attack.not_on, attack.succeeds_on):
            assert set(exceptions) <= set(BACKENDS) and all(exceptions.values()), attack.name
