"""What a run, step, training, group and episode ask of shared parts of a cluster, as `cluster_measure` finds it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

RECORDED = Path(__file__).parent / "cluster_costs.json"
"""Costs of an earlier measurement."""


@dataclass(frozen=True)
class ApiCosts:
    """Calls of the Kubernetes API."""

    trainer_minute: tuple[float, float]
    """Calls a minute of a training's driver: in its first minute, and later."""
    polls_step: float
    """Calls a minute for each step under way."""
    polls_run: float
    """Calls a minute for each run under way."""
    orphans: float
    """Calls a minute of the sensor that finds orphans."""
    launch_seconds: float
    """Shortest time between two launches of steps, which follow one another."""
    named: Mapping[str, int] = field(default_factory=dict)
    """Calls of the iteration by verb and resource."""


@dataclass(frozen=True)
class PostgresCosts:
    """What Dagster asks of PostgreSQL."""

    idle_sessions_minute: float
    """Sessions a minute of daemon and code server without an experiment and without a run."""
    experiment_sessions_minute: float
    """Those of each experiment, mostly ticks of its sensor."""
    poll_sessions: float
    """Sessions of one look of a run's pod at its event log."""
    rows_run: float
    """Rows of the event log of a run that belong to no step."""
    rows_step: float
    """Rows of a step."""
    bytes_row: float
    """Bytes of a row of the event log, with its indexes."""
    sessions: float
    """Sessions of the measured iteration."""
    run_seconds: float
    """Its seconds."""
    steps: int
    """Its steps."""
    steps_shard: float
    """Those of each shard."""
    peak_connections: float
    """Connections at once during it."""
    inserts_s: float
    """Events a second that this machine stored, clients included."""
    connects_s: float
    """Sessions a second that one client opened on this machine."""

    @property
    def sessions_step(self) -> float:
        """Sessions of a step: those of the iteration that are neither the daemon's nor polls of the run's pod."""
        idle = (self.idle_sessions_minute + self.experiment_sessions_minute) / 60
        rest = self.sessions - self.run_seconds * (idle + self.poll_sessions)
        return max(0.0, rest) / self.steps


@dataclass(frozen=True)
class S3Costs:
    """Requests of a store on S3."""

    iteration: Mapping[str, float]
    """Verb -> requests of an iteration that depend on neither groups nor episodes."""
    group: Mapping[str, float]
    """Verb -> requests of a group."""
    episode: Mapping[str, float]
    """Verb -> requests of an episode."""
    trainer_minute: float
    """GETs a minute of a training's driver, which looks for messages."""

    @staticmethod
    def fitted(found: Sequence[tuple[tuple[int, int], Mapping[str, int]]], trainer_minute: float) -> S3Costs:
        """From requests of iterations of (groups, group size): a warm-up, one to compare with, one of more groups of
        the same size, one of larger groups.
        """
        _, (small, few), (wide, more), (deep, larger) = found
        verbs = sorted({verb for _, each in found for verb in each})
        episode, group, rest = {}, {}, {}
        for verb in verbs:
            a, b, c = (each.get(verb, 0) for each in (few, more, larger))
            episode[verb] = max(0.0, (c - a) / (deep[0] * deep[1] - small[0] * small[1]))
            of_group = (b - a) / (wide[0] - small[0])  # with its episodes
            group[verb] = max(0.0, of_group - episode[verb] * small[1])
            rest[verb] = max(0.0, a - small[0] * (group[verb] + episode[verb] * small[1]))
        return S3Costs(rest, group, episode, trainer_minute)


@dataclass(frozen=True)
class Costs:
    """All of them."""

    api: ApiCosts
    postgres: PostgresCosts
    s3: S3Costs
    note: str = ""
    """Where they come from."""

    def write(self, path: Path) -> None:
        """Write them as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")


def read_costs(path: Path = RECORDED) -> Costs:
    """Costs that `Costs.write` wrote."""
    read = json.loads(path.read_text())
    api = {**read["api"], "trainer_minute": tuple(read["api"]["trainer_minute"])}
    return Costs(ApiCosts(**api), PostgresCosts(**read["postgres"]), S3Costs(**read["s3"]), read["note"])
