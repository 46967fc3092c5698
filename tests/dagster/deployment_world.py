"""Candidates, steps and servers for tests of deployment: real ones, in the store that the tiny experiment left."""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import dagster as dg
import pyarrow as pa
import torch
import uvicorn
from dagster_world import World
from safetensors.torch import load_file, save_file

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, open_artifact
from contracts.checkpoints import WEIGHTS
from contracts.digests import digest_of
from contracts.store import Store
from inference.engines.builtin import BuiltinEngine
from inference.server.app import Application
from ops.deploy_decision import Decision, decide_deployment, read_decision
from ops.graph import SAMPLER
from ops.inputs import find_inputs, trainer_state_of
from ops.smoke import Smoke, play_smoke
from ops.state import IterationInputs, IterationState, Start
from ops.step import Step, StepProgress
from resources.experiment import Experiment
from resources.progress import no_progress
from resources.refs import require_ref, write_ref
from resources.registry import Registry
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource

Tensors = dict[str, torch.Tensor]


class NoProgress(StepProgress):
    """Dagster takes no observation outside a run."""

    def update(self, phase: str, done: float, total: float | None, **numbers: float) -> None:
        """Drop it."""


@dataclass(frozen=True)
class Stage:
    """One experiment of its own, whose candidates are those of the tiny experiment."""

    world: World
    experiment: Experiment
    base: ArtifactRef
    first: ArtifactRef
    """Trained from the base policy by iteration 0000."""
    second: ArtifactRef
    """Trained from `first` by iteration 0001."""

    @property
    def registry(self) -> Registry:
        return Registry(self.world.store, self.experiment.name)

    def step(self, candidate: ArtifactRef, parent: ArtifactRef, iteration: str) -> Step:
        """`sampler[iteration]`, about a candidate that was trained from `parent`."""
        context = dg.build_op_context()
        made = {"checkpoint": candidate, "evaluation": self._evaluation_of(candidate)}
        pinned = self.inputs(iteration, parent)
        progress = NoProgress(context, self.experiment.name, SAMPLER.name, iteration, no_progress)
        state = IterationState(self.experiment, self.world.store, iteration, made, pinned)
        return Step(SAMPLER, state, progress, context)

    def _evaluation_of(self, candidate: ArtifactRef) -> ArtifactRef:
        """The evaluation of 0000, as if this candidate had played it."""
        store = self.world.store
        made = open_artifact(store, require_ref(store, self.world.experiment.name, "evaluation", "0000"))
        run = open_artifact(store, made.manifest.parents["candidate_gate"])
        if run.manifest.parents["policy"] == candidate:
            return made.ref
        key = digest_of(["planted", candidate.digest])  # content digests say nothing about parents
        run = copied(store, run, {**run.manifest.parents, "policy": candidate}, key=key, kind="planted_run")
        parents = {**made.manifest.parents, "candidate_gate": run.ref}
        return copied(store, made, parents, key=key, kind="planted_evaluation").ref

    def inputs(self, iteration: str, parent: ArtifactRef) -> IterationInputs:
        made = find_inputs(self.world.store, self.world.experiment, "0000")
        assert made is not None
        start = Start(checkpoint=parent, trainer_state=trainer_state_of(self.world.store, parent))
        changes = {"experiment": self.experiment.name, "iteration": iteration, "policy": parent, "start": start}
        return made.model_copy(update=changes)

    def decide(
        self, candidate: ArtifactRef, parent: ArtifactRef, iteration: str, smoke: Callable[[], Smoke] | None = None
    ) -> Decision:
        """Decide as `sampler[iteration]` does, with a smoke episode on real engine and sandboxes unless `smoke` says
        otherwise.
        """
        step = self.step(candidate, parent, iteration)
        return read_decision(decide_deployment(step, smoke or (lambda: self.smoke(candidate, iteration))))

    def smoke(self, candidate: ArtifactRef, iteration: str = "0000") -> Smoke:
        sampler, sandboxes = SamplerResource(), SandboxesResource()
        suite = require_ref(self.world.store, self.world.experiment.name, "task_suite")
        try:
            return play_smoke(self.step(candidate, self.base, iteration), sampler, sandboxes, candidate, suite)
        finally:
            sampler.close()
            sandboxes.close()

    def promote(self, candidate: ArtifactRef, parent: ArtifactRef, iteration: str) -> None:
        state = trainer_state_of(self.world.store, candidate)
        assert self.registry.promote(candidate, state, parent=parent.digest, iteration=iteration) is not None


def stage_of(world: World, name: str, **changes: object) -> Stage:
    """A stage with a registry of its own. changes: of the experiment."""
    refs = [entry.policy for entry in Registry(world.store, world.experiment.name).history()[:2]]
    base = require_ref(world.store, world.experiment.name, "base_policy")
    write_ref(world.store, name, "base_policy", None, base)
    experiment = world.experiment.model_copy(update={"name": name, **changes})
    return Stage(world, experiment, base, *refs)


def no_smoke() -> Smoke:
    """For candidates that must not come as far."""
    raise AssertionError("a smoke episode was played")


def good_smoke() -> Smoke:
    """For tests that are about something else."""
    return Smoke(fault=None, task_id="none", outcome="completed")


def spoilt(world: World, candidate: ArtifactRef, tensor: str, value: float | None) -> ArtifactRef:
    """A copy of a checkpoint in which every number of one tensor is `value`; None: it lacks the tensor."""
    with ArtifactWriter(
        world.store,
        "checkpoint",
        digest_of([candidate.key, tensor, str(value)]),
        parents={},
        config={},
        code_version="1",
    ) as out:
        source = open_artifact(world.store, candidate)
        for name in source.names():
            shutil.copyfile(source.path(name), out.directory / name)
        weights = load_file(out.directory / WEIGHTS)
        if value is None:
            del weights[tensor]
        else:
            weights[tensor] = weights[tensor].float().fill_(value).to(weights[tensor].dtype)
        save_file(weights, out.directory / WEIGHTS)
        for name in source.names():
            out.add_file(name)
        return out.commit().ref


def copied(
    store: Store,
    source: Artifact,
    parents: Mapping[str, ArtifactRef] | None = None,
    tables: Mapping[str, pa.Table] | None = None,
    key: str | None = None,
    kind: str | None = None,
) -> Artifact:
    """A copy of an artifact under another key, with other parents and some other tables. kind: other tests count those
    of the source's kind.
    """
    parents, tables = parents or source.manifest.parents, tables or {}
    key = key or digest_of([source.ref.key, sorted(tables), {role: ref.digest for role, ref in parents.items()}])
    config = source.manifest.config
    with ArtifactWriter(store, kind or source.ref.kind, key, parents=parents, config=config, code_version="1") as out:
        for name in source.names():
            if name in tables:
                out.add_table(name, tables[name])
            else:
                shutil.copyfile(source.path(name), out.directory / name)
                out.add_file(name)
        return out.commit(meta=source.meta)


def planted_checkpoint(world: World, source: ArtifactRef, change: Callable[[Tensors], None]) -> Artifact:
    """A copy of a checkpoint whose tensors `change` edits."""
    original, key = open_artifact(world.store, source), digest_of([source.key, change.__name__])
    with ArtifactWriter(world.store, source.kind, key, parents={}, config={}, code_version="1") as out:
        for file in original.names():
            shutil.copyfile(original.path(file), out.directory / file)
        weights = load_file(out.directory / WEIGHTS)
        change(weights)
        save_file(weights, out.directory / WEIGHTS)
        for file in original.names():
            out.add_file(file)
        return out.commit(meta=original.meta)


def an_expert_of_zeros(weights: Tensors) -> None:
    name = next(name for name in weights if "experts.0.down_proj.weight" in name and "scale" not in name)
    weights[name] = torch.zeros_like(weights[name].float()).to(weights[name].dtype)


def doubled_scales(weights: Tensors) -> None:
    for name in weights:
        if name.endswith("_scale_inv"):
            weights[name] = weights[name] * 2


def saturated_codes(weights: Tensors) -> None:
    for name, tensor in weights.items():
        if f"{name}_scale_inv" in weights:
            weights[name] = (tensor.float() * 4).clamp(-448, 448).to(tensor.dtype)


@contextmanager
def serving(
    policy: Artifact, application: type[Application] = Application, engine_class: type[BuiltinEngine] = BuiltinEngine
) -> Iterator[str]:
    """Base URL of a real server of `policy`, in a thread."""
    app = application(lambda directory, version: engine_class(directory, version, threads=1), "policy")
    asyncio.run(app.open(policy.directory(), policy.ref.digest))
    server = uvicorn.Server(uvicorn.Config(app.starlette(), host="127.0.0.1", port=0, log_level="warning"))
    started = threading.Event()

    async def run() -> None:
        ends = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.02)
        started.set()
        await ends
        await app.close()

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    assert started.wait(60)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}/v1"
    finally:
        server.should_exit = True
        thread.join(30)
