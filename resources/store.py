"""Dagster resource for the artifact store."""

from __future__ import annotations

from typing import Any

import dagster as dg

from contracts.leftovers import sweep_once
from contracts.store import Store, open_store
from resources.pipes import sweep_channels


class StoreResource(dg.ConfigurableResource[Any]):
    """Opens the store of $TRIPLANE_STORE, else .triplane/store.

    It has no settings: those of one run would send its artifacts to one store and its references to another.
    """

    def open(self) -> Store:
        """Open the store, and remove leftovers of killed processes from it and from their message channels."""
        store = open_store()
        sweep_once(store)
        sweep_channels()
        return store
