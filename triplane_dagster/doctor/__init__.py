"""Test what this machine can do for Triplane by trying it.

    checks of machine, isolation, accelerators, services --> look(check), each in a thread with its own deadline -->
    findings

Whatever might hang, or takes long to import (torch, Dagster, a sandbox), is tried in a process of its own: `trials/`.
In: the environment. Out: findings, for `triplane doctor`. Imported by nothing else. May import every package of this
repository.
"""
