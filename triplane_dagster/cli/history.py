"""Read the results of iterations from the store: rewards, pass rates with intervals, policies and decisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.store import Store
from contracts.tasks import Split
from curation.measures import MEASURES, measure_names
from curation.statistics import PassRate, pass_rate
from resources.refs import partitions, read_artifact, read_ref
from resources.registry import Registry

Rates = dict[str, dict[str, PassRate]]
"""Split -> policy digest -> pass rate."""
Measures = dict[str, dict[str, dict[str, Any]]]
"""Split -> policy digest -> pass@1 greedy and sampled, maj@k, pass@k, as curation.measures makes them."""
REPORTED = (Split.HELD_OUT, Split.UNSEEN)
"""Splits that no decision reads."""


@dataclass(frozen=True)
class IterationSummary:
    """Results of one iteration; None for steps that have not run."""

    iteration: str
    parent: str | None
    """Digest of the policy that the candidate was trained from and is compared with; before the evaluation, of the
    acting policy, which with overlap may be an older one.
    """
    policy: str | None
    """Digest of the new checkpoint."""
    train_reward: float | None
    """Mean reward of the graded episodes."""
    rates: Rates
    """Pass rates of candidate and parent."""
    measures: Measures
    """Measures of candidate and parent, on splits with greedy runs or more than one sample per task."""
    decision: str | None
    """live, refused or stale."""
    reasons: tuple[str, ...]
    rolled_back: str | None = None
    """Rollback that undid the promotion of the policy."""

    def rate(self, split: Split, policy: str | None) -> PassRate | None:
        """Pass rate of candidate or parent on a split."""
        return self.rates.get(split.value, {}).get(policy or "")

    def measured(self, split: Split, policy: str | None) -> dict[str, Any] | None:
        """Measures of candidate or parent on a split."""
        return self.measures.get(split.value, {}).get(policy or "")

    @property
    def live_after(self) -> str | None:
        """Digest of the policy that is live after this iteration's decision."""
        return self.policy if self.decision == "live" else self.parent if self.decision else None


def summaries(store: Store, experiment: str) -> list[IterationSummary]:
    """Summaries of all iterations that have begun, in order."""
    undone = {digest: entry.came_by for digest, entry in Registry(store, experiment).rolled_back().items()}
    began = partitions(store, experiment, "iteration_inputs")
    return [summary(store, experiment, iteration, undone) for iteration in began]


def summary(store: Store, experiment: str, iteration: str, undone: Mapping[str, str]) -> IterationSummary:
    """Summary of one iteration. undone: rollbacks, by digest of the policy whose promotion they undid."""
    inputs = read_artifact(store, experiment, "iteration_inputs", iteration)
    candidate = read_ref(store, experiment, "checkpoint", iteration)
    decision = read_artifact(store, experiment, "sampler", iteration)
    decided: dict[str, Any] = decision.json("decision.json") if decision else {}
    evaluation = read_artifact(store, experiment, "evaluation", iteration)
    return IterationSummary(
        iteration=iteration,
        parent=_parent(inputs, evaluation),
        policy=candidate.digest if candidate else None,
        train_reward=_train_reward(read_artifact(store, experiment, "rewards", iteration)),
        rates=_rates(store, evaluation),
        measures=_measures(evaluation),
        decision=decided.get("decision"),
        reasons=tuple(decided.get("reasons", ())),
        rolled_back=undone.get(candidate.digest) if candidate and decided.get("decision") == "live" else None,
    )


def base_rate(history: list[IterationSummary], split: Split) -> PassRate | None:
    """Pass rate of the policy that the first iteration started from."""
    return history[0].rate(split, history[0].parent) if history else None


def base_measures(history: list[IterationSummary], split: Split) -> dict[str, Any] | None:
    """Measures of the policy that the first iteration started from."""
    return history[0].measured(split, history[0].parent) if history else None


def base_row(history: list[IterationSummary]) -> dict[str, Any]:
    """Table row of the policy that the first iteration started from. history: must not be empty."""
    return {
        "iteration": "base",
        "train reward": None,
        "gate": percent(base_rate(history, Split.GATE)),
        **rate_columns(lambda split: base_rate(history, split), lambda split: base_measures(history, split)),
        "policy": (history[0].parent or "")[:12] or None,
        "decision": None,
    }


def row_of(found: IterationSummary) -> dict[str, Any]:
    """Row of an iteration in the table that `demo` and `status` print."""
    return {
        "iteration": found.iteration,
        "train reward": found.train_reward,
        "gate": percent(found.rate(Split.GATE, found.policy)),
        **rate_columns(
            lambda split: found.rate(split, found.policy), lambda split: found.measured(split, found.policy)
        ),
        "policy": found.policy[:12] if found.policy else None,
        "decision": f"{found.decision}, rolled back" if found.rolled_back else found.decision,
    }


def rate_columns(
    rate: Callable[[Split], PassRate | None], measured: Callable[[Split], dict[str, Any] | None]
) -> dict[str, str | None]:
    """Columns of one policy on the report-only splits: all measures, or the pass rate if only that is known."""
    columns: dict[str, str | None] = {}
    for split in REPORTED:
        name, found = split.value.replace("_", "-"), measured(split)
        if found is None:
            columns |= {name: percent(rate(split))} if rate(split) or split is Split.HELD_OUT else {}
            continue
        heads = measure_names(found["k"], found["temperature"])
        shown = [found[each]["rate"] for each in MEASURES]
        columns[f"{name}: {', '.join(heads)}"] = ", ".join("-" if each is None else f"{each:.1%}" for each in shown)
    return columns


def json_of(found: IterationSummary) -> dict[str, Any]:
    """Summary as a JSON-compatible value."""
    return {
        "iteration": found.iteration,
        "parent": found.parent,
        "policy": found.policy,
        "train_reward": found.train_reward,
        "pass_rates": {
            split: {
                "candidate": rate_json(rates.get(found.policy or "")),
                "parent": rate_json(rates.get(found.parent or "")),
            }
            for split, rates in found.rates.items()
        },
        "measures": {
            split: {"candidate": own.get(found.policy or ""), "parent": own.get(found.parent or "")}
            for split, own in found.measures.items()
        },
        "decision": found.decision,
        "reasons": list(found.reasons),
        "rolled_back": found.rolled_back,
    }


def rate_json(rate: PassRate | None) -> dict[str, Any] | None:
    """Pass rate as a JSON-compatible value."""
    return vars(rate) if rate else None


def percent(rate: PassRate | None) -> str | None:
    """Pass rate with its interval, as text."""
    if rate is None or rate.rate is None:
        return None
    return f"{rate.rate:.1%} [{rate.low:.0%}, {rate.high:.0%}]"


def _parent(inputs: Artifact | None, evaluation: Artifact | None) -> str | None:
    if evaluation is not None:
        return evaluation.manifest.parents["parent"].digest
    return inputs.manifest.parents["policy"].digest if inputs else None


def _train_reward(rewards: Artifact | None) -> float | None:
    if rewards is None:
        return None
    values = [
        value for value in rewards.table("rewards.parquet", ["reward"])["reward"].to_pylist() if value is not None
    ]
    return fmean(values) if values else None


def _rates(store: Store, evaluation: Artifact | None) -> Rates:
    found: Rates = {}
    runs: list[ArtifactRef] = [
        ref
        for role, ref in (evaluation.manifest.parents.items() if evaluation else ())
        if ref.kind == "evaluation_run" and not role.endswith("_greedy")
    ]
    for ref in runs:
        run = open_artifact(store, ref)
        rate = pass_rate(run.table("rewards.parquet", ["task_id", "solved"]))
        found.setdefault(run.manifest.config["split"], {})[run.manifest.parents["policy"].digest] = rate
    return found


def _measures(evaluation: Artifact | None) -> Measures:
    found: Measures = {}
    if evaluation is None:
        return found
    policies = {who: evaluation.manifest.parents[who].digest for who in ("parent", "candidate")}
    for split, compared in evaluation.json("evaluation.json").items():
        for who, own in compared.get("measures", {}).items():
            found.setdefault(split, {})[policies[who]] = own
    return found
