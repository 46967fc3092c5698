"""Dagster resource for the artifact store."""

from __future__ import annotations

from typing import Any

import dagster as dg
from pydantic import Field

from contracts.leftovers import sweep_once
from contracts.store import Store, open_store
from resources.pipes import sweep_channels


class StoreResource(dg.ConfigurableResource[Any]):
    """Opens the artifact store; every process of a run opens the same one."""

    url: str = Field(
        default="", description="A directory or s3://bucket/prefix; empty: $TRIPLANE_STORE, else .triplane/store"
    )

    def open(self) -> Store:
        """Open the store, and remove leftovers of killed processes from it and from their message channels."""
        store = open_store(self.url or None)
        sweep_once(store)
        sweep_channels()
        return store
