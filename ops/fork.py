"""Source of a fork: an iteration of another experiment, whose episodes a fork trains on again."""

from __future__ import annotations

from contracts.store import Store
from ops.iteration_keys import iteration_key
from ops.state import IterationInputs, read_inputs
from resources.errors import NotMaterialized
from resources.experiment import ForkConfig
from resources.refs import require_ref


def source_key(fork: ForkConfig, number: int) -> str:
    """Key of the source's iteration that iteration `number` of the fork repeats."""
    return iteration_key(int(fork.iteration) + number)


def source_inputs(store: Store, fork: ForkConfig, number: int = 0) -> IterationInputs:
    """Pinned inputs of the source's iteration that iteration `number` of the fork repeats.

    Raises NotMaterialized, also for an iteration whose training has not begun.
    """
    key = source_key(fork, number)
    found = read_inputs(store, require_ref(store, fork.experiment, "iteration_inputs", key))
    if found.start is None:
        raise NotMaterialized(
            f"{fork.experiment}/{key} was sampled ahead, and its training has not begun: materialize it first"
        )
    return found
