"""Place in the store of the logs of trainers that ran elsewhere."""

from __future__ import annotations

from contracts.store import Store

FOLDER = "logs/training"


def logs_folder(key: str) -> str:
    """Folder in the store with the logs of all attempts of a training."""
    return f"{FOLDER}/{key}"


def kept_logs(store: Store, key: str) -> str:
    """Where the logs of a training are, for display; empty: none were kept."""
    folder = logs_folder(key)
    return f"{store.url}/{folder}" if store.folders(f"{folder}/") else ""
