"""References to the latest artifact of each asset. Avoids importing Dagster, which takes longer than most queries.

pointers/assets/<experiment>/<asset>/<partition>/<number>.json     an ArtifactRef; the highest number counts
pending/<kind>/<key>/<digest>.json                                  one that the ledger has not indexed yet
"""

from __future__ import annotations

from contracts.artifacts import Artifact, ArtifactRef, find_artifact
from contracts.pointers import Pointer, changed_pointers, pointer_folders
from contracts.store import Store
from resources.errors import NotMaterialized

UNPARTITIONED = "all"
_FOLDER = "assets"
_PENDING = "pending/"


def _pointer(store: Store, experiment: str, asset: str, partition: str | None) -> Pointer:
    return Pointer(store, f"{_FOLDER}/{experiment}/{asset}/{partition or UNPARTITIONED}")


def experiments_in(store: Store) -> list[str]:
    """Sorted names of the experiments with an asset in `store`."""
    return pointer_folders(store, _FOLDER)


def partitions(store: Store, experiment: str, asset: str) -> list[str]:
    """Sorted partitions that an asset was materialized in."""
    return pointer_folders(store, f"{_FOLDER}/{experiment}/{asset}")


def read_ref(store: Store, experiment: str, asset: str, partition: str | None = None) -> ArtifactRef | None:
    """Reference to the latest artifact of an asset, or None. partition: None for an unpartitioned asset."""
    entry = _pointer(store, experiment, asset, partition).current_of_few()
    return ArtifactRef.model_validate(entry.value) if entry else None


def changed_refs(store: Store, experiment: str, asset: str) -> dict[str, ArtifactRef]:
    """References to the current artifact of an asset, for each partition whose artifact has changed."""
    entries = changed_pointers(store, f"{_FOLDER}/{experiment}/{asset}")
    return {partition: ArtifactRef.model_validate(entry.value) for partition, entry in entries.items()}


def has_ref(store: Store, experiment: str, asset: str, partition: str | None = None) -> bool:
    """Whether an asset has an artifact; one request."""
    return _pointer(store, experiment, asset, partition).is_set()


def remove_ref(store: Store, experiment: str, asset: str, partition: str) -> None:
    """Remove the references to an asset's artifacts in one partition. The artifacts stay."""
    _pointer(store, experiment, asset, partition).remove()


def earlier_refs(
    store: Store, experiment: str, asset: str, partition: str | None, now: ArtifactRef
) -> list[ArtifactRef]:
    """References that an asset had before `now`, latest first; without `now` itself."""
    pointer = _pointer(store, experiment, asset, partition)
    current = pointer.current_of_few()
    entries = pointer.history() if current and current.number > 1 else []
    refs = [ArtifactRef.model_validate(entry.value) for entry in entries]
    if now in refs:
        refs = refs[: len(refs) - refs[::-1].index(now)]
    return [ref for ref in dict.fromkeys(reversed(refs)) if ref != now]


def require_ref(store: Store, experiment: str, asset: str, partition: str | None = None) -> ArtifactRef:
    """Like `read_ref`. Raises NotMaterialized."""
    ref = read_ref(store, experiment, asset, partition)
    if ref is None:
        where = f"{experiment}/{asset}" + (f"[{partition}]" if partition else "")
        raise NotMaterialized(f"store {store.url} has no {where}: materialize it first")
    return ref


def write_ref(store: Store, experiment: str, asset: str, partition: str | None, ref: ArtifactRef) -> None:
    """Record the artifact that an asset produced. Idempotent."""
    pointer = _pointer(store, experiment, asset, partition)
    value = ref.model_dump(mode="json")
    while True:
        current = pointer.current_of_few()
        if current is not None and current.value == value:
            return
        note(store, ref)
        if pointer.advance(value, current.number if current else 0):
            return


def read_artifact(store: Store, experiment: str, asset: str, partition: str | None = None) -> Artifact | None:
    """Latest artifact of an asset, or None if there is none or it was deleted."""
    ref = read_ref(store, experiment, asset, partition)
    return find_artifact(store, ref.kind, ref.key) if ref else None


def note(store: Store, ref: ArtifactRef) -> None:
    """Note an artifact for the next update of the ledger. Noted before it is referenced, so that none is missed."""
    store.create(_note(ref), b"{}")


def noted(store: Store) -> list[ArtifactRef]:
    """Noted artifacts, in order of kind and key."""
    named = (key.removeprefix(_PENDING).removesuffix(".json").split("/") for key in store.list(_PENDING))
    return [ArtifactRef(kind=kind, key=key, digest=digest) for kind, key, digest in named]


def unnote(store: Store, ref: ArtifactRef) -> None:
    """Forget a noted artifact, which the ledger has now."""
    store.delete(_note(ref))


def _note(ref: ArtifactRef) -> str:
    return f"{_PENDING}{ref.kind}/{ref.key}/{ref.digest}.json"
