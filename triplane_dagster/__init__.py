"""What Dagster loads, and the `triplane` command beside it: one set of assets an experiment, jobs, schedules, sensors.

In: experiments/*.yaml (or the folder $TRIPLANE_EXPERIMENTS names). Out: `definitions.defs` for the web server and
daemon; `run` for the same graph in this process; `dry_run` for what a run would do; `lineage` over the store.

    definitions -> assembly -> assets -> ops -> resources -> planes
    jobs  schedules  sensors   which assets run together, when, and what follows

Imported by nothing. May import every package of this repository.
"""
