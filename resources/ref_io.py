"""Pass references between steps; nothing else goes through Dagster.

pointers/assets/...                    what assets produced, see `resources.refs`
runs/<run>/<step>/<output>.json        values inside a graph asset (shards)
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

import dagster as dg

from contracts.artifacts import ArtifactRef
from contracts.digests import canonical_json
from contracts.failpoints import failpoint
from resources.event_log import event_log_kept_open
from resources.refs import require_ref, write_ref
from resources.store import StoreResource

REF = dg.PythonObjectDagsterType(
    ArtifactRef, name="ArtifactRef", description="Location and content digest of an artifact."
)
dg.make_python_type_usable_as_dagster_type(ArtifactRef, REF)


class RefIOManager(dg.ConfigurableIOManager):
    """Stores references in the artifact store: they survive process exits and need no shared disk."""

    store: dg.ResourceDependency[StoreResource]

    @contextmanager
    def yield_for_execution(self, context: dg.InitResourceContext) -> Iterator[Self]:
        """Provide the resource for one run (one step where steps are processes), whose event log is kept open."""
        with event_log_kept_open(context.instance, context.run.run_id if context.run else None):
            yield self

    def handle_output(self, context: dg.OutputContext, obj: Any) -> None:
        """Record an asset's reference, or a small JSON value inside a graph."""
        store = self.store.open()
        if not context.has_asset_key:
            store.create(_step_key(context), canonical_json(obj))
            return
        if not isinstance(obj, ArtifactRef):
            raise TypeError(
                f"asset {context.asset_key.to_user_string()} returned {type(obj).__name__}, not an ArtifactRef"
            )
        experiment, asset = context.asset_key.path
        write_ref(store, experiment, asset, context.asset_partition_key if context.has_asset_partitions else None, obj)
        failpoint("reference-written")

    def load_input(self, context: dg.InputContext) -> Any:
        """Reference of the upstream asset at this partition, or the value inside a graph."""
        store = self.store.open()
        upstream = context.upstream_output
        if not context.has_asset_key:
            assert upstream is not None, "an input inside a graph has an upstream step"
            return json.loads(store.get(_step_key(upstream)))
        experiment, asset = context.asset_key.path
        return require_ref(
            store, experiment, asset, context.asset_partition_key if context.has_asset_partitions else None
        )


def _step_key(context: dg.OutputContext) -> str:
    step = (context.step_key or "step").replace("[", "_").replace("]", "")
    name = f"{context.name}.{context.mapping_key}" if context.mapping_key else context.name
    return f"runs/{context.run_id}/{step}/{name}.json"
