"""The artifact store as a Dagster resource."""

from __future__ import annotations

from typing import Any

import dagster as dg
from pydantic import Field

from contracts.leftovers import sweep_once
from contracts.store import Store, open_store


class StoreResource(dg.ConfigurableResource[Any]):
    """Opens the artifact store. Every process of a run opens the same one."""

    url: str = Field(
        default="", description="A directory or s3://bucket/prefix; empty: $TRIPLANE_STORE, else .triplane/store"
    )

    def open(self) -> Store:
        """The store. What killed processes left there is swept when a process first opens it."""
        store = open_store(self.url or None)
        sweep_once(store)
        return store
