"""Booted virtual machines under QEMU. Builds a guest image where there is none: needs apt, QEMU and squashfs-tools."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from contracts.owned import owned_name
from envd.backends.base import NetworkRule
from envd.backends.qemu import backend as qemu
from envd.client import ToolCall
from envd.errors import BackendUnavailable, SandboxGone, SandboxStartError
from envd.local import LocalEnvd
from envd.operations.client import ManagedSandbox
from envd.sandbox.cgroups import OWNED
from envd.types import Limits
from tests.envd.harness import FILES, FIX, Harness

pytest.register_assert_rewrite("tests.envd.backend_contract")

from tests.envd import backend_contract  # noqa: E402
from tests.envd.backend_contract import Machines, says  # noqa: E402
from tests.envd.stand_ins import qemu_image  # noqa: E402
from tests.needs import require  # noqa: E402

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def image() -> Path:
    return qemu_image()


def _machines(image: Path, directory: Path, runner: asyncio.Runner) -> Iterator[Machines]:
    run_dir = Path("/tmp", f"{OWNED}{owned_name()}")
    run_dir.mkdir(mode=0o711)
    backend = runner.run(qemu.start(run_dir, image, "tcg"))
    yield Machines(runner, backend, directory)
    runner.run(backend.stop())
    left = [path.name for path in run_dir.iterdir()]
    shutil.rmtree(run_dir)
    assert left == []
    groups = [str(path) for path in Path("/sys/fs/cgroup").glob(f"*/{run_dir.name}*")]
    assert groups == [], "groups are left"


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


@pytest.fixture(scope="module")
def machines(image: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    yield from _machines(image, tmp_path_factory.mktemp("machines"), runner)


@pytest.fixture(scope="module")
def elsewhere(image: Path, runner: asyncio.Runner, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    """Another server, with directories of its own."""
    yield from _machines(image, tmp_path_factory.mktemp("elsewhere"), runner)


def test_neighbours_have_names_of_their_own(machines: Machines) -> None:
    async def names(here: Machines) -> None:
        boxes = [await here.create(host_name="one"), await here.create(host_name="two")]
        assert [await says(box, "cat /proc/sys/kernel/hostname; hostname") for box in boxes] == ["one\none", "two\ntwo"]

    machines.run(names)


def test_hibernate_resume_fork_and_migrate_keep_a_process_of_200_mb(machines: Machines, elsewhere: Machines) -> None:
    async def job(here: Machines) -> dict[str, float]:
        return await backend_contract.moves_with_its_memory(here, 200, elsewhere)

    times = machines.run(job)
    elsewhere.run(_nothing)
    print(json.dumps({name: round(seconds, 2) for name, seconds in times.items()}))
    assert times["hibernate"] < 120 and times["resume"] < 120


async def _nothing(machines: Machines) -> None:
    """Only what a run ends with."""


def test_what_a_sandbox_writes_is_limited(machines: Machines) -> None:
    async def job(here: Machines) -> None:
        box = await here.create()
        assert "No space left" in await says(
            box, "head -c 64M /dev/zero >/tmp/big 2>&1; head -c 64M /dev/zero 2>&1 >big"
        )
        assert "Read-only file system" in await says(box, "touch /usr/mine 2>&1; touch /.template/mine 2>&1")
        bomb = await says(box, "for i in $(seq 200); do sleep 20 & done 2>&1 | tail -1; rm -f big /tmp/big; echo alive")
        assert bomb.endswith("alive")
        other = await here.create()
        assert await says(other, "echo unharmed") == "unharmed"

    machines.run(job)


def test_a_read_only_workspace_can_not_be_written(machines: Machines) -> None:
    async def job(here: Machines) -> None:
        box = await here.create(read_only=True)
        assert "Read-only file system" in await says(box, "touch mine 2>&1")
        with pytest.raises(OSError, match="Read-only"):
            await box.guest.write("mine", b"")

    machines.run(job)


def test_a_kernel_that_panics_ends_its_sandbox_only(machines: Machines) -> None:
    async def job(here: Machines) -> None:
        box, other = await here.create(), await here.create()
        with pytest.raises(SandboxGone):
            await says(box, "echo c >/proc/sysrq-trigger")
        await box.destroy()
        assert await says(other, "echo unharmed") == "unharmed"

    machines.run(job)


def test_a_snapshot_that_is_given_up_leaves_the_machine_running(machines: Machines) -> None:
    async def job(here: Machines) -> None:
        box = await here.create()
        taking = asyncio.create_task(box.snapshot(here.fresh("given-up")))
        await asyncio.sleep(0.05)
        taking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await taking
        assert await says(box, "echo on") == "on"
        assert not (here.directory / "given-up/machine.json").exists()

    machines.run(job)


def test_what_does_not_fit_is_refused_in_words(machines: Machines) -> None:
    async def job(here: Machines) -> None:
        with pytest.raises(SandboxStartError, match="no network"):
            await here.create(network=(NetworkRule("example.org"),))
        box = await here.create()
        taken = here.fresh("fits-not")
        await box.snapshot(taken)
        with pytest.raises(SandboxStartError, match=r"memory.*384.*512"):
            await here.restore(taken, limits=Limits(memory_mb=512))
        with pytest.raises(SandboxStartError, match="template"):
            await here.restore(taken, template="b" * 64)
        (taken / "state").write_bytes(b"no state")
        with pytest.raises(SandboxStartError, match="did not start"):
            await here.restore(taken)
        (taken / "state").unlink()
        with pytest.raises(SandboxStartError, match="incomplete snapshot"):
            await here.restore(taken)
        with pytest.raises(SandboxStartError, match="no snapshot"):
            await here.restore(here.fresh("nothing"))

    machines.run(job)


def test_machines_end_with_a_server_that_is_killed(image: Path, tmp_path: Path) -> None:
    """The server is a child that is killed with SIGKILL while it holds a machine."""
    script = f"""
import asyncio, os, sys
from pathlib import Path
from envd.backends.qemu import backend as qemu
from tests.envd.backend_contract import Machines
async def main():
    run_dir = Path({str(tmp_path)!r}) / "run"
    run_dir.mkdir()
    backend = await qemu.start(run_dir, Path({str(image)!r}), "tcg")
    box = await backend.create(Machines(None, backend, Path({str(tmp_path)!r})).spec())
    print(box._machine.process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    tmp_path.chmod(0o755)
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pid = int(server.stdout.readline())
    assert Path(f"/proc/{pid}/comm").read_text().startswith("qemu")
    server.send_signal(signal.SIGKILL)
    server.wait()
    server.stdout.close()
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
        assert time.monotonic() < deadline, "the machine lives on"
        time.sleep(0.05)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives its rights up")
def test_qemu_runs_without_rights_or_network(machines: Machines) -> None:
    async def job(here: Machines) -> None:
        box = await here.create()
        pid = box._machine.process.pid  # type: ignore[attr-defined]
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        assert status["Uid"].split()[0] == str(231072) and int(status["CapEff"], 16) == 0
        assert status["Seccomp"] == "2" and status["NoNewPrivs"] == "1"
        assert Path(f"/proc/{pid}/ns/net").readlink() != Path("/proc/self/ns/net").readlink()

    machines.run(job)


def test_a_server_serves_machines(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through gRPC: tools, diff, hibernation and forks are the same as with other backends."""
    monkeypatch.setenv("TRIPLANE_ENVD_IMAGE", str(image))
    monkeypatch.setenv("TRIPLANE_ENVD_QEMU_ACCEL", "tcg")

    async def job(sandbox: ManagedSandbox) -> None:
        assert (await sandbox.call(FIX)).text == "ok"
        ran = await sandbox.call(
            ToolCall("exec", {"command": "export KEPT=1; sleep 600 & python3 -c 'import calc; print(calc.add(1, 2))'"})
        )
        assert ran.text == "3\nexit 0"
        diff = await sandbox.diff()
        assert b"+    return a + b" in diff
        assert (await sandbox.hibernate()).state == "hibernated"
        assert (await sandbox.resume()).state == "running"
        fork = await sandbox.fork()
        for each in (sandbox, fork):
            kept = await each.call(ToolCall("exec", {"command": "echo $KEPT; jobs -r | wc -l"}))
            assert kept.text == "1\n1\nexit 0"
            assert await each.diff() == diff

    with LocalEnvd("qemu") as server:
        Harness(server.address).sandbox(job, files=FILES)


def test_a_missing_image_is_one_line_with_its_fix(tmp_path: Path) -> None:
    require("qemu-system-x86_64")
    with pytest.raises(BackendUnavailable, match=r"envd\.images\.build --out"):
        asyncio.run(qemu.start(tmp_path, tmp_path / "nothing", "tcg"))
