"""Experiment settings, and the Dagster resources that assets and ops use while they run.

In: an experiment file (`experiment`), and at run time the policy or task that a step needs. Out: live handles: the
artifact store (`store`), the latest artifact of each asset (`refs`), sandboxes (`sandboxes`), engines that serve a
policy (`sampler`), training processes (`launcher`), the live policy (`registry`), progress displays (`progress`).

Imported by ops, assets and triplane_dagster. May import: dagster, contracts and the four planes.
"""
