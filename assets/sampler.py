"""sampler[i]: the decision: live, refused or stale. A refusal is a successful run; promotion requires that the parent
is still live.

gate: non-inferior? -> smoke episode on an engine without traffic -> compare-and-swap on the parent -> servers swapped
                                                  all fail because of the policy -> rolled back automatically <-|
"""

from typing import Any

import dagster as dg

from assets.naming import check, define
from contracts.artifacts import ArtifactRef
from ops.after_swap import is_automatic, swap_or_roll_back
from ops.deploy import server_metadata
from ops.deploy_decision import decide_deployment, read_decision, read_smoke
from ops.graph import SAMPLER
from ops.health import WENT_LIVE, went_live
from ops.results import Materialized, link, result
from ops.rollback import observation
from ops.samples import fenced
from ops.smoke import Smoke, play_smoke
from ops.step import begin
from resources.experiment import Experiment
from resources.progress import ProgressSink
from resources.registry import LivePolicy, Registry
from resources.sampler import SamplerResource
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource

TRANSCRIPT = 4000
"""Maximum characters of the smoke episode on the asset's page."""


def build(experiment: Experiment) -> dg.AssetsDefinition:
    """The asset of one experiment."""

    @define(
        experiment,
        SAMPLER,
        kinds={"json"},
        description=("Whether the candidate went live, and why: gate, smoke episode, and a parent that is still live."),
        checks=[check(experiment, SAMPLER, WENT_LIVE, "The candidate went live and still counts.", blocking=False)],
    )
    def sampler(
        context: dg.AssetExecutionContext,
        store: StoreResource,
        sampler: SamplerResource,
        sandboxes: SandboxesResource,
        progress: dg.ResourceParam[ProgressSink],
        **given: ArtifactRef,
    ) -> Materialized:
        step = begin(context, experiment, SAMPLER, store.open(), progress, given)
        inputs, candidate = step.inputs, step.parent("candidate")
        decided = decide_deployment(
            step, smoke=lambda: play_smoke(step, sampler, sandboxes, candidate, inputs.task_suite)
        )
        # also after an old decision: servers that missed a change get the current live policy
        swapped = swap_or_roll_back(step.store, experiment, inputs.base, candidate, step.iteration)
        if swapped.rolled_back is not None:
            context.log_event(observation(experiment.name, swapped.rolled_back))
        decision, smoke = read_decision(decided), read_smoke(decided)
        registry = Registry(step.store, experiment.name)
        live, undone = registry.live(), registry.rolled_back().get(candidate.digest)
        metadata = {
            "decision": decision.decision,
            "reasons": dg.MetadataValue.md("; ".join(decision.reasons)),
            "went live": int(decision.decision == "live"),
            "live number": live.number if live else 0,
            "live policy": live.policy.digest if live else "base policy",
            **(_undone_metadata(undone) if undone else {}),
            **(_smoke_metadata(smoke) if smoke else {}),
            **server_metadata(swapped.servers),
            "evaluation": link(experiment.name, "evaluation"),
        }
        return result(decided, metadata, [went_live(decision, undone)])

    return sampler


def _undone_metadata(undone: LivePolicy) -> dict[str, Any]:
    return {"rolled back automatically" if is_automatic(undone) else "rolled back since": undone.came_by}


def _smoke_metadata(smoke: Smoke) -> dict[str, Any]:
    """Metadata of the smoke episode: one line, and its transcript."""
    said = smoke.fault or f"{smoke.outcome}: {smoke.turns} turns, {smoke.tool_calls} tool calls, {smoke.tokens} tokens"
    return {
        "smoke episode": f"{said} ({smoke.task_id})",
        "smoke seconds": smoke.seconds,
        "smoke transcript": dg.MetadataValue.md(fenced(smoke.transcript[:TRANSCRIPT])),
    }
