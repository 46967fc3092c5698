"""Sensor that tells of scheduled experiments whose nights brought nothing.

It applies the rule of the freshness policies, which Dagster shows on the pages of assets but tells nobody.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

import dagster as dg

from assets.naming import key_of
from contracts.errors import TriplaneError
from contracts.store import open_store
from resources.experiment import Experiment
from triplane_dagster.alerts import EMAIL_VARIABLE, NO_RECEIVER, VARIABLE, has_receiver, tell
from triplane_dagster.freshness import NIGHTLY, allowed_pause
from triplane_dagster.schedules import night_request


def overdue_sensors(experiments: Sequence[Experiment]) -> list[dg.SensorDefinition]:
    """The sensor, if an experiment has a `schedule`."""
    planned = [each for each in experiments if each.schedule is not None]
    if not planned:
        return []

    @dg.sensor(
        name="alert_on_overdue",
        default_status=dg.DefaultSensorStatus.RUNNING,
        minimum_interval_seconds=30,
        description=f"Tells of nights that brought no decision: JSON to ${VARIABLE}, an e-mail to ${EMAIL_VARIABLE}.",
    )
    def sensor(context: dg.SensorEvaluationContext) -> dg.SensorResult | dg.SkipReason:
        if not has_receiver():
            return NO_RECEIVER
        late = overdue_messages(context.instance, planned, time.time())
        for name in late.keys() - _told(context.cursor):
            tell(late[name], context.log)
        said = "; ".join(each["text"] for each in late.values())
        return dg.SensorResult(skip_reason=said or "nothing is overdue", cursor=json.dumps(sorted(late)))

    return [sensor]


def _told(cursor: str | None) -> set[str]:
    """Names of the experiments that were told of; none for a cursor that somebody typed in the UI."""
    try:
        return set(json.loads(cursor or "[]"))
    except (ValueError, TypeError):
        return set()


def overdue_messages(
    instance: dg.DagsterInstance, experiments: Sequence[Experiment], now: float
) -> dict[str, dict[str, Any]]:
    """Messages about overdue experiments, by name. now: seconds since 1970."""
    late = {}
    for experiment in experiments:
        asset, since = _longest_ago(instance, experiment)
        assert experiment.schedule is not None
        allowed = allowed_pause(experiment.schedule)
        if asset is None or now - since < allowed.total_seconds():
            continue
        why = _why(instance, experiment, now)
        at = datetime.fromtimestamp(since, UTC)
        late[experiment.name] = {
            "text": f"{experiment.name} is overdue: no {asset} since {at:%Y-%m-%d %H:%M} UTC: {why}",
            "experiment": experiment.name,
            "asset": asset,
            "last": at.isoformat(timespec="seconds"),
            "limit_hours": round(allowed.total_seconds() / 3600, 2),
            "error": why,
        }
    return late


def _longest_ago(instance: dg.DagsterInstance, experiment: Experiment) -> tuple[str | None, float]:
    """The asset of NIGHTLY that was materialized first, and when; (None, 0) if none ever was."""
    found = [(name, instance.get_latest_materialization_event(key_of(experiment, name))) for name in NIGHTLY]
    times = [(event.timestamp, name) for name, event in found if event is not None]
    since, name = min(times, default=(0.0, None))
    return name, since


def _why(instance: dg.DagsterInstance, experiment: Experiment, now: float) -> str:
    """Why the schedule would not ask for iterations now, or that it would."""
    try:
        request = night_request(instance, open_store(), experiment, datetime.fromtimestamp(now, UTC))
    except TriplaneError as error:
        return str(error)
    if isinstance(request, dg.SkipReason):
        return request.skip_message or ""
    return f"nothing is under way; see whether {experiment.name}_nightly is on and the daemon works at its times"
