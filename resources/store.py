"""The artifact store as a Dagster resource."""

from __future__ import annotations

from typing import Any

import dagster as dg
from pydantic import Field

from contracts.store import Store, open_store


class StoreResource(dg.ConfigurableResource[Any]):
    """Opens the artifact store. Every process of a run opens the same one."""

    url: str = Field(
        default="", description="A directory or s3://bucket/prefix; empty: $TRIPLANE_STORE, else .triplane/store"
    )

    def open(self) -> Store:
        """The store."""
        return open_store(self.url or None)
