"""Update the servers to the live policy of the registry."""

from __future__ import annotations

from collections.abc import Sequence

from contracts.artifacts import Artifact, ArtifactRef, open_artifact
from contracts.store import Store
from ops.results import Metadata, markdown_table
from resources.deployment import ServerState, swap_servers
from resources.experiment import Experiment
from resources.loops import run_async
from resources.registry import Registry


def bring_servers(store: Store, experiment: Experiment, base: ArtifactRef) -> list[ServerState]:
    """Update every server that the experiment names to the live policy (`base` if none was promoted).

    Idempotent.
    """
    if not experiment.deployment.servers:
        return []

    def live() -> Artifact:
        entry = Registry(store, experiment.name).live()
        return open_artifact(store, entry.policy if entry else base)

    return run_async(swap_servers(experiment.deployment, live))


def servers_line(servers: Sequence[ServerState]) -> str:
    """One-line result of updating all servers."""
    if not servers:
        return "servers: none are named in the experiment"
    behind = [f"{each.url}: {each.fault}" for each in servers if each.fault is not None]
    return "; ".join([f"servers: {len(servers) - len(behind)} of {len(servers)} serve the live policy", *behind])


def server_metadata(servers: Sequence[ServerState]) -> Metadata:
    """Metadata of the servers for the asset page; empty if there are none."""
    if not servers:
        return {}
    rows = [
        {"server": each.url, "policy": each.policy[:12] if each.policy else "-", "fault": each.fault or "-"}
        for each in servers
    ]
    return {
        "servers": markdown_table(rows),
        "servers live": sum(each.fault is None for each in servers),
        "servers behind": sum(each.fault is not None for each in servers),
    }
