"""The world of the report's tests, written once and read only."""

from __future__ import annotations

from typing import Any

import pytest
from report_world import World, write_world

from contracts.store import Store, open_store
from ops.report.build import compose
from ops.report.history import earlier_rows
from ops.report.page import read_data
from ops.report.sources import find_sources
from tests.cli.cli_history import EXPERIMENT


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return write_world(open_store(str(tmp_path_factory.mktemp("store"))))


def page_of(store: Store, iteration: str) -> bytes:
    earlier = earlier_rows(store, EXPERIMENT, iteration)
    seconds, speeds = {"0000": {"rollouts": 2.0}}, {"0000": 512.5}
    return compose(find_sources(store, EXPERIMENT, iteration), earlier, seconds, speeds).page


@pytest.fixture(scope="session")
def first(world: World) -> dict[str, Any]:
    """What the page of iteration 0000 shows."""
    return read_data(page_of(world.store, "0000"))


@pytest.fixture(scope="session")
def hostile_page(world: World) -> bytes:
    return page_of(world.store, "0001")
