"""Implementation of the assets, as functions and Dagster ops. Planes are connected here, since no plane imports
another.

    inputs     what an iteration starts from, pinned once              rollouts    plan -> map(shard) -> merge
    base       tokenizer, demonstrations, supervised warm start        grading     episodes -> rewards -> dataset
    training   a GRPO job through the launcher                         evaluation  candidate and parent on gate and
               held-out
    publishing the decision, and promotion by compare-and-swap         keys        the action key of every step

In: a `Step` (experiment, partition, store, progress) and references. Out: committed artifacts, and metadata about them
(`results`, `samples`).

Imported by assets and triplane_dagster. May import: dagster, resources, contracts and the four planes.
"""
