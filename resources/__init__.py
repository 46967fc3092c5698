"""Handles that assets and ops hold while they work, and the Experiment that tells them what to do.

In: an experiment file (`experiment`), and at run time the policy or task that a step needs. Out: live handles: the
artifact store (`store`), what an asset last produced (`refs`), sandboxes (`sandboxes`), engines that serve a policy
(`sampler`), processes that train (`launcher`), the live policy (`registry`), progress for people (`progress`).

Imported by ops, assets and triplane_dagster. May import: dagster, contracts and the four planes.
"""
