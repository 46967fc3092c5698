"""Every backend keeps the protocol of envd/backends/base.py: one suite, run on each that starts here."""

from __future__ import annotations

import asyncio
import importlib
import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from contracts.owned import owned_name
from envd.backends import BACKENDS
from envd.backends.firecracker import backend as firecracker
from envd.backends.pods import backend as pods
from envd.backends.qemu import backend as qemu
from envd.sandbox.cgroups import OWNED, remove_groups
from tests.envd.gvisors import require_runsc

pytest.register_assert_rewrite("tests.envd.backend_contract")

from tests.envd import backend_contract  # noqa: E402
from tests.envd.backend_contract import Machines  # noqa: E402
from tests.envd.stand_ins import FIRECRACKER_NEEDS, firecracker_host, pods_cluster, qemu_image  # noqa: E402
from tests.needs import require  # noqa: E402

SLOW = {"gvisor": [pytest.mark.slow], "qemu": [pytest.mark.slow, pytest.mark.timeout(600)]}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=SLOW.get(name, [])) for name in BACKENDS])
def machines(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    name, run_dir = str(request.param), Path("/tmp", f"{OWNED}{owned_name()}")
    (run_dir / "templates").mkdir(parents=True)
    (run_dir / "boxes").mkdir()
    run_dir.chmod(0o711)
    with ExitStack() as stack:
        stack.callback(remove_groups, run_dir.name)
        stack.callback(shutil.rmtree, run_dir, ignore_errors=True)
        runner = stack.enter_context(asyncio.Runner())
        if name == "qemu":
            starting = qemu.start(run_dir, qemu_image(), "tcg")
        elif name == "firecracker":
            require(*FIRECRACKER_NEEDS)
            host = stack.enter_context(firecracker_host(tmp_path_factory.mktemp("host")))
            starting = firecracker.start(run_dir, host.image)
        elif name == "pods":
            stack.enter_context(pods_cluster(tmp_path_factory.mktemp("containers")))
            starting = pods.start(run_dir)
        else:
            if name == "gvisor":
                require_runsc()
            starting = importlib.import_module(f"envd.backends.{name}.backend").start(run_dir)
        backend = runner.run(starting)
        yield Machines(runner, backend, run_dir)
        runner.run(backend.stop())
        assert [path.name for path in (run_dir / "boxes").iterdir()] == []


def test_backend_says_what_it_is_and_can(machines: Machines) -> None:
    machines.run(lambda here: backend_contract.says_what_it_is(here, here.backend.name))
    assert machines.backend.name in BACKENDS


def test_sandbox_shows_its_workspace_and_environment(machines: Machines) -> None:
    machines.run(backend_contract.shows_the_workspace)


def test_neighbours_share_neither_files_nor_random_numbers(machines: Machines) -> None:
    machines.run(backend_contract.keeps_neighbours_apart)


def test_destroyed_sandbox_is_gone_and_its_neighbour_lives(machines: Machines) -> None:
    machines.run(backend_contract.ends)


def test_paused_sandbox_stands_still_and_resumes(machines: Machines) -> None:
    if "pause" not in machines.backend.features.can:
        pytest.skip(f"{machines.backend.name} offers no pause")
    machines.run(backend_contract.pauses)


def test_snapshot_keeps_files_and_is_restored_several_times(machines: Machines) -> None:
    assert {"snapshot", "fork"} <= machines.backend.features.can
    machines.run(backend_contract.keeps_files_in_a_snapshot)


def test_template_is_forgotten_and_can_be_used_again(machines: Machines) -> None:
    machines.run(backend_contract.forgets_templates)
