"""evaluation[i]: candidate and parent on the gate, which decides, and on held-out, which no decision reads."""

from collections.abc import Mapping
from typing import Any

import dagster as dg

from assets.naming import check, define
from contracts.artifacts import ArtifactRef
from contracts.tasks import Split
from curation.measures import MEASURES, measure_names
from curation.statistics import CONFIDENCE
from ops.deploy_decision import NOT_WORSE_THAN_BEST, NOT_WORSE_THAN_PARENT, gate_comparisons
from ops.evaluation import evaluate
from ops.graph import EVALUATION
from ops.health import gate_checks
from ops.results import Materialized, label, link, markdown_table, numbers, result
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource


def pass_rates(body: Mapping[str, Any]) -> dg.MarkdownMetadataValue:
    """Table of an `evaluation` artifact, in percent and points."""
    rows = []
    for split, found in body.items():
        for who in ("candidate", "parent"):
            rate = found[who]
            value = "not graded" if rate["rate"] is None else f"{rate['rate']:.1%}"
            rows.append(
                (
                    label(split),
                    who,
                    value,
                    f"{rate['low']:.0%} to {rate['high']:.0%}",
                    f"{rate['n']} episodes of {rate['tasks']} tasks",
                )
            )
        rows.append(_difference_row(split, "difference", found["difference"]))
        if "floor" in found:
            rows.append(
                _difference_row(
                    split,
                    f"difference from the best so far, {found['floor']['policy'][:12]}",
                    found["floor"]["difference"],
                )
            )
    head = ("split", "policy", "percent solved", f"{CONFIDENCE:.0%} interval", "over")
    return markdown_table([dict(zip(head, row, strict=True)) for row in rows])


def measured(own: Mapping[str, Any]) -> dict[str, float | None]:
    """Rates of one policy, by name of the measure."""
    names = measure_names(own["k"], own["temperature"])
    return {name: own[key]["rate"] for key, name in zip(MEASURES, names, strict=True)}


def measures_table(body: Mapping[str, Any]) -> dg.MarkdownMetadataValue:
    """pass@1 greedy and sampled, maj@k and pass@k of both policies, with their intervals."""
    rows = []
    for split, found in body.items():
        for who, own in found["measures"].items():
            for key, name in zip(MEASURES, measure_names(own["k"], own["temperature"]), strict=True):
                each = own[key]
                if each["rate"] is not None:
                    interval = f"{each['low']:.0%} to {each['high']:.0%}"
                    rows.append((label(split), who, name, f"{each['rate']:.1%}", interval, f"{each['tasks']} tasks"))
    head = ("split", "policy", "measure", "percent solved", f"{CONFIDENCE:.0%} interval", "over")
    return markdown_table([dict(zip(head, row, strict=True)) for row in rows])


def _difference_row(split: str, what: str, difference: Mapping[str, Any]) -> tuple[str, str, str, str, str]:
    mean, low, high = (f"{100 * difference[name]:+.1f}" for name in ("mean", "low", "high"))
    return label(split), what, mean, f"{low} to {high}", f"{difference['n']} tasks"


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        EVALUATION,
        kinds={"json"},
        description="Pass rates of candidate and parent and their paired difference, each with its interval.",
        checks=[
            check(
                experiment,
                EVALUATION,
                name,
                f"On the gate, the candidate is non-inferior to {other}. `sampler` reads the same comparison.",
                blocking=False,
            )
            for name, other in ((NOT_WORSE_THAN_PARENT, "its parent"), (NOT_WORSE_THAN_BEST, "the best policy so far"))
        ],
    )
    def evaluation(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        sampler: SamplerResource,
        sandboxes: SandboxesResource,
        progress: dg.ResourceParam[ProgressSink],
        **given: ArtifactRef,
    ) -> Materialized:
        step = begin(context, experiment, EVALUATION, store.open(), progress, given)
        evaluated = evaluate(step, sampler, sandboxes)
        body = evaluated.json("evaluation.json")
        plots = {
            f"{split} {who} pass rate": found[who]["rate"]
            for split, found in body.items()
            for who in ("candidate", "parent")
        }
        plots |= {f"{split} difference": found["difference"]["mean"] for split, found in body.items()}
        plots |= {
            f"{split} difference from the best": found["floor"]["difference"]["mean"]
            for split, found in body.items()
            if "floor" in found
        }
        plots |= {
            f"{split} candidate {name}": rate
            for split, found in body.items()
            if split != Split.GATE.value
            for name, rate in measured(found["measures"]["candidate"]).items()
        }
        metadata = {
            "pass rates": pass_rates(body),
            "greedy, sampled, majority, any": measures_table(body),
            **numbers(plots),
            "checkpoint": link(experiment.name, "checkpoint"),
        }
        found = gate_comparisons(evaluated, step.parent("parent"), experiment.promotion.margin)
        return result(evaluated, metadata, gate_checks(found))

    return evaluation
