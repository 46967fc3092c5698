"""How engines over several replicas send a call: where the router says, and after a fault to another replica."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from typing import TypedDict, TypeVar

from contracts.errors import TriplaneError
from inference.engines.base import Completion, SamplingParams
from inference.errors import EngineStopped, EngineUnreachable, StaleVersion, WeightsDiffer
from inference.router import Decision, Router

R = TypeVar("R")
T = TypeVar("T")
TRIES = 3
"""Replicas that one call is sent to, before its error is the caller's."""
REPLICA_FAULTS = (EngineUnreachable, EngineStopped, StaleVersion, WeightsDiffer)
"""Errors of a replica that another one may not have."""


class RouterArguments(TypedDict, total=False):
    """What the router is told of a call beside its prompt."""

    max_tokens: int
    session: str
    group: str | None


def router_arguments(params: SamplingParams | None) -> RouterArguments:
    """Turns of an episode, which have the same seed, are a session. params: of a turn; None: nothing is sampled."""
    if params is None:
        return {"max_tokens": 1}
    return {"max_tokens": params.max_tokens, "session": str(params.seed), "group": params.group}


def choose_other(
    router: Router, prompt: Sequence[int], params: SamplingParams, beside: Collection[str]
) -> Decision | None:
    """Begin a request at another replica than those `beside`; None if there is no other. Its session stays where it
    is.
    """
    if set(router.replicas) <= set(beside):
        return None
    with router.hidden(beside):
        decision = router.choose(prompt, max_tokens=params.max_tokens, group=params.group)
    router.begin(decision)
    return decision


async def send_call(
    router: Router,
    choose: Callable[[], Awaitable[tuple[R, Decision]]],
    ask: Callable[[R], Awaitable[T]],
    leave_out: Callable[[R, TriplaneError], None],
) -> T:
    """Result of a call, by the first of TRIES replicas that gives one.

    choose: a replica, and the decision that the router has begun. leave_out: called for a replica with its fault.
    Raises what `choose` and `leave_out` raise, the fault of the last replica, and other errors of `ask` at once.
    """
    for attempt in range(1, TRIES + 1):
        replica, decision = await choose()
        began = time.monotonic()
        try:
            result = await ask(replica)
            sampled = len(result.token_ids) if isinstance(result, Completion) else 0
            router.finish(decision, seconds=time.monotonic() - began, sampled=sampled)
            return result
        except REPLICA_FAULTS as error:
            leave_out(replica, error)
            if attempt == TRIES:
                raise
        finally:
            router.finish(decision)
    raise AssertionError("the loop returns or raises")


def common_error(said: str, faults: Iterable[Exception | None]) -> TriplaneError:
    """An error that says `said`: of the type that the faults have in common, else EngineUnreachable.

    faults: of the replicas; None: one has no fault, it is being updated.
    """
    found = list(faults)
    kinds = {type(fault) for fault in found if isinstance(fault, TriplaneError)}
    return kinds.pop()(said) if len(kinds) == 1 and None not in found else EngineUnreachable(said)
