"""Test what this machine can do for Triplane by trying it.

    checks of machine, isolation, accelerators, services; of a cluster
        --> look(check), each in a thread with its own deadline --> findings

Checks that may hang or import slowly (torch, Dagster, a sandbox) run in separate processes: `trials/`. In: the
environment. Out: findings, for `triplane doctor`. Imported by nothing else. May import every package of this
repository.
"""
