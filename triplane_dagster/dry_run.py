"""What a run would do, without doing it: every step with its key, whether its work is already there, and where it would
run.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from contracts.artifacts import Artifact, ArtifactRef, find_artifact
from contracts.digests import digest_of
from contracts.store import Store, open_store
from curation.tasks.build import planned_key
from inference.engines.config import OpenAIConfig, VllmConfig
from ops import keys
from ops.evaluation import readings_of
from ops.floor import find_floor
from ops.gate_power import gate_note
from ops.inputs import IterationInputs, find_inputs
from resources.experiment import Experiment, ImportedBase
from resources.launcher import local_refusal
from resources.refs import read_ref
from triplane_dagster.iterations import next_partition


@dataclass(frozen=True)
class PlannedStep:
    """One step of the next iteration, or of the base."""

    step: str
    partition: str | None
    key: str | None
    """Action key; None while it depends on what an earlier step will make."""
    state: str
    """found: its work is committed. will run: it is not, or can't be known yet."""
    config: str
    """Digest of the step's own slice of the experiment."""
    where: str
    """What would run it."""
    note: str | None = None
    """What to know before it runs: of the decision, how often it would be wrong."""


def plan_of(experiment: Experiment, store: Store | None = None) -> list[PlannedStep]:
    """The base assets and the next iteration, in graph order."""
    plan = _Plan(experiment, store or open_store())
    plan.base()
    plan.iteration(next_partition(plan.store, experiment))
    return plan.rows


class _Plan:
    def __init__(self, experiment: Experiment, store: Store) -> None:
        self.experiment, self.store = experiment, store
        self.rows: list[PlannedStep] = []
        self._suite: ArtifactRef | None = None
        self._base: ArtifactRef | None = None

    def base(self) -> None:
        """task_suite and base_policy."""
        tasks = self.experiment.tasks
        suite = self._add(
            "task_suite", None, planned_key(tasks, self.store), tasks.model_dump(mode="json"), self._sandboxes()
        )
        self._suite = suite.ref if suite else None
        base = self.experiment.base
        if isinstance(base, ImportedBase):
            ref = read_ref(self.store, self.experiment.name, "base_policy")
            found = self._add(
                "base_policy",
                None,
                ref.key if ref else None,
                base.model_dump(mode="json"),
                f"import of {base.path}",
                kind="checkpoint",
            )
        else:
            key = self._sft_key()
            found = self._add(
                "base_policy", None, key, keys.sft_slice(self.experiment, base), self._launcher(), kind="checkpoint"
            )
        self._base = found.ref if found else None

    def iteration(self, partition: str) -> None:
        """The partitioned assets at `partition`."""
        experiment = self.experiment
        inputs = find_inputs(self.store, experiment, partition)
        place = {"experiment": experiment.name, "iteration": partition}
        self._add("iteration_inputs", partition, keys.inputs_key(experiment, partition), place, "this process")
        prompts = self._prompts(partition, inputs)
        rollouts = self._step(
            "rollouts",
            partition,
            keys.rollouts_slice(experiment, partition),
            self._engine(),
            (
                keys.rollouts_key(experiment, partition, inputs.policy, prompts, inputs.task_suite)
                if inputs and prompts
                else None
            ),
        )
        rewards = self._step(
            "rewards",
            partition,
            experiment.rewards.slice(),
            self._sandboxes(),
            keys.rewards_key(experiment, rollouts, inputs.task_suite) if inputs and rollouts else None,
        )
        dataset = self._step(
            "dataset",
            partition,
            experiment.dataset.model_dump(mode="json"),
            "this process (DuckDB)",
            keys.dataset_key(experiment, rollouts, rewards) if rollouts and rewards else None,
        )
        start = inputs.start if inputs else None
        candidate = self._step(
            "checkpoint",
            partition,
            keys.training_slice(experiment, partition),
            self._launcher(),
            (
                keys.checkpoint_key(experiment, partition, dataset, start.checkpoint, start.trainer_state)
                if start and dataset
                else None
            ),
        )
        evaluation = self._evaluation(partition, inputs, candidate)
        self._step(
            "sampler",
            partition,
            keys.decision_slice(experiment, partition),
            self._deployment(),
            (
                keys.decision_key(experiment, partition, candidate, start.checkpoint, evaluation)
                if start and candidate and evaluation
                else None
            ),
        )
        self.rows[-1] = replace(self.rows[-1], note=gate_note(self.store, experiment))
        self._add("report", partition, None, {}, "this process")  # its key depends on what the others will make

    def _prompts(self, partition: str, inputs: IterationInputs | None) -> ArtifactRef | None:
        cursor = inputs.cursor if inputs else 0
        return self._step(
            "prompts",
            partition,
            keys.prompts_slice(self.experiment, partition, cursor),
            "this process",
            keys.prompts_key(self.experiment, partition, inputs.task_suite, cursor) if inputs else None,
        )

    def _evaluation(
        self, partition: str, inputs: IterationInputs | None, candidate: ArtifactRef | None
    ) -> ArtifactRef | None:
        experiment = self.experiment
        runs: dict[str, ArtifactRef] = {}
        policies = {"parent": inputs.start.checkpoint if inputs else None, "candidate": candidate}
        readings = readings_of(experiment)
        for each in readings:
            for role, policy in policies.items():
                key = each.key(experiment, policy, inputs.task_suite) if inputs and policy else None
                run = find_artifact(self.store, "evaluation_run", key) if key else None
                if run is not None:
                    runs[f"{role}_{each.name}"] = run.ref
        complete = len(runs) == 2 * len(readings)
        if inputs and complete:
            floor = find_floor(self.store, experiment, inputs.start.checkpoint, inputs.base, inputs.task_suite)
            runs |= {"best_gate": floor.run.ref} if floor else {}
        slices = {each.name: each.slice(experiment) for each in readings}
        return self._step(
            "evaluation", partition, slices, self._engine(), keys.evaluation_key(experiment, runs) if complete else None
        )

    def _sft_key(self) -> str | None:
        base = self.experiment.base
        tokenizer = find_artifact(self.store, "tokenizer", keys.tokenizer_key(self.experiment))
        if isinstance(base, ImportedBase) or tokenizer is None:
            return None
        demonstrations = find_artifact(
            self.store, "demonstrations", keys.demonstrations_key(self.experiment, base, tokenizer.ref)
        )
        return keys.sft_key(self.experiment, base, tokenizer.ref, demonstrations.ref) if demonstrations else None

    def _step(self, step: str, partition: str, slice_: object, where: str, key: str | None) -> ArtifactRef | None:
        found = self._add(step, partition, key, slice_, where)
        return found.ref if found else None

    def _add(
        self, step: str, partition: str | None, key: str | None, slice_: object, where: str, kind: str | None = None
    ) -> Artifact | None:
        found = find_artifact(self.store, kind or step, key) if key else None
        state = "found" if found else "will run"
        self.rows.append(PlannedStep(step, partition, key, state, digest_of(slice_), where))
        return found

    def _engine(self) -> str:
        engine, prompts = self.experiment.engine, self.experiment.prompts
        address = engine.base_url if isinstance(engine, OpenAIConfig | VllmConfig) else None
        place = f" at {address}" if address else ""
        return (
            f"{engine.kind} engine{place}, {prompts.workers} worker(s) x {self.experiment.rollouts.concurrency}"
            " episodes"
        )

    def _deployment(self) -> str:
        deployment = self.experiment.deployment
        canary = f"canary {deployment.canary}" if deployment.canary else self._engine().partition(",")[0]
        return f"smoke episode on {canary}; {len(deployment.servers)} server(s) to swap"

    def _sandboxes(self) -> str:
        sandboxes = self.experiment.sandboxes
        return f"envd at {sandboxes.address}" if sandboxes.address else f"envd started here ({sandboxes.backend})"

    def _launcher(self) -> str:
        launcher = self.experiment.trainer.launcher
        device = f"{launcher.gpus} GPU(s)" if launcher.gpus else "CPU"
        refusal = local_refusal(launcher.nodes, launcher.gpus)
        place = f"{launcher.kind} launcher, {launcher.nodes} node(s), {device}"
        return f"{place}: WILL BE REFUSED ({refusal})" if refusal else place
