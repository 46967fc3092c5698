"""Decide whether to deploy a candidate, and promote it in the registry by compare-and-swap, so that a late backfill
never replaces a newer policy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from contracts.artifacts import Artifact, ArtifactRef, Frozen, open_artifact
from contracts.failpoints import failpoint
from contracts.tasks import Split
from curation.statistics import NonInferiority, PairedDifference, non_inferior
from ops.inputs import trainer_state_of
from ops.smoke import Smoke
from ops.soundness import fault_of_candidate
from ops.step import Step
from resources.errors import NotMaterialized
from resources.refs import read_ref
from resources.registry import Registry

Verdict = Literal["live", "refused", "stale"]
SMOKE_FILE = "smoke.json"
PARENT_IS_BEST = "its parent is the best policy so far on the gate"
NOT_WORSE_THAN_PARENT, NOT_WORSE_THAN_BEST = "not_worse_than_parent", "not_worse_than_best"


class Decision(Frozen):
    """Deploy decision about a candidate with its reasons."""

    decision: Verdict
    """live: promoted. refused: not shown to be non-inferior, or not to be served. stale: good enough, but its parent
    was no longer live.
    """
    reasons: list[str]
    candidate: ArtifactRef
    parent: ArtifactRef
    pointer_number: int | None
    """Place in the registry's history, of a candidate that went live."""


def read_smoke(artifact: Artifact) -> Smoke | None:
    """Smoke episode of a decision, or None if none was played."""
    return Smoke.model_validate(artifact.json(SMOKE_FILE)) if SMOKE_FILE in artifact.names() else None


def read_decision(artifact: Artifact) -> Decision:
    """Content of a `sampler` artifact."""
    return Decision.model_validate(artifact.json("decision.json"))


def decide_deployment(step: Step, smoke: Callable[[], Smoke]) -> Artifact:
    """Deploy decision about a candidate, as a `sampler` artifact; promotes the candidate if it passes.

    An existing decision is returned and changes nothing. smoke: plays the smoke episode of a candidate that is good
    enough.
    """
    found = step.work.find()
    if found is not None:
        return found
    candidate, parent = step.parent("candidate"), step.parent("parent")
    evaluation = open_artifact(step.store, step.parent("evaluation"))
    _require_current(step, evaluation, candidate)
    gate = check_gate(evaluation, parent, step.experiment.promotion.margin)
    decision, played = _decide(step, candidate, parent, gate, smoke)
    with step.work.writer() as out:
        out.add_json("decision.json", decision.model_dump(mode="json"))
        if played is not None:
            out.add_json(SMOKE_FILE, played.model_dump(mode="json"), telemetry=True)
        return out.commit(meta={"decision": decision.decision, "iteration": step.iteration, "policy": candidate.digest})


def _require_current(step: Step, evaluation: Artifact, candidate: ArtifactRef) -> None:
    """Raise NotMaterialized for an evaluation of another candidate, or with another confidence than is asked for, and
    for a candidate that was trained before its dataset was made again, e.g. without quarantined episodes.
    """
    where = f"{step.experiment.name}/{step.iteration}"
    dataset = read_ref(step.store, step.experiment.name, "dataset", step.iteration)
    trained = open_artifact(step.store, candidate).manifest.parents.get("dataset")
    if dataset is not None and trained is not None and trained.digest != dataset.digest:
        raise NotMaterialized(
            f"the candidate of {where} was trained on dataset {trained.short}, which was made again since and is"
            f" {dataset.short}: materialize checkpoint and what follows again"
        )
    played = open_artifact(step.store, evaluation.manifest.parents["candidate_gate"]).manifest.parents["policy"]
    confidence = evaluation.manifest.config["confidence"]
    if played.digest != candidate.digest:
        why = f"of {played.short}, and the candidate is {candidate.short}"
    elif confidence != step.experiment.promotion.confidence:
        why = f"with confidence {confidence}, and promotion.confidence is {step.experiment.promotion.confidence}"
    else:
        return
    raise NotMaterialized(f"the evaluation of {where} is {why}: materialize it again")


def check_gate(evaluation: Artifact, parent: ArtifactRef, margin: float) -> NonInferiority:
    """Whether the gate accepts a candidate: not inferior to its parent nor to the best policy so far.

    Raises the errors of `gate_comparisons`.
    """
    found = gate_comparisons(evaluation, parent, margin).values()
    return NonInferiority(all(each.holds for each in found), "; ".join(each.sentence for each in found))


def gate_comparisons(evaluation: Artifact, parent: ArtifactRef, margin: float) -> dict[str, NonInferiority]:
    """Comparisons of a candidate on the gate, by name of the check that shows them.

    Raises NotMaterialized for an evaluation of an earlier version, which compares with the parent alone.
    """
    result = evaluation.json("evaluation.json")[Split.GATE.value]
    floor = result.get("floor")
    if floor is None:
        raise NotMaterialized(
            f"{evaluation.ref.uri} has no comparison with the best policy so far (made by version"
            f" {evaluation.manifest.code_version}): materialize evaluation again, then sampler"
        )
    with_parent = non_inferior(PairedDifference(**result["difference"]), margin)
    if floor["policy"] == parent.digest:
        with_best = replace(with_parent, sentence=PARENT_IS_BEST)
    else:
        best = f"the best policy so far, {floor['policy'][:12]}"
        with_best = non_inferior(PairedDifference(**floor["difference"]), margin, best)
    return {NOT_WORSE_THAN_PARENT: with_parent, NOT_WORSE_THAN_BEST: with_best}


def _decide(
    step: Step, candidate: ArtifactRef, parent: ArtifactRef, gate: NonInferiority, smoke: Callable[[], Smoke]
) -> tuple[Decision, Smoke | None]:
    """Decide, and promote a candidate that passes. Returns the decision, and the smoke episode if one was played."""

    def decided(verdict: Verdict, reason: str, number: int | None = None) -> Decision:
        return Decision(decision=verdict, reasons=[reason], candidate=candidate, parent=parent, pointer_number=number)

    if candidate.digest == parent.digest:
        return decided("refused", "candidate equals its parent: nothing was learned"), None
    registry = Registry(step.store, step.experiment.name)
    refusal, played = None, None
    if registry.promotion_of(candidate.digest, step.iteration) is None:
        refusal, played = _try_to_promote(step, registry, candidate, parent, gate, smoke)
    # asked last, whatever was found before: a killed run, or another one of this iteration, may have promoted it and
    # recorded nothing yet
    entry = registry.promotion_of(candidate.digest, step.iteration)
    if entry is not None:
        other = "" if gate.holds else f"; it went live as change {entry.number} before this was asked"
        return decided("live", f"{gate.sentence}{other}", entry.number), played
    if refusal is not None:
        return decided("refused", refusal), played
    return decided("stale", f"{gate.sentence}; but {why_stale(registry, candidate, parent)}"), played


def _try_to_promote(
    step: Step,
    registry: Registry,
    candidate: ArtifactRef,
    parent: ArtifactRef,
    gate: NonInferiority,
    smoke: Callable[[], Smoke],
) -> tuple[str | None, Smoke | None]:
    """Promote a candidate that passed the gate. Returns the reason if it was not promoted, and its smoke episode.

    Neither: its parent is not live, or not any more.
    """
    if not gate.holds:
        return gate.sentence, None
    if not registry.may_promote(candidate, parent.digest):
        return None, None
    evaluation = open_artifact(step.store, step.parent("evaluation"))
    fault = fault_of_candidate(step.store, candidate, parent, evaluation)
    if fault is not None:
        return f"{gate.sentence}; but {fault}", None
    played = smoke()
    if played.fault is not None:
        return f"{gate.sentence}; but its smoke episode failed: {played.fault}", played
    state = trainer_state_of(step.store, candidate)
    registry.promote(candidate, state, parent=parent.digest, iteration=step.iteration)
    failpoint("policy-promoted")
    return None, played


def why_stale(registry: Registry, candidate: ArtifactRef, parent: ArtifactRef) -> str:
    """Why a candidate that is good enough is not live."""
    live, before = registry.live(), registry.find(candidate.digest)
    if before is not None:
        return f"it was live before, as change {before.number}: `triplane rollback --to {before.number}` brings it back"
    now = live.policy.short if live else "nothing"
    how = f", restored by a rollback ({live.rollback.reason})" if live and live.rollback else ""
    return f"its parent {parent.short} is not live any more, {now} is{how}"
