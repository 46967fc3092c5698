"""Dagster definitions (assets of each experiment, jobs, schedules, sensors) and the `triplane` command.

In: experiments/*.yaml (or the folder $TRIPLANE_EXPERIMENTS names). Out: `definitions.defs` for the web server and
daemon; `run` for the same graph in this process; `dry_run` for what a run would do; `lineage` over the store.

definitions -> assembly -> assets -> ops -> resources -> planes jobs schedules sensors which assets run together, when,
and which run follows

Imported by nothing. May import every package of this repository.
"""
