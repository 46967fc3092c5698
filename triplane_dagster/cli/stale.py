"""Print which steps in a store are stale, and why."""

from __future__ import annotations

from contracts.store import Store
from triplane_dagster.cli.output import console


def stale_lines(store: Store, experiment: str, *, newest: bool = False) -> list[str]:
    """Lines about stale steps (newest: of the newest iteration only) and the consequence; empty if there are none."""
    from triplane_dagster.staleness import stale_steps

    stale = stale_steps(store, experiment, newest=newest)
    if not stale:
        return []
    return [
        (
            f"stale in {experiment}: made by another version of Triplane. It stays readable and in use; a step that is"
            " materialized again"
        ),
        (
            "gets a new artifact, and so do the steps that depend on it. Further iterations continue from the live"
            " policy; --set name=NAME starts a separate experiment."
        ),
        *(f"  {step}" for step in stale),
    ]


def print_stale(store: Store, experiment: str) -> None:
    """Print these lines on stdout."""
    for line in stale_lines(store, experiment):
        console().print(line)
