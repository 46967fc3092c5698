"""Definitions for Dagster, from the experiment files."""

from __future__ import annotations

from triplane_dagster.assembly import load_definitions

defs = load_definitions()
