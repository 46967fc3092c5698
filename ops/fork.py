"""Source of a fork: an iteration of another experiment, whose episodes a fork trains on again."""

from __future__ import annotations

from contracts.store import Store
from ops.iteration_keys import iteration_key
from ops.state import IterationInputs, read_inputs
from resources.experiment import ForkConfig
from resources.refs import require_ref


def source_key(fork: ForkConfig, number: int) -> str:
    """Key of the source's iteration that iteration `number` of the fork repeats."""
    return iteration_key(int(fork.iteration) + number)


def source_inputs(store: Store, fork: ForkConfig, number: int = 0) -> IterationInputs:
    """Pinned inputs of the source's iteration that iteration `number` of the fork repeats. Raises NotMaterialized."""
    return read_inputs(store, require_ref(store, fork.experiment, "iteration_inputs", source_key(fork, number)))
