"""Implementation of the assets, as functions and Dagster ops. Planes are connected here, since no plane imports
another.

    graph            every step, declared once: inputs by role, slice, version, needs
    spec             StepSpec, the type of a declaration, and Work, one artifact to make with its key and lineage

    inputs           what an iteration starts from, pinned once
    task_suite       tasks, proved in sandboxes
    base_policy      tokenizer, demonstrations, supervised warm start
    rollouts         plan -> map(shard) -> merge
    rewards          episodes graded by hidden tests
    dataset          episodes and rewards -> sequences that train
    training         a policy-gradient job through the launcher
    evaluation       candidate and parent compared
    readings         how an evaluation plays a policy
    deploy_decision  promotion of a candidate by compare-and-swap
    after_swap       servers updated; automatic rollback of a policy that none can serve
    regrading        differences between gradings of the same rollouts
    health           checks of the assets, with their thresholds
    retries, spans   what wraps the function of every step

In: a `Step` (declaration, state of its iteration, progress). Out: committed artifacts, and metadata about them
(`results`, `samples`). `graph`, `spec`, `state`, `readings` and `where` do not import Dagster, so `triplane status` is
quick.

Imported by assets and triplane_dagster. May import: dagster, resources, contracts and the four planes.
"""
