"""Find artifacts whose step has another code version now.

Stale work stays readable and in use. A step that is materialized again is made anew, under another key, and so is what
depends on it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from contracts.artifacts import Artifact, find_artifact
from contracts.store import Store
from curation.dataset import DATASET_VERSION
from curation.rewards import REWARDS_VERSION
from curation.tasks.demonstrations import DEMONSTRATIONS_VERSION
from curation.tasks.importing.suite import IMPORT_SUITE_VERSION
from curation.tasks.suite import SUITE_VERSION
from curation.tokenizer import TOKENIZER_VERSION
from inference.rollouts import ROLLOUTS_VERSION
from ops import keys
from resources.refs import read_artifact
from trainer.config import GRPO_VERSION, IMPORT_VERSION, SFT_VERSION

_OF_ITERATIONS = {
    "iteration_inputs": keys.INPUTS_VERSION,
    "prompts": keys.PROMPTS_VERSION,
    "rollouts": ROLLOUTS_VERSION,
    "rewards": REWARDS_VERSION,
    "dataset": DATASET_VERSION,
    "checkpoint": GRPO_VERSION,
    "evaluation": keys.EVALUATION_VERSION,
    "sampler": keys.DECISION_VERSION,
}
_OF_PARENTS = {
    "tokenizer": TOKENIZER_VERSION,
    "demonstrations": DEMONSTRATIONS_VERSION,
    "evaluation_run": keys.EVALUATION_RUN_VERSION,
}


@dataclass(frozen=True)
class StaleStep:
    """One step whose code version has changed."""

    step: str
    iterations: tuple[str, ...]
    """In order; empty for a step that no iteration has."""
    version: str
    """That made it."""
    now: str
    """This Triplane's."""

    def __str__(self) -> str:
        first, last = (self.iterations or ("",))[0], (self.iterations or ("",))[-1]
        where = f" of {first}" + (f" to {last}" if last != first else "") if self.iterations else ""
        return f"{self.step}{where}: made by version {self.version} of the step, which is {self.now} now"


def stale_steps(store: Store, experiment: str, *, newest: bool = False) -> list[StaleStep]:
    """Steps of everything that `experiment` materialized last whose version has changed, in graph order.

    newest: look only at the newest iteration of each step, which takes the same time however many there are.
    """
    found: dict[tuple[str, str, str], list[str]] = {}
    for step, iteration, version, now in _versions(store, experiment, newest):
        if version != now:
            iterations = found.setdefault((step, version, now), [])
            if iteration is not None and iteration not in iterations:
                iterations.append(iteration)
    return [StaleStep(step, tuple(iterations), version, now) for (step, version, now), iterations in found.items()]


def _versions(store: Store, experiment: str, newest: bool) -> Iterator[tuple[str, str | None, str, str]]:
    """(step, iteration, version that made it, current version) of each materialized asset."""
    suite, base = (read_artifact(store, experiment, step) for step in ("task_suite", "base_policy"))
    if suite is not None:
        imported = suite.manifest.config.get("kind") == "import"
        yield "task_suite", None, suite.manifest.code_version, IMPORT_SUITE_VERSION if imported else SUITE_VERSION
    if base is not None:
        yield from _of_parents(store, "base_policy", None, base)
        made_here = "demonstrations" in base.manifest.parents
        yield "base_policy", None, base.manifest.code_version, SFT_VERSION if made_here else IMPORT_VERSION
    for step, now in _OF_ITERATIONS.items():
        iterations = sorted({key.split("/")[4] for key in store.list(f"pointers/assets/{experiment}/{step}/")})
        for iteration in iterations[-1:] if newest else iterations:
            made = read_artifact(store, experiment, step, iteration)
            if made is not None:
                yield from _of_parents(store, step, iteration, made)
                yield step, iteration, made.manifest.code_version, now


def _of_parents(
    store: Store, step: str, iteration: str | None, made: Artifact
) -> Iterator[tuple[str, str | None, str, str]]:
    """Versions of parts of a step that are artifacts of their own; parts of one kind have one version."""
    for ref in {ref.kind: ref for ref in made.manifest.parents.values()}.values():
        part = find_artifact(store, ref.kind, ref.key) if ref.kind in _OF_PARENTS and step != ref.kind else None
        if part is not None:
            yield f"{step} ({ref.kind})", iteration, part.manifest.code_version, _OF_PARENTS[ref.kind]
