"""Let sensors go on after the clock was set back: Dagster evaluates none before its last tick is past."""

from __future__ import annotations

import time

import dagster as dg


def forget_future_ticks(instance: dg.DagsterInstance) -> list[str]:
    """Set the last tick of each sensor that is in the future to now. Returns the names of these sensors."""
    now, reset = time.time(), []
    for state in instance.all_instigator_state() if instance.schedule_storage else ():
        data = state.sensor_instigator_data
        if data is not None and max(data.last_tick_timestamp or 0, data.last_tick_start_timestamp or 0) > now:
            past = data._replace(last_tick_timestamp=now, last_tick_start_timestamp=now)
            instance.update_instigator_state(state.with_data(past))
            reset.append(state.name)
    return reset
