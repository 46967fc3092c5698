"""The Firecracker backend against a stand-in that checks what it is asked as Firecracker does (firecracker_server.py).
No real one has run it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from contracts.owned import owned_name
from envd.backends.firecracker import backend as firecracker
from envd.errors import BackendUnavailable, SandboxGone, SandboxStartError
from envd.local import LocalEnvd
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.sandbox.cgroups import OWNED
from envd.types import ToolCall

pytest.register_assert_rewrite("tests.envd.backend_contract")

from tests.envd.backend_contract import Machines, says  # noqa: E402
from tests.envd.stand_ins import FIRECRACKER_NEEDS, Installed, firecracker_host  # noqa: E402
from tests.needs import lacks  # noqa: E402

MISSING = lacks(*FIRECRACKER_NEEDS)
pytestmark = [pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}")]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    with firecracker_host(tmp_path_factory.mktemp("host")) as host:
        yield host


def _machines(installed: Installed, directory: Path) -> Iterator[Machines]:
    run_dir = Path("/tmp", f"{OWNED}{owned_name()}")
    run_dir.mkdir(mode=0o711)
    with asyncio.Runner() as runner:
        backend = runner.run(firecracker.start(run_dir, installed.image))
        yield Machines(runner, backend, directory)
        runner.run(backend.stop())
    left = [path.name for path in run_dir.iterdir()]
    shutil.rmtree(run_dir)
    assert left == []
    assert list(Path("/sys/fs/cgroup").glob(f"*/{run_dir.name}*")) == []


@pytest.fixture(scope="module")
def machines(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    yield from _machines(installed, tmp_path_factory.mktemp("here"))


@pytest.fixture(scope="module")
def elsewhere(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machines]:
    yield from _machines(installed, tmp_path_factory.mktemp("there"))


def test_a_base_machine_boots_once_and_others_load_its_snapshot(machines: Machines, installed: Installed) -> None:
    async def job(here: Machines) -> None:
        await asyncio.gather(*(here.create(template="f" * 64) for _ in range(4)))

    installed.requests()
    machines.run(job)
    asked = installed.requests()
    assert all(line["answer"] is None for line in asked), "a request was refused"
    boot = [line["path"] for line in asked if line["id"] == asked[0]["id"]]
    assert boot == [
        *("/machine-config", "/boot-source", "/drives/root", "/drives/template", "/vsock", "/entropy", "/actions"),
        *("/vm", "/snapshot/create"),
    ]
    loads = [line for line in asked if line["path"] == "/snapshot/load"]
    assert len(loads) == 4 and len({str(line["id"]) for line in loads}) == 4
    assert loads[0]["body"] == {
        "snapshot_path": "state",
        "mem_backend": {"backend_type": "File", "backend_path": "memory"},
        "resume_vm": True,
        "track_dirty_pages": True,
    }


def test_a_runtime_is_a_disk_of_its_own_and_a_root_is_the_first(machines: Machines, installed: Installed) -> None:
    async def job(here: Machines) -> None:
        packages, root = here.runtime("1"), here.runtime("2", is_root=True)
        box = await here.create(template="d" * 64, runtime=packages)
        await here.create(template="d" * 64, runtime=packages)
        await here.create(template="d" * 64, runtime=root)
        snapshot = here.fresh("with-packages")
        await box.snapshot(snapshot)
        with pytest.raises(SandboxStartError, match="needs the runtime 1111"):
            await here.restore(snapshot, template="d" * 64, runtime=here.runtime("3"))
        assert await says(await here.restore(snapshot, template="d" * 64, runtime=packages), "ls") == "calc.py\ndeep"
        disk = here.backend._media._disk(packages.digest)  # type: ignore[attr-defined]
        assert disk.exists()
        await here.backend.forget(packages.digest)  # type: ignore[attr-defined]
        assert not disk.exists()

    installed.requests()
    machines.run(job)
    asked = installed.requests()
    assert all(line["answer"] is None for line in asked), "a request was refused"
    boots = [line["id"] for line in asked if line["path"] == "/boot-source"]
    drives = [
        [line["path"] for line in asked if line["id"] == boot and "/drives/" in str(line["path"])] for boot in boots
    ]
    assert drives == [["/drives/root", "/drives/template", "/drives/packages"], ["/drives/root", "/drives/template"]]


def test_snapshots_are_diffs_that_are_merged_into_ones_that_stand_alone(
    machines: Machines, elsewhere: Machines, installed: Installed
) -> None:
    """Two in a row, since the second diff is over the first snapshot; forked at the same time, moved to another
    server.
    """

    async def job(here: Machines) -> tuple[Path, Path]:
        box = await here.create()
        await box.guest.write("large", os.urandom(1 << 20))
        first = here.fresh("first")
        assert await box.snapshot(first) == ()
        await box.guest.write("small", b"after the first\n")
        second = here.fresh("second")
        await box.snapshot(second)
        moved = here.fresh("moved") / "it"
        shutil.copytree(first, moved)
        for path in moved.iterdir():
            path.chmod(0o600)  # as a server may keep what it received
        shutil.rmtree(first)
        digest = await says(box, "sha256sum large")
        forks = await asyncio.gather(here.restore(second), here.restore(second))
        await forks[0].guest.write("small", b"changed\n")
        assert await says(forks[1], "cat small; sha256sum large") == f"after the first\n{digest}"
        third = here.fresh("third")
        await forks[0].snapshot(third)
        await forks[0].destroy()
        woken = await here.restore(third)
        assert await says(woken, "cat small; sha256sum large") == f"changed\n{digest}"
        return here.directory / "moved/it", second

    installed.requests()
    moved, second = machines.run(job)
    kinds = [line["body"]["snapshot_type"] for line in installed.requests() if line["path"] == "/snapshot/create"]  # type: ignore[index]
    assert "Full" not in kinds[-3:] and kinds.count("Diff") == 3
    written = (second / "memory").stat()
    assert written.st_blocks * 512 < written.st_size / 10, "a memory file lost its holes"

    async def there(other: Machines) -> None:
        box = await other.restore(moved)
        assert await says(box, "ls; rm large") == "calc.py\ndeep\nlarge"

    elsewhere.run(there)


def test_a_snapshot_of_a_paused_machine_leaves_it_paused(machines: Machines) -> None:
    async def job(here: Machines) -> None:
        box = await here.create()
        await box.pause()
        await box.snapshot(here.fresh("paused"))
        asked = asyncio.create_task(says(box, "echo on"))
        await asyncio.sleep(0.3)
        assert not asked.done()
        await box.resume()
        assert await asked == "on"

    machines.run(job)


def test_a_vmm_that_dies_is_told_and_leaves_nothing(machines: Machines) -> None:
    async def job(here: Machines) -> None:
        box = await here.create()
        jail = box._machine.root  # type: ignore[attr-defined]
        process = box._machine._process  # type: ignore[attr-defined]
        process.kill()
        await process.wait()
        with pytest.raises(SandboxGone):
            for _ in range(100):  # the guest of the stand-in is a process of its own and ends a moment later
                await says(box, "sleep 0.1")
        with pytest.raises(SandboxGone):
            await box.pause()
        await box.destroy()
        await box.destroy()
        assert not jail.exists()

    machines.run(job)


def test_what_can_not_be_loaded_is_refused_in_firecrackers_words(machines: Machines) -> None:
    async def job(here: Machines) -> None:
        box = await here.create()
        taken = here.fresh("broken")
        await box.snapshot(taken)
        with (taken / "memory").open("r+b") as memory:
            memory.truncate(1 << 20)
        with pytest.raises(SandboxStartError, match="memory file's size does not match"):
            await here.restore(taken)
        (taken / "state").write_text("{}")
        with pytest.raises(SandboxStartError, match="incompatible snapshot version"):
            await here.restore(taken)
        (taken / "memory").unlink()
        with pytest.raises(SandboxStartError, match="memory"):
            await here.restore(taken)

    machines.run(job)


def test_a_jail_that_answers_with_a_link_is_not_followed(machines: Machines) -> None:
    """A Firecracker that was taken over puts a link where its snapshot should be."""

    async def job(here: Machines) -> None:
        box = await here.create()
        machine = box._machine  # type: ignore[attr-defined]
        write = machine.write

        async def taken_over(kind: str, state: str, memory: str) -> None:
            await write(kind, state, memory)
            (machine.root / memory).unlink()
            (machine.root / memory).symlink_to("/etc/passwd")

        machine.write = taken_over
        with pytest.raises(Exception, match=r"diff\.memory can't be read"):
            await box.snapshot(here.fresh("linked"))
        assert not (here.directory / "linked/machine.json").exists()
        assert await says(box, "echo on") == "on"

    machines.run(job)


def test_an_older_firecracker_gets_the_older_flag(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FAKE_FIRECRACKER_VERSION", "1.10.1")
    installed.requests()

    async def job() -> str:
        backend = await firecracker.start(tmp_path, installed.image)
        await backend.stop()
        return backend.features.helper

    assert asyncio.run(job()).startswith("firecracker 1.10.1")
    (load,) = [line for line in installed.requests() if line["path"] == "/snapshot/load"]
    assert load["answer"] is None and "enable_diff_snapshots" in str(load["body"])


@pytest.mark.parametrize("count", [5, pytest.param(50, marks=pytest.mark.slow)])
def test_a_batch_of_machines_runs_commands(installed: Installed, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    async def job(address: str) -> list[str]:
        async with OperationsClient(address) as client:
            made = await client.create_many(await client.put_template({}), count)
            call = ToolCall("exec", {"command": "echo on"})
            return [(await each.call(call)).text for each in made if isinstance(each, ManagedSandbox)]

    monkeypatch.setenv("TRIPLANE_ENVD_IMAGE", str(installed.image))
    with LocalEnvd("firecracker", log_level="error") as server:
        assert asyncio.run(job(server.address)) == ["on\nexit 0"] * count


def test_machines_end_with_a_server_that_is_killed(installed: Installed, tmp_path: Path) -> None:
    script = f"""
import asyncio
from pathlib import Path
from envd.backends.firecracker import backend as firecracker
from tests.envd.backend_contract import Machines
async def main():
    backend = await firecracker.start(Path({str(tmp_path)!r}), Path({str(installed.image)!r}))
    box = await backend.create(Machines(None, backend, Path({str(tmp_path)!r})).spec())
    print(box._machine._process.pid, flush=True)
    await asyncio.sleep(600)
asyncio.run(main())
"""
    server = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    pids = [int(server.stdout.readline())]
    for pid in pids:
        pids += [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    assert len(pids) > 2
    server.send_signal(signal.SIGKILL)
    server.wait()
    server.stdout.close()
    deadline = time.monotonic() + 10
    while alive := [pid for pid in pids if _runs(pid)]:
        assert time.monotonic() < deadline, f"{alive} live on"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    try:
        return bool(Path(f"/proc/{pid}/cmdline").read_bytes())
    except OSError:
        return False


def test_a_host_without_firecracker_or_jailer_is_told_what_to_install(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("TRIPLANE_ENVD_FIRECRACKER", str(tmp_path / "nothing"))
    with pytest.raises(BackendUnavailable, match="firecracker is not installed"):
        asyncio.run(firecracker.start(tmp_path, installed.image))
    if os.geteuid() == 0:
        shutil.copy(installed.program, tmp_path / "firecracker")
        monkeypatch.setenv("TRIPLANE_ENVD_FIRECRACKER", str(tmp_path / "firecracker"))
        with pytest.raises(BackendUnavailable, match="no jailer beside"):
            asyncio.run(firecracker.start(tmp_path, installed.image))


def test_the_stand_in_refuses_what_firecracker_refuses(installed: Installed, tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    (tmp_path / "run").mkdir()
    process = subprocess.Popen([installed.program, "--api-sock", "run/api", "--id", "m1"], cwd=tmp_path)
    transport = httpx.HTTPTransport(uds=str(tmp_path / "run/api"), retries=5)  # bound is not yet listening
    try:
        deadline = time.monotonic() + 10
        while not (tmp_path / "run/api").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        with httpx.Client(transport=transport, base_url="http://localhost") as client:
            for path, body, words in (
                ("/vsock", {"guest_cid": 3, "uds_path": "v", "port": 1}, "unknown field `port`"),
                ("/vsock", {"guest_cid": 3}, "missing field `uds_path`"),
                ("/vsock", {"guest_cid": "3", "uds_path": "v"}, "invalid type"),
                ("/boot-source", {"kernel_image_path": "vmlinux"}, "No such file"),
                ("/actions", {"action_type": "InstanceStart"}, "without kernel"),
                ("/snapshot/create", {"snapshot_path": "a", "mem_file_path": "b"}, "before starting"),
            ):
                answer = client.put(path, json=body)
                assert answer.status_code == 400 and words in answer.json()["fault_message"]
            assert client.get("/").json()["state"] == "Not started"
            assert client.put("/machine-config", json={"vcpu_count": 1, "mem_size_mib": 128}).status_code == 204
            load = {"snapshot_path": "a", "mem_backend": {"backend_type": "File", "backend_path": "b"}}
            assert "after configuring" in client.put("/snapshot/load", json=load).json()["fault_message"]
    finally:
        process.kill()
        process.wait()
