"""What an asset last produced, as references: the only thing that passes through Dagster between steps.

pointers/assets/<experiment>/<asset>/<partition>/<number>.json     an ArtifactRef; the highest number counts
runs/<run>/<step>/<output>.json                                    values inside a graph asset (shards)
"""

from typing import Any

import dagster as dg

from contracts.artifacts import Artifact, ArtifactRef, find_artifact
from contracts.digests import canonical_json
from contracts.pointers import Pointer
from contracts.store import Store
from resources.errors import NotMaterialized
from resources.store import StoreResource

REF = dg.PythonObjectDagsterType(
    ArtifactRef, name="ArtifactRef", description="Where an artifact is, and its content digest."
)
dg.make_python_type_usable_as_dagster_type(ArtifactRef, REF)

UNPARTITIONED = "all"


def _pointer(store: Store, experiment: str, asset: str, partition: str | None) -> Pointer:
    return Pointer(store, f"assets/{experiment}/{asset}/{partition or UNPARTITIONED}")


def read_ref(store: Store, experiment: str, asset: str, partition: str | None = None) -> ArtifactRef | None:
    """The artifact an asset last produced, or None. partition: None for an unpartitioned asset."""
    entry = _pointer(store, experiment, asset, partition).current()
    return ArtifactRef.model_validate(entry.value) if entry else None


def require_ref(store: Store, experiment: str, asset: str, partition: str | None = None) -> ArtifactRef:
    """Like `read_ref`. Raises NotMaterialized."""
    ref = read_ref(store, experiment, asset, partition)
    if ref is None:
        where = f"{experiment}/{asset}" + (f"[{partition}]" if partition else "")
        raise NotMaterialized(f"{where} has nothing in store {store.url}: materialize it first")
    return ref


def write_ref(store: Store, experiment: str, asset: str, partition: str | None, ref: ArtifactRef) -> None:
    """Record what an asset produced. Recording the same again changes nothing."""
    pointer = _pointer(store, experiment, asset, partition)
    value = ref.model_dump(mode="json")
    while True:
        current = pointer.current()
        if current is not None and current.value == value:
            return
        if pointer.advance(value, current.number if current else 0):
            return


def read_artifact(store: Store, experiment: str, asset: str, partition: str | None = None) -> Artifact | None:
    """The artifact itself, or None when the asset was never produced or its artifact is gone."""
    ref = read_ref(store, experiment, asset, partition)
    return find_artifact(store, ref.kind, ref.key) if ref else None


class RefIOManager(dg.ConfigurableIOManager):
    """Keeps references in the store, so that they survive any process and need no shared disk."""

    store: dg.ResourceDependency[StoreResource]

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

    def load_input(self, context: dg.InputContext) -> Any:
        """The reference of the upstream asset at this partition, or the value inside a graph."""
        import json

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
