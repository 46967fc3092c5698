"""Checks that show on the asset pages whether an iteration is healthy. None of them stops a run: `sampler` decides.

Thresholds stand here or where they also decide, each with its reason. A failed check says in its metadata "why".
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import dagster as dg
import pyarrow as pa

from contracts.artifacts import Artifact
from contracts.episodes import Outcome, lacks_variance
from contracts.errors import SchemaError
from curation.statistics import NonInferiority
from ops.after_swap import is_automatic
from ops.deploy_decision import NOT_WORSE_THAN_PARENT, PARENT_IS_BEST, Decision
from ops.fp8_health import code_facts, code_faults
from ops.soundness import MAX_TAMPERED
from resources.registry import LivePolicy

INFRASTRUCTURE_HELD, REWARD_VARIES, TAMPERING_IS_RARE = "infrastructure_held", "reward_varies", "tampering_is_rare"
AGREE, FP8, FINITE_LOSS = "sampler_and_trainer_agree", "fp8_codes_are_sound", "finite_loss"
WENT_LIVE = "went_live"

MAX_INFRASTRUCTURE = 0.02
"""Share of episodes. Every fault was retried; more of them bias which tasks train (long ones fail first)."""
MAX_WITHOUT_VARIANCE = 0.75
"""Share of groups. Groups of equal rewards have no advantage; above it, most of the sampling was in vain."""
MAX_MISMATCH = 0.01
"""KL(sampler || trainer), estimate k3, in nats a token. The built-in engine stays below 1e-9 and healthy FP8 servers
near 1e-3; training on tokens of another distribution starts to diverge around 1e-2.
"""
_WARN, _ERROR = dg.AssetCheckSeverity.WARN, dg.AssetCheckSeverity.ERROR


def checked(
    name: str, passed: bool, why: str, severity: dg.AssetCheckSeverity = dg.AssetCheckSeverity.ERROR, **numbers: Any
) -> dg.AssetCheckResult:
    """Result of a check, with what was found as its description and its "why". numbers: shown by name."""
    shown = {key.replace("_", " "): value for key, value in numbers.items() if value is not None}
    return dg.AssetCheckResult(
        check_name=name, passed=passed, severity=severity, description=why, metadata={"why": why, **shown}
    )


def _share(name: str, what: str, count: int, total: int, most: float) -> dg.AssetCheckResult:
    share = count / total if total else 0.0
    passed = share <= most
    why = f"{count} of {total} {what} ({share:.1%}); {'at most' if passed else 'more than'} {most:.0%}"
    return checked(name, passed, why, _WARN, share=share)


def infrastructure_held(episodes: pa.Table, asset: dg.AssetKey) -> dg.AssetCheckResult:
    """Whether infrastructure faults ended few episodes. asset: key of the rollouts, as a graph asset's checks need."""
    outcomes = episodes["outcome"].to_pylist()
    count = outcomes.count(Outcome.INFRA_ERROR.value)
    what = "episodes were lost to infrastructure faults"
    return _share(INFRASTRUCTURE_HELD, what, count, len(outcomes), MAX_INFRASTRUCTURE)._replace(asset_key=asset)


def reward_varies(members: pa.Table) -> dg.AssetCheckResult:
    """Whether rewards differ within enough groups. members: MEMBERS of a dataset."""
    groups: dict[str, list[float | None]] = {}
    for group, reward in zip(members["group_id"].to_pylist(), members["reward"].to_pylist(), strict=True):
        groups.setdefault(group, []).append(reward)
    without = sum(lacks_variance(rewards) for rewards in groups.values())
    what = "groups have equal rewards and teach nothing"
    return _share(REWARD_VARIES, what, without, len(groups), MAX_WITHOUT_VARIANCE)


def tampering_is_rare(meta: Mapping[str, Any], episodes: int) -> dg.AssetCheckResult:
    """Whether few episodes tampered with their verdict. meta: of a `rewards` artifact."""
    return _share(TAMPERING_IS_RARE, "episodes tampered with their verdict", meta["tampered"], episodes, MAX_TAMPERED)


def sampler_and_trainer_agree(records: Iterable[Mapping[str, Any]], age: int = 0) -> dg.AssetCheckResult:
    """Whether the trainer gave the sampled tokens the probabilities that the sampler recorded. records: of training.
    age: trainings between the weights of both, whose difference then says nothing about the sampler.
    """
    found = next((record["mismatch_k3"] for record in records if "mismatch_k3" in record), None)
    if found is None:
        return checked(AGREE, True, "No token was trained on.", _WARN)
    if age:
        why = f"KL from sampler to trainer is {found:.3g} nats a token; their weights are {age} training(s) apart"
        return checked(AGREE, found == found, why, _WARN, mismatch_k3=found if found == found else None)
    passed = found <= MAX_MISMATCH  # false for NaN
    relation = "at most" if passed else "not at most"
    why = f"KL from sampler to trainer is {found:.3g} nats a token, {relation} {MAX_MISMATCH:g}"
    return checked(AGREE, passed, why, _WARN, mismatch_k3=found if found == found else None)


def finite_loss(records: Sequence[Mapping[str, Any]]) -> dg.AssetCheckResult:
    """Whether loss and gradient norm of every optimizer step are finite. records: of training."""
    steps = [record for record in records if "loss" in record]
    bad = [
        f"{name} of step {record['step']} is {record[name]}"
        for record in steps
        for name in ("loss", "grad_norm")
        if not abs(record.get(name, 0.0)) < float("inf")
    ]
    why = f"{len(bad)} values are not finite, first: {bad[0]}" if bad else f"All {len(steps)} steps have a finite loss."
    return checked(FINITE_LOSS, not bad, why, _ERROR, steps=len(steps))


def fp8_codes_are_sound(candidate: Artifact, parent: Artifact) -> dg.AssetCheckResult:
    """Whether codes and scales of a checkpoint look like those of a policy trained from its parent."""
    try:
        facts = code_facts(candidate, parent)
    except SchemaError as error:  # the check of the layout names it, too, and stops the run
        return checked(FP8, False, str(error), _ERROR)
    if facts is None:
        return checked(FP8, True, "The checkpoint is not quantized.", _ERROR)
    faults = list(code_faults(facts))
    sound = f"{facts.tensors} of {facts.of} quantized tensors were read; {facts.saturated:.2%} of their codes saturate"
    return checked(FP8, not faults, "; ".join(faults) or sound, _ERROR, saturated=facts.saturated)


def gate_checks(found: Mapping[str, NonInferiority]) -> list[dg.AssetCheckResult]:
    """The comparisons that decide about promotion, by name of the check."""
    same = f"{PARENT_IS_BEST}; {found[NOT_WORSE_THAN_PARENT].sentence}"
    return [
        checked(name, each.holds, same if each.sentence == PARENT_IS_BEST else each.sentence, _ERROR)
        for name, each in found.items()
    ]


def went_live(decision: Decision, undone: LivePolicy | None) -> dg.AssetCheckResult:
    """Whether the candidate went live and still counts. undone: the rollback that undid it."""
    why = f"{decision.decision}: {'; '.join(decision.reasons)}"
    if undone is not None:
        how = "rolled back automatically" if is_automatic(undone) else "rolled back"
        return checked(WENT_LIVE, False, f"{how}: {undone.came_by}; it was {why}", _ERROR)
    severity = _WARN if decision.decision == "stale" else _ERROR
    return checked(WENT_LIVE, decision.decision == "live", why, severity)
