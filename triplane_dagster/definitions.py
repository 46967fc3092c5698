"""Definitions for Dagster, from the experiment files."""

from __future__ import annotations

from triplane_dagster.assembly import definitions_for, experiments_folder, load_all

defs = definitions_for(load_all(experiments_folder()))
