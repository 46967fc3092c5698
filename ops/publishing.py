"""The decision about a candidate, and its way into the registry: by compare-and-swap, so an old backfill never promotes backwards."""

from __future__ import annotations

from typing import Any, Literal

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, Frozen, find_artifact, open_artifact
from contracts.tasks import Split
from curation.statistics import PairedDifference, non_inferior
from ops import keys
from ops.inputs import IterationInputs, trainer_state_of
from ops.step import Step
from resources.registry import LivePolicy, Registry

Verdict = Literal["live", "refused", "stale"]


class Decision(Frozen):
    """What became of a candidate."""

    decision: Verdict
    """live: promoted. refused: not shown to be non-inferior. stale: good enough, but its parent was no longer live."""
    reasons: list[str]
    candidate: ArtifactRef
    parent: ArtifactRef
    pointer_number: int | None
    """Place in the registry's history, of a candidate that went live."""


def read_decision(artifact: Artifact) -> Decision:
    """The content of a `sampler` artifact."""
    return Decision.model_validate(artifact.json("decision.json"))


def publish(step: Step, inputs: IterationInputs, candidate: ArtifactRef, evaluation: ArtifactRef) -> Artifact:
    """Decide about a candidate and act on it; a decision already taken is reported again and changes nothing."""
    parent = inputs.start.checkpoint
    key = keys.decision_key(step.experiment, step.iteration, candidate, parent, evaluation)
    found = find_artifact(step.store, "sampler", key)
    if found is not None:
        return found
    difference = PairedDifference(
        **open_artifact(step.store, evaluation).json("evaluation.json")[Split.GATE.value]["difference"]
    )
    decision = _decide(step, candidate, parent, difference)
    parents = {"candidate": candidate, "parent": parent, "evaluation": evaluation}
    config: dict[str, Any] = keys.decision_slice(step.experiment, step.iteration)
    with ArtifactWriter(
        step.store, "sampler", key, parents=parents, config=config, code_version=keys.DECISION_VERSION
    ) as out:
        out.add_json("decision.json", decision.model_dump(mode="json"))
        return out.commit(meta={"decision": decision.decision, "iteration": step.iteration, "policy": candidate.digest})


def _decide(step: Step, candidate: ArtifactRef, parent: ArtifactRef, difference: PairedDifference) -> Decision:
    def decided(verdict: Verdict, reason: str, number: int | None = None) -> Decision:
        return Decision(decision=verdict, reasons=[reason], candidate=candidate, parent=parent, pointer_number=number)

    if candidate.digest == parent.digest:
        return decided("refused", "candidate equals its parent: nothing was learned")
    judgement = non_inferior(difference, step.experiment.promotion.margin)
    if not judgement.holds:
        return decided("refused", judgement.sentence)
    registry = Registry(step.store, step.experiment.name)
    state = trainer_state_of(step.store, candidate)
    # a run killed between promotion and this record finds its own entry
    entry = registry.promote(candidate, state, parent=parent.digest, iteration=step.iteration) or _own_entry(
        registry, step, candidate
    )
    if entry is not None:
        return decided("live", judgement.sentence, entry.number)
    live = registry.live()
    now = live.policy.short if live else "nothing"
    return decided("stale", f"{judgement.sentence}; but its parent {parent.short} is not live any more, {now} is")


def _own_entry(registry: Registry, step: Step, candidate: ArtifactRef) -> LivePolicy | None:
    entry = registry.find(candidate.digest)
    return entry if entry is not None and entry.iteration == step.iteration else None
