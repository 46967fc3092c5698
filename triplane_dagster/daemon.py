"""Dagster's daemon as a child of `triplane ui`, with which it ends: two daemons would launch every run twice."""

from __future__ import annotations

import runpy

from trainer.lifetime import end_with_parent
from triplane_dagster.private_dagster import DAEMON_MODULE

if __name__ == "__main__":
    end_with_parent()
    runpy.run_module(DAEMON_MODULE, run_name="__main__", alter_sys=True)
