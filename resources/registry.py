"""Registry of the live policy. A materialized policy is not live until the registry names it.

    promote:  A -> B          B's parent was live
    rollback: A -> B -> A     one more entry; history is never rewritten

Every change is a compare-and-swap on the number of the last entry: of two concurrent changes one succeeds, the other is
refused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from contracts.artifacts import ArtifactRef, Frozen
from contracts.pointers import Pointer, PointerEntry
from contracts.store import Store
from resources.errors import AlreadyLive, RegistryError

BASE = "base"
"""Stands for the base policy where an iteration is expected."""
_NUMBER_DIGITS = 5
"""A longer decimal number is read as the beginning of a digest."""


class Rollback(Frozen):
    """Reason and origin of a rollback."""

    to: int
    """Number of the restored promotion; 0: the base policy."""
    reason: str
    """Reason that the operator gave."""
    unix: float
    """Time of the rollback, in seconds since 1970."""
    request: str | None = None
    """Id of the request, e.g. of a Dagster run and its relaunches; None: the request is never repeated."""


class LivePolicy(Frozen):
    """Registry entry of one policy that is, or was, live."""

    number: int
    """Position in the history, from 1."""
    policy: ArtifactRef
    """Checkpoint of the policy."""
    trainer_state: ArtifactRef
    """State that training continues from."""
    parent: str
    """Digest of the policy it replaced."""
    iteration: str
    """Partition key of the iteration that made it, or "base"."""
    rollback: Rollback | None = None
    """None for a promotion."""

    @property
    def origin(self) -> int:
        """Number of the promotion that first made this policy live; 0 for the base policy."""
        return self.rollback.to if self.rollback else self.number

    @property
    def made_by(self) -> str:
        """What made the policy, as text."""
        return "the base policy" if self.iteration == BASE else f"made by iteration {self.iteration}"

    @property
    def came_by(self) -> str:
        """How the policy went live, as text."""
        how = f"by a rollback ({self.rollback.reason})" if self.rollback else "by promotion"
        return f"change {self.number} of the registry, {how}"


class Restorable(Frozen):
    """Policy that was live and can become live again."""

    number: int
    """Number of the promotion that first made it live; 0: the base policy."""
    policy: ArtifactRef
    trainer_state: ArtifactRef
    iteration: str
    """Partition key of the iteration that made it, or "base"."""


@dataclass(frozen=True)
class BasePolicy:
    """Policy that acts until one is promoted."""

    policy: ArtifactRef
    trainer_state: Callable[[], ArtifactRef]
    """Finds the state that training continues from; called only if needed. Raises NotMaterialized."""


class Registry:
    """History of the live policy of one experiment."""

    def __init__(self, store: Store, experiment: str) -> None:
        self.experiment = experiment
        self._pointer = Pointer(store, f"live/{experiment}")

    def live(self) -> LivePolicy | None:
        """Entry of the live policy, or None if no policy was promoted and the base policy acts."""
        entry = self._pointer.current()
        return _policy(entry) if entry else None

    def history(self) -> list[LivePolicy]:
        """All entries, oldest first."""
        return [_policy(entry) for entry in self._pointer.history()]

    def find(self, digest: str) -> LivePolicy | None:
        """Latest entry that made the policy of this digest live, or None."""
        return next((entry for entry in reversed(self.history()) if entry.policy.digest == digest), None)

    def promotion_of(self, digest: str, iteration: str) -> LivePolicy | None:
        """Entry that promoted an iteration's candidate, or None. The candidate may no longer be live."""
        return next(
            (
                entry
                for entry in self.history()
                if entry.rollback is None and entry.policy.digest == digest and entry.iteration == iteration
            ),
            None,
        )

    def may_promote(self, candidate: ArtifactRef, parent: str) -> bool:
        """Whether `promote` would succeed now."""
        return _may_follow(self.history(), candidate, parent)

    def promote(
        self, candidate: ArtifactRef, trainer_state: ArtifactRef, *, parent: str, iteration: str
    ) -> LivePolicy | None:
        """Make `candidate` live if its parent (a digest) is still live.

        Returns None, and changes nothing, if another policy is live.

        A policy is promoted once: after a rollback only another rollback restores it. The first promotion accepts any
        parent, since the base policy counts as live.
        """
        history = self.history()
        if not _may_follow(history, candidate, parent):
            return None
        entry = LivePolicy(
            number=(history[-1].number if history else 0) + 1,
            policy=candidate,
            trainer_state=trainer_state,
            parent=parent,
            iteration=iteration,
        )
        return entry if self._append(entry) else None

    def restorable(self, to: str | None, base: BasePolicy | None) -> Restorable:
        """Policy that a rollback names.

        to: "base", the number of a change, the beginning of the digest of a policy that was live, or None for the
        policy from which the live one was made live. base: None if there is no base policy. Raises RegistryError if no
        policy or several match, AlreadyLive if the policy is live.
        """
        history = self.history()
        live = history[-1] if history else None
        if live is None or (live.origin == 0 and to is None):
            raise RegistryError(f"the base policy of {self.experiment} is live: there is no earlier policy")
        number = _before(history, live) if to is None else _named(to, history, base)
        chosen = None if number is None else history[number - 1] if number else base
        if chosen is None:
            raise RegistryError(
                f"{to or BASE!r} matches no single policy that was live in {self.experiment}: give base, a change from"
                f" 1 to {len(history)}, or more digits of a digest; `triplane rollback -e {self.experiment} --list`"
                " lists them"
            )
        if chosen.policy.digest == live.policy.digest:
            raise AlreadyLive(f"policy {live.policy.short} is already live ({live.came_by}): nothing to do")
        if isinstance(chosen, BasePolicy):
            return Restorable(number=0, policy=chosen.policy, trainer_state=chosen.trainer_state(), iteration=BASE)
        return Restorable(
            number=chosen.number, policy=chosen.policy, trainer_state=chosen.trainer_state, iteration=chosen.iteration
        )

    def rollback_of(self, request: str) -> LivePolicy | None:
        """Entry that carried out `request`, or None. Its policy may no longer be live."""
        return _carried_out(self.history(), request)

    def rollback(self, target: Restorable, reason: str, *, expected: int, request: str | None = None) -> LivePolicy:
        """Make an earlier policy live again by appending an entry. expected: number of the live entry that the caller
        has seen.

        A request is carried out once; repeating it returns the same entry. Raises RegistryError, and changes nothing,
        if another change came first.
        """
        history = self.history()
        done = _carried_out(history, request) if request else None
        if done is not None:
            return done
        live = history[-1] if history else None
        if live is not None and live.number == expected:
            back = Rollback(to=target.number, reason=reason, unix=time.time(), request=request)
            entry = LivePolicy(
                number=expected + 1,
                policy=target.policy,
                trainer_state=target.trainer_state,
                parent=live.policy.digest,
                iteration=target.iteration,
                rollback=back,
            )
            if self._append(entry):
                return entry
            if request:
                return self.rollback(target, reason, expected=expected, request=request)
            live = self.live()
        now = f"{live.policy.short}, {live.made_by} ({live.came_by})" if live else "the base policy"
        raise RegistryError(
            f"the live policy of {self.experiment} changed concurrently (now {now}), nothing was rolled back: retry"
        )

    def standing(self, number: int | None = None) -> list[int]:
        """Promotions that a promotion's policy builds on, including itself, oldest first. number: None for the live
        policy, 0 for the base.
        """
        history = self.history()
        live = history[-1].origin if history else 0
        return _lines(history)[live if number is None else number]

    def rolled_back(self) -> dict[str, LivePolicy]:
        """Former live policies that the live one does not build on, by digest, each with the rollback that undid it."""
        history = self.history()
        lines = _lines(history)
        standing = lines[history[-1].origin] if history else []
        undone: dict[str, LivePolicy] = {}
        for entry in history:
            if entry.rollback is None and entry.number not in standing:
                later = (each for each in history[entry.number :] if each.rollback is not None)
                undone[entry.policy.digest] = next(each for each in later if entry.number not in lines[each.origin])
        return undone

    def _append(self, entry: LivePolicy) -> bool:
        value = entry.model_dump(mode="json", exclude={"number"}, exclude_none=True)
        return self._pointer.advance(value, entry.number - 1)


def _may_follow(history: list[LivePolicy], candidate: ArtifactRef, parent: str) -> bool:
    if history and history[-1].policy.digest != parent:
        return False
    return all(entry.policy.digest != candidate.digest for entry in history)


def _carried_out(history: list[LivePolicy], request: str) -> LivePolicy | None:
    return next((entry for entry in history if entry.rollback and entry.rollback.request == request), None)


def _lines(history: list[LivePolicy]) -> dict[int, list[int]]:
    """For every promotion, and for 0 (the base policy), the promotions that its policy builds on, including itself."""
    lines: dict[int, list[int]] = {0: []}
    origin = 0
    for entry in history:
        if entry.rollback is None:
            lines[entry.number] = [*lines[origin], entry.number]
        origin = entry.origin
    return lines


def _policy(entry: PointerEntry) -> LivePolicy:
    return LivePolicy(number=entry.number, **entry.value)


def _before(history: list[LivePolicy], live: LivePolicy) -> int:
    """Number of the promotion that was live when the live policy was promoted; 0 for the base policy."""
    return history[live.origin - 2].origin if live.origin > 1 else 0


def _named(to: str, history: list[LivePolicy], base: BasePolicy | None) -> int | None:
    """Number of the promotion that `to` names, 0 for the base policy, None if no single one matches."""
    if to == BASE:
        return 0
    if to.isdecimal() and len(to) <= _NUMBER_DIGITS:
        number = int(to)
        return history[number - 1].origin if 0 < number <= len(history) else None
    known = {entry.policy.digest: entry.origin for entry in history} | ({base.policy.digest: 0} if base else {})
    found = [number for digest, number in known.items() if digest.startswith(to)]
    return found[0] if len(found) == 1 and to else None
