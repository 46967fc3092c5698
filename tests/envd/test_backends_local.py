"""The backends whose sandboxes are processes of this host's kernel, through the protocol that services use."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from envd import native
from envd.backends.base import Backend, Box, BoxSpec, NetworkRule
from envd.backends.namespaces import backend as namespaces
from envd.backends.plain import backend as plain
from envd.errors import BackendUnavailable, EnvdError, SandboxGone, SandboxStartError
from envd.native import build
from envd.sandbox.cgroups import box_groups
from envd.sandbox.linux import sandbox_owner
from envd.types import Limits
from tests.envd.harness import require_limits

T = TypeVar("T")
STARTS: dict[str, Callable[[Path], Awaitable[Backend]]] = {"plain": plain.start, "namespaces": namespaces.start}
GROUPS = {"plain": "plain", "namespaces": "native"}
STAMP = 1_000_000_000


@pytest.fixture(params=["plain", "namespaces"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def spec_of(run_dir: Path, name: str) -> BoxSpec:
    template = run_dir / "templates" / "t1"
    if not template.exists():
        (template / "sub").mkdir(parents=True)
        (template / "kept").write_text("kept\n")
        (template / "sub/removed").write_text("x\n")
        for path in (template, *template.rglob("*")):
            os.chown(path, sandbox_owner(), sandbox_owner())
            os.utime(path, (STAMP, STAMP))
    return BoxSpec(name, "t1", template, Limits(memory_mb=256), env={"WORD": "value"}, host_name="myhost")


def on(kind: str, run_dir: Path, job: Callable[[Backend], Awaitable[T]]) -> T:
    async def whole() -> T:
        backend = await STARTS[kind](run_dir)
        try:
            async with asyncio.timeout(60):
                return await job(backend)
        finally:
            await backend.stop()

    return asyncio.run(whole())


async def shell(box: Box, command: str, deadline_s: float = 20) -> str:
    (result,) = await box.guest.shell([(command, deadline_s)])
    return result.head.decode()


def below_this_process(text: str) -> list[str]:
    """Commands on this machine that hold a text: what a test started must not outlive it."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if text in command:
                found.append(command)
    return found


def test_a_box_has_its_template_its_environment_and_its_name(kind: str, run_dir: Path) -> None:
    async def job(backend: Backend) -> tuple[str, str]:
        box = await backend.create(spec_of(run_dir, "one"))
        said = await shell(box, "cat kept; echo $WORD; stat -c %Y kept"), await shell(box, "hostname")
        await box.destroy()
        await box.destroy()
        with pytest.raises(SandboxGone):
            await box.guest.stat(".")
        return said

    said, host = on(kind, run_dir, job)
    assert said == f"kept\nvalue\n{STAMP}\n"
    assert host == "myhost\n" or kind == "plain"


def test_destroying_leaves_no_process_group_or_directory(kind: str, run_dir: Path) -> None:
    mark = f"77{time.time_ns() % 10**8}"

    async def job(backend: Backend) -> None:
        box = await backend.create(spec_of(run_dir, "mine"))
        await shell(box, f"sleep {mark} & (setsid nohup sleep {mark} >/dev/null 2>&1 &); true")
        await box.guest.start(["sleep", mark])
        while len(below_this_process(f"sleep {mark}")) < 3:  # what was forked has yet to exec
            await asyncio.sleep(0.01)
        groups = [path for path in box_groups(f"{run_dir.name}-{GROUPS[kind]}", "mine").values() if path.exists()]
        assert groups or kind != "plain" or not backend.features.limits_enforced
        await box.destroy()
        assert below_this_process(f"sleep {mark}") == []
        assert not (run_dir / "boxes/mine").exists()
        assert [path for path in groups if path.exists()] == []

    on(kind, run_dir, job)


def test_an_agent_that_ignores_the_end_of_its_stream_is_killed_with_its_box(kind: str, run_dir: Path) -> None:
    mark = f"78{time.time_ns() % 10**8}"

    async def job(backend: Backend) -> None:
        box = await backend.create(spec_of(run_dir, "stopped"))
        agent = await shell(box, f"sleep {mark} & echo $PPID")
        if kind == "plain":
            os.kill(int(agent), signal.SIGSTOP)
        else:
            await box.guest.start(["sleep", mark])
        await box.destroy()
        assert below_this_process(f"sleep {mark}") == []

    on(kind, run_dir, job)


def test_a_snapshot_keeps_files_and_says_what_it_loses(kind: str, run_dir: Path, tmp_path: Path) -> None:
    async def job(backend: Backend) -> None:
        spec = spec_of(run_dir, "first")
        first = await backend.create(spec)
        await shell(
            first,
            "rm sub/removed; ln -s kept link; chmod 755 kept; mkfifo pipe; head -c 3000000 /dev/urandom > big; X=1",
        )
        assert await first.snapshot(tmp_path) == ("processes",)
        assert list(tmp_path.iterdir())
        wanted = await shell(first, "sha256sum big; ls -1AF")
        copies = await asyncio.gather(
            *(backend.restore(tmp_path, replace(spec, name=f"copy-{n}", host_name=f"copy{n}")) for n in range(2))
        )
        for copy in copies:
            assert await shell(copy, "sha256sum big; ls -1AF") == wanted
            assert (
                await shell(copy, "stat -c '%Y %a' kept; ls sub; echo .$X.; readlink link")
                == f"{STAMP} 755\n..\nkept\n"
            )
        await shell(copies[0], "echo changed > kept")
        assert (await copies[1].guest.read("kept"))[1] == b"kept\n"
        assert (await first.guest.read("kept"))[1] == b"kept\n"
        for box in (first, *copies):
            await box.destroy()

    on(kind, run_dir, job)


def test_what_is_no_snapshot_restores_nothing(kind: str, run_dir: Path, tmp_path: Path) -> None:
    async def job(backend: Backend) -> None:
        with pytest.raises(EnvdError, match=r"workspace\.tar|no snapshot"):
            await backend.restore(tmp_path, spec_of(run_dir, "none"))
        for name in ("workspace.tar", "files.tar"):
            (tmp_path / name).write_bytes(os.urandom(300_000))
        (tmp_path / "snapshot.json").write_text('{"template": "t1"}')
        with pytest.raises(EnvdError, match=r"can't be restored|could not start"):
            await backend.restore(tmp_path, spec_of(run_dir, "torn"))

    on(kind, run_dir, job)


def test_what_a_backend_can_not_do_is_refused_in_words(kind: str, run_dir: Path) -> None:
    async def job(backend: Backend) -> None:
        spec = spec_of(run_dir, "refused")
        for wrong in (
            *([replace(spec, network=(NetworkRule("example.org"),))] if kind == "plain" else []),
            *([replace(spec, read_only=True)] if kind == "plain" else []),
            replace(spec, template_dir=run_dir / "templates" / "missing"),
            replace(spec, template_dir=Path("/etc")),
        ):
            with pytest.raises(SandboxStartError):
                await backend.create(wrong)
        box = await backend.create(spec)
        if "pause" not in backend.features.can:
            with pytest.raises(EnvdError, match="paus"):
                await box.pause()
        await box.destroy()

    on(kind, run_dir, job)


def test_usage_is_what_the_kernel_counts(kind: str, run_dir: Path) -> None:
    async def job(backend: Backend) -> None:
        require_limits(backend.features.limits_enforced, "memory")
        box = await backend.create(spec_of(run_dir, "used"))
        await box.guest.start(["sleep", "50"])
        await shell(box, "python3 -c 'x = bytearray(50_000_000)'; (exec python3 -c 'x = bytearray(900_000_000)')")
        usage = await box.usage()
        assert usage.pids >= 3 and usage.memory_bytes > 100_000 and usage.events.get("memory", 0) >= 1
        await box.destroy()

    on(kind, run_dir, job)


async def until_nothing_runs(text: str) -> list[str]:
    """What still runs after a while of the commands that hold a text."""
    for _ in range(500):
        if not below_this_process(text):
            break
        await asyncio.sleep(0.01)
    return below_this_process(text)


@pytest.mark.parametrize("victim", ["agent", "supervisor"])
def test_a_plain_sandbox_whose_agent_or_supervisor_was_killed_leaves_nothing(victim: str, run_dir: Path) -> None:
    mark = f"79{time.time_ns() % 10**8}"

    async def job(backend: Backend) -> None:
        box = await backend.create(spec_of(run_dir, "orphan"))
        agent = int(await shell(box, f"sleep {mark} & (setsid nohup sleep {mark} &) ; echo $PPID"))
        status = (Path("/proc") / str(agent) / "status").read_text()
        supervisor = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("PPid"))
        os.kill(agent if victim == "agent" else supervisor, signal.SIGKILL)
        if victim == "agent":
            await asyncio.wait_for(box.guest.closed(), 10)
            assert await until_nothing_runs(f"sleep {mark}") == [], "the supervisor ends them by itself"
        await box.destroy()
        assert await until_nothing_runs(f"sleep {mark}") == []
        assert not (run_dir / "boxes/orphan").exists()

    on("plain", run_dir, job)


def test_the_death_of_the_spawner_is_told_and_ends_all(run_dir: Path) -> None:
    mark = f"76{time.time_ns() % 10**8}"

    async def job(backend: Backend) -> None:
        assert isinstance(backend, namespaces.NamespacesBackend)
        box = await backend.create(spec_of(run_dir, "orphan"))
        await shell(box, f"sleep {mark} & (setsid sleep {mark} &)")
        died = asyncio.create_task(backend.died())
        await asyncio.sleep(0.1)
        assert not died.done()
        os.kill(backend.spawner.process.pid, signal.SIGKILL)
        assert "ended" in await asyncio.wait_for(died, 10)
        await asyncio.wait_for(box.guest.closed(), 10)
        await box.destroy()
        with pytest.raises(SandboxStartError):
            await backend.create(spec_of(run_dir, "late"))
        assert await until_nothing_runs(f"sleep {mark}") + await until_nothing_runs(run_dir.name) == []

    on("namespaces", run_dir, job)


def test_a_backend_whose_program_is_not_built_does_not_start(
    kind: str, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "BINARIES", run_dir / "nowhere")
    native._built.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match=r"not built: run `python -m envd\.native\.build`"):
            asyncio.run(STARTS[kind](run_dir))
    finally:
        native._built.cache_clear()
