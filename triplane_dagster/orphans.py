"""Sensor that deletes trainers on Kubernetes that no run waits for any more.

A run that dies leaves its Job, so that the next run adopts it. If no run of the experiment comes, the Job is an orphan,
which holds GPUs for nobody.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import dagster as dg

from resources.experiment import Experiment
from resources.kubernetes.client import Api, connect
from resources.kubernetes.jobs import all_trainings
from resources.kubernetes.manifests import EXPERIMENT, RUN, selector
from resources.kubernetes.settings import release_of
from resources.training_launcher import chosen_kind
from triplane_dagster.unfinished import unfinished_run

ORPHAN_S = 900.0
"""Seconds without an unfinished run of its experiment after which a Job is deleted."""
_PATIENCE_S = 15.0


def orphan_sensors(experiments: Sequence[Experiment]) -> list[dg.SensorDefinition]:
    """The sensor, if trainers run on Kubernetes by default here. Raises ConfigError."""
    if chosen_kind("auto") != "kubernetes":
        return []

    @dg.sensor(
        name="trainer_orphans",
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=60,
        description="Deletes trainers on Kubernetes that no run waits for.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult:
        since, said = delete_orphans(context.instance, connect(), experiments, _since(context.cursor), time.time())
        return dg.SensorResult(skip_reason=said, cursor=json.dumps(since))

    return [sensor]


def _since(cursor: str | None) -> dict[str, float]:
    """Since when Jobs are orphans, by uid; nothing for a cursor that somebody typed in the UI."""
    try:
        return {uid: float(seconds) for uid, seconds in json.loads(cursor or "{}").items()}
    except (ValueError, TypeError, AttributeError):
        return {}


def delete_orphans(
    instance: dg.DagsterInstance,
    api: Api,
    experiments: Sequence[Experiment],
    since: dict[str, float],
    now: float,
    limit_s: float = ORPHAN_S,
) -> tuple[dict[str, float], str]:
    """Delete Jobs and JobSets that have been orphans for `limit_s`. Returns since when the others are, by uid, and what
    was done.

    Those that a run of another Dagster instance created are left alone.
    """
    sets = any(each.placement.trainer.workload == "jobset" for each in experiments)
    every = all_trainings(api, selector(release_of()), _PATIENCE_S, sets=sets)
    found = [job for job in every if _is_orphan(instance, experiments, job)]
    still = {job["metadata"]["uid"]: since.get(job["metadata"]["uid"], now) for job in found}
    old = [job for job in found if now - still[job["metadata"]["uid"]] >= limit_s]
    for job in old:
        api.delete_training(job, patience_s=_PATIENCE_S)
        del still[job["metadata"]["uid"]]
    names = ", ".join(job["metadata"]["name"] for job in old)
    return still, f"deleted {names}: no run waits for it" if old else f"{len(still)} trainer(s) without a run"


def _is_orphan(instance: dg.DagsterInstance, experiments: Sequence[Experiment], job: dict[str, Any]) -> bool:
    meta = job["metadata"]
    run = instance.get_run_by_id((meta.get("annotations") or {}).get(RUN, ""))
    if run is None or not run.is_finished or "deletionTimestamp" in meta:
        return False
    of_job = [each for each in experiments if each.name.rstrip("_") == meta["labels"].get(EXPERIMENT)]
    return not any(unfinished_run(instance, each) for each in of_job)
