"""Iterations that are asked for in the UI run as pods, and make what a laptop makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.acceptance.laboratory import Laboratory
from tests.acceptance.test_iterations_are_exact import KINDS
from tests.kubernetes.cluster.conftest import QUICKSTART, TINY
from tests.kubernetes.cluster.world import World

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(3600)]
ITERATIONS = 2


@pytest.mark.parametrize("file", [TINY, QUICKSTART], ids=lambda file: file.stem)
def test_two_iterations_of_the_ui_have_the_digests_of_a_local_run(
    file: Path, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in world.store.items():
        monkeypatch.setenv(name, value)
    remote = Laboratory(tmp_path / "remote", file, environment=world.store)
    before = remote.digests(*KINDS)  # of the other experiment in the same store
    world.train(file.stem, ITERATIONS)
    world.finish(file.stem, ITERATIONS)
    local = Laboratory(tmp_path / "local", file)
    local.iterate(ITERATIONS)
    after, alone = remote.digests(*KINDS), local.digests(*KINDS)
    for kind in KINDS:
        assert set(after[kind]) - set(before[kind]) <= set(alone[kind]) <= set(after[kind]), kind
        assert len(alone[kind]) >= len(after[kind]) - len(before[kind]), f"{kind}: something was made twice"
    assert not world.get("jobs", "triplane/job-key"), "trainer Jobs are deleted when their logs are kept"
