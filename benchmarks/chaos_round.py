"""Rounds of disturbed iterations, compared with undisturbed ones."""

from __future__ import annotations

import os
import random
import subprocess
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks import chaos_findings as findings
from benchmarks.chaos_findings import Content, Tokens
from benchmarks.chaos_kills import FATAL, VICTIMS, Order, Victim, kill_all, orders, pick_victims
from benchmarks.chaos_lab import NAME, Lab
from contracts.errors import TriplaneError
from contracts.failpoints import FAIL_VARIABLE
from contracts.pointers import Pointer
from envd.sandbox.proctree import descendants
from ops.iteration_keys import iteration_key
from resources.refs import read_ref
from triplane_dagster.targets import Target

STUCK_S = 600.0
"""Seconds after which a run counts as hung."""
START_S = 2.0
"""Minimum start-up time of a run, in seconds."""
LOOK_S = 0.05
MISSES = 2
"""Runs that may end before they reach an ordered point; then a random kill replaces it."""
GOOD_RUNS = 6
"""Attempts at the run that finishes a round if the store has faults; without faults the first must succeed."""
Dealt = Callable[[int], None]


@dataclass
class Twin:
    """The undisturbed runs, with their results after each round."""

    lab: Lab
    iterations: int
    rounds: list[tuple[Content, Tokens, float]] = field(default_factory=list)
    """(content, tokens, seconds of the round)."""

    def round(self, number: int) -> tuple[Content, Tokens, float]:
        """Result of the undisturbed runs after round `number`, from 0."""
        while len(self.rounds) <= number:
            code, seconds = self.lab.iterate(self.iterations, STUCK_S)
            if code:
                raise TriplaneError(f"the undisturbed run ended with code {code}: {_last_line(self.lab)}")
            tokens = findings.read_tokens(self.lab, [], {})
            self.rounds.append((findings.read_content(self.lab.store()), tokens, seconds))
        return self.rounds[number]


class Disturbed:
    """The disturbed runs on one store, and the findings."""

    def __init__(self, lab: Lab, twin: Twin, seed: int, *, faults: bool) -> None:
        self._lab, self._twin, self._faults = lab, twin, faults
        self._kind = "s3" if lab.url else "local"
        self._chance = random.Random(f"{seed}/{self._kind}")
        self._spared = frozenset(descendants(os.getpid()))
        self._interruptions: list[float] = []
        self._tasks: dict[findings.Work, float] = {}
        """Interruption at which a task of an evaluation was first seen committed."""
        self._started: list[int] = []
        self._tokens, self._calm = Tokens(0, 0, 0), Tokens(0, 0, 0)
        self._round = self._artifacts = 0
        self.points: Counter[str] = Counter()
        self.victims: Counter[str] = Counter()
        self.store_faults: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        """Number of faults found, by name of the metric."""
        self.details: list[str] = []

    @property
    def dealt(self) -> int:
        """Number of kills so far."""
        return self.points.total() + self.victims.total()

    def run(self, kills: int, round_kills: int, dealt: Dealt) -> None:
        """Run rounds until `kills` kills are done."""
        plan = self._plan(kills)
        dealt(0)
        while plan and self._round < 2 * kills + 2:
            self._twin.round(self._round)  # first and alone, to measure the duration of the round
            ended_well = self._disturb(plan, min(kills, self.dealt + round_kills), dealt)
            if not ended_well and self._is_over():
                # killed after its work was done: the next command, which belongs to the next round, removes its
                # leftovers
                self._round += 1
                if plan:
                    continue
            if not ended_well:
                self._finish()
            self._compare()
            self._round += 1

    def _plan(self, kills: int) -> deque[tuple[Order | None, int]]:
        """Queue of (order, or None for a random kill; runs that missed it so far)."""
        named: list[Order | None] = list(orders(kills - kills // 2, self._kind, self._chance))
        rest = [*named[1:], *[None] * (kills // 2)]
        self._chance.shuffle(rest)
        return deque((each, 0) for each in [*named[:1], *rest])

    def _disturb(self, plan: deque[tuple[Order | None, int]], until: int, dealt: Dealt) -> bool:
        """Start the command repeatedly and kill it, until `until` kills are done or the round is over.

        Returns True if it ended successfully.
        """
        while plan and self.dealt < until:
            order, missed = plan.popleft()
            before = self.dealt
            unordered = 1 + sum(each is None for each, _ in plan)
            code = self._ordered(order) if order else self._at_random(min(until - self.dealt, unordered))
            for _ in range(self.dealt - before - 1):  # one run can get several random kills
                plan.remove(next(each for each in plan if each[0] is None))
            if self.dealt == before:
                plan.append((None, 0) if order is None or missed + 1 >= MISSES else (order, missed + 1))
            dealt(self.dealt)
            if code == 0 or self._is_over():
                return code == 0
        return False

    def _is_over(self) -> bool:
        """Whether the command had finished its work, so that a restart would begin the next round."""
        entry = Pointer(self._lab.store(), f"targets/{NAME}").current()
        target = Target.model_validate(entry.value) if entry else None
        return target is not None and target.done and target.first == self._round * self._twin.iterations

    def _ordered(self, order: Order) -> int:
        process, since = self._start(str(order))
        code = self._ended(process)
        hit = f"failpoint {order.point}: killed" in self._lab.said(since)
        self.points.update([order.point] if hit else [])
        self._lab.note(
            f"{order} {'killed' if hit else 'was not reached by'} {process.pid}, which ended with code {code}"
        )
        return code

    def _at_random(self, most: int) -> int:
        """Kill a random victim at a random time; repeat up to `most` times while the command survives."""
        horizon = self._expected_s()
        process, _ = self._start()
        for _ in range(most):
            victim: Victim = self._chance.choice(list(VICTIMS))
            if not self._strike(process, victim, self._chance.uniform(0.3, horizon)):
                break
            self.victims[victim] += 1
            if victim in FATAL:
                break
        return self._ended(process)

    def _strike(self, process: subprocess.Popen[bytes], victim: Victim, after_s: float) -> bool:
        """Kill the victim after `after_s`, as soon as it exists. Returns False if the command ended before."""
        due, stuck = time.monotonic() + after_s, time.monotonic() + STUCK_S
        while process.poll() is None and time.monotonic() < stuck:
            if time.monotonic() >= due and kill_all(pids := pick_victims(victim, process.pid, self._chance)):
                self._interruptions.append(time.time())
                self._lab.note(f"killed {victim} of {process.pid} after {after_s:.1f} s: {' '.join(map(str, pids))}")
                return True
            time.sleep(LOOK_S)
        self._lab.note(f"{process.pid} ended before {victim} could be killed after {after_s:.1f} s")
        return False

    def _start(self, kill_at: str = "") -> tuple[subprocess.Popen[bytes], int]:
        """Start the command. Returns its process, and the size of the log before."""
        fail_at = ""
        if self._faults and self._kind == "local" and self._chance.random() < 0.5:
            fail_at = f"store-write:{self._chance.randint(1, 60)}:{self._chance.choice(['EIO', 'ENOSPC'])}"
        since = self._lab.log.stat().st_size if self._lab.log.exists() else 0
        process = self._lab.start(self._twin.iterations, kill_at, fail_at)
        self._started.append(process.pid)
        return process, since

    def _ended(self, process: subprocess.Popen[bytes]) -> int:
        """Wait for the end of a run. Returns its exit code."""
        try:
            code = process.wait(STUCK_S)
        except subprocess.TimeoutExpired:
            self._found("runs_hung", f"run {process.pid} did not end within {STUCK_S:g} s")
            kill_all([process.pid, *descendants(process.pid)])
            code = process.wait()
        if code:
            self._interruptions.append(time.time())
            seen = dict.fromkeys(findings.committed_tasks(self._lab.store()), self._interruptions[-1])
            self._tasks = seen | self._tasks
        findings.reap(self._spared)
        return code

    def _expected_s(self) -> float:
        """Half of the undisturbed duration of the rest of the round, by its share of iterations, in seconds.

        Half, since the machine may be faster now and a late kill would miss. Later parts are killed after the next
        start.
        """
        _, _, seconds = self._twin.round(self._round)
        count, store = self._twin.iterations, self._lab.store()
        keys = [iteration_key(self._round * count + number) for number in range(count)]
        left = sum(read_ref(store, NAME, "sampler", key) is None for key in keys)
        return START_S + max(seconds - START_S, 1.0) * max(left, 0.5) / count / 2

    def _finish(self) -> None:
        """Let the command finish; it removes leftovers of killed runs."""
        for _ in range(GOOD_RUNS if self._faults else 1):
            code, _ = self._lab.iterate(self._twin.iterations, STUCK_S)
            if code == 0:
                return
            self._interruptions.append(time.time())
        raise TriplaneError(f"an undisturbed run ended with code {code}: {_last_line(self._lab)}")

    def _compare(self) -> None:
        lab, store = self._lab, self._lab.store()
        calm, self._calm, _ = self._twin.round(self._round)
        ours = findings.read_content(store)
        self._artifacts = len(ours.artifacts)
        self._found("artifacts_differing", *ours.differing(calm))
        self._found("histories_differing", *(["registry"] if ours.history != calm.history else []))
        self._found("artifacts_broken", *findings.broken_artifacts(store))
        self._found("processes_left", *map(str, findings.orphans(self._spared)))
        self._found("mounts_left", *findings.mounts_of(lab.folder))
        self._found("cgroups_left", *findings.groups_of(self._started))
        self._found("temporary_files_left", *findings.temporary_files(lab))
        self._found("unnamed_keys_left", *findings.unnamed_keys(store))
        self._found("uploads_left", *["upload"] * findings.pending_uploads(lab))
        self._tokens = findings.read_tokens(lab, self._interruptions, self._tasks)

    def _found(self, metric: str, *what: str) -> None:
        self.faults[metric] += len(what)
        self.details += [f"round {self._round}: {metric}: {each}" for each in what[:5]]

    def metrics(self, kills: int) -> dict[str, float]:
        """Metrics by their names in goals.yaml."""
        log = self._log()
        excess = self._tokens.sampled - self._calm.sampled
        return {
            "kills_missing": kills - self.dealt,
            "kills_at_points": self.points.total(),
            "kills_at_random": self.victims.total(),
            **{name: self.faults[name] for name in METRICS},
            "finished_groups_sampled_again": self._tokens.sampled_after_commit,
            "tokens_excess": excess,
            "tokens_excess_bound": self._tokens.lost_at_most,
            "tokens_beyond_bound": max(0, excess - self._tokens.lost_at_most),
            "tracebacks": log.count("Traceback (most recent call last)"),
        }

    def _log(self) -> str:
        return self._lab.log.read_text(errors="replace")

    def row(self) -> dict[str, Any]:
        """Row of the table."""
        return {
            "kills": self.dealt,
            "at points": self.points.total(),
            "at random": self.victims.total(),
            "rounds": self._round,
            "runs": len(self._started),
            "artifacts compared": self._artifacts,
            "tokens undisturbed": self._calm.sampled,
            "tokens disturbed": self._tokens.sampled,
            "lost at most": self._tokens.lost_at_most,
            "faults of the store": self.store_faults.total() + self._log().count(f"failed by {FAIL_VARIABLE}"),
        }

    def notes(self) -> list[str]:
        """Kills by point and victim, faults by kind, and faults found."""
        lines = [f"killed at {_counts(self.points)}", f"killed at random: {_counts(self.victims)}"]
        return [*lines, *([f"faults: {_counts(self.store_faults)}"] if self.store_faults else []), *self.details]


METRICS = (
    "artifacts_differing",
    "histories_differing",
    "artifacts_broken",
    "processes_left",
    "mounts_left",
    "cgroups_left",
    "temporary_files_left",
    "unnamed_keys_left",
    "uploads_left",
    "runs_hung",
)


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in sorted(counter.items())) or "nothing"


def _last_line(lab: Lab) -> str:
    lines = lab.log.read_text(errors="replace").strip().splitlines()
    return (lines[-1] if lines else "no output")[:500]
