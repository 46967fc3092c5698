from __future__ import annotations

import asyncio
import glob
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from envd.client import Limits, ToolCall
from envd.errors import BackendUnavailable, EnvdError, SandboxGone, ServerUnavailable, TemplateError
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.sandbox.proctree import descendants
from resources.sandboxes import SandboxesResource
from resources.sandboxes_config import SandboxesConfig
from tests.envd.harness import FILES, Harness


def traces(marker: str) -> list[str]:
    """What a server with this marker in its directory names left: processes, mounts, cgroups, directories."""
    found = [path.name for path in Path(tempfile.gettempdir()).glob("envd-*") if marker in path.name]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if marker in line]
    found += glob.glob(f"/sys/fs/cgroup/**/*{marker}*", recursive=True)  # noqa: PTH207 - bears what vanishes meanwhile
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if marker in (process / "cmdline").read_text():
                found.append((process / "cmdline").read_text())
        except OSError:
            continue
    return found


def run_directory(address: str) -> str:
    """The name of the run directory of the server at an address, read from its zygotes' command lines."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_text().split("\0")
            parent = next(line for line in (process / "status").read_text().splitlines() if line.startswith("PPid"))
            if "envd.sandbox.zygote" in arguments and address in Path(f"/proc/{parent.split()[1]}/cmdline").read_text():
                return Path(arguments[4]).name
        except OSError:
            continue
    raise AssertionError(f"no zygote of {address} is running")


def server_at(address: str) -> int:
    """The process that serves an address."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            arguments = (process / "cmdline").read_text().split("\0")
        except OSError:
            continue
        if address in arguments and "serve" in arguments:
            return int(process.name)
    raise AssertionError(f"nothing serves {address}")


async def busy(address: str) -> None:
    client = await OperationsClient(address).__aenter__()
    template = await client.put_template(FILES)
    for _ in range(3):
        sandbox = await client.create(template)
        await sandbox.call(ToolCall("exec", {"command": "sleep 1000 & setsid sleep 1000 &"}))


def gone(marker: str, timeout_s: float = 15) -> list[str]:
    deadline = time.monotonic() + timeout_s
    while (left := traces(marker)) and time.monotonic() < deadline:
        time.sleep(0.1)
    return left


@pytest.mark.parametrize("backend", ["namespaces", "plain"])
def test_stopping_a_server_leaves_nothing(backend: str) -> None:
    with LocalEnvd("namespaces" if backend == "namespaces" else "plain") as server:
        asyncio.run(busy(server.address))
        marker = run_directory(server.address)
        assert traces(marker)
    assert gone(marker) == []


@pytest.mark.parametrize("backend", ["namespaces", "plain"])
@pytest.mark.parametrize("victim", ["parent", "server"])
def test_a_kill_leaves_nothing(victim: str, backend: str) -> None:
    code = (
        f"import sys, time\nfrom envd.local import LocalEnvd\nwith LocalEnvd('{backend}') as server:\n   "
        " print(server.address, server._process.pid, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    address, pid = parent.stdout.readline().split()
    asyncio.run(busy(address))
    marker = run_directory(address)
    os.kill(parent.pid if victim == "parent" else int(pid), signal.SIGKILL)
    assert gone(marker) == []
    parent.kill()
    parent.wait()
    parent.stdout.close()


@pytest.mark.parametrize("role", ["spawner", "verifier"])
def test_a_killed_helper_ends_its_server_which_leaves_nothing(role: str, capfd: pytest.CaptureFixture[str]) -> None:
    with LocalEnvd("namespaces") as server:
        asyncio.run(busy(server.address))
        marker = run_directory(server.address)
        serving = server_at(server.address)
        zygotes = {pid for pid, parent in descendants(serving).items() if parent == serving}
        verifiers = {pid for pid in zygotes if f"{marker}-verifier" in Path(f"/proc/{pid}/cmdline").read_text()}
        victim = next(iter(verifiers if role == "verifier" else zygotes - verifiers))
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 60
        while server.alive and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not server.alive
    assert gone(marker) == []
    said = capfd.readouterr().err
    assert "restart envd" in said and "Traceback" not in said


@pytest.mark.slow
def test_a_server_that_hangs_after_a_helper_died_tells_where_and_ends(tmp_path: Path) -> None:
    code = (
        "import asyncio, functools, sys\n"
        "from pathlib import Path\n"
        "from contracts.rpc.listening import Listening\n"
        "from envd.server.ending import bound_end\n"
        "from envd.server.sandboxes import Sandboxes\n"
        "from envd.server.serve import Options, serve\n"
        "async def never_stops(self): await asyncio.Event().wait()\n"
        "Sandboxes.stop = never_stops\n"
        "options = Options(Listening('unix:' + sys.argv[1] + '/s'), ('plain',), Path(sys.argv[1], 'state'))\n"
        "asyncio.run(serve(options, on_death=functools.partial(bound_end, 0.5, 1.5)))\n"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stderr=subprocess.PIPE, text=True) as serving:
        try:
            Harness(f"unix:{tmp_path}/s").client(lambda client: client.info())
            (zygote,) = [
                pid for pid in descendants(serving.pid) if b"zygote" in Path(f"/proc/{pid}/cmdline").read_bytes()
            ]
            os.kill(zygote, signal.SIGKILL)
            _, said = serving.communicate(timeout=60)
        finally:
            serving.kill()
    assert serving.returncode == 1
    assert "has not ended within 0.5 s" in said and "in never_stops" in said and "Timeout (0:00:01" in said


@pytest.mark.slow
def test_what_servers_left_that_were_killed_with_their_zygotes_goes_when_the_next_starts() -> None:
    code = (
        "import sys, time\nfrom envd.local import LocalEnvd\n"
        "with LocalEnvd('namespaces') as server:\n    print(server.address, flush=True)\n    time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    address = parent.stdout.readline().strip()
    asyncio.run(busy(address))
    marker = run_directory(address)
    family = [parent.pid, *descendants(parent.pid)]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first: none may tidy up after another
        for pid in family:
            with suppress(ProcessLookupError):  # process 1 of a sandbox takes the others along
                os.kill(pid, number)
    parent.wait()
    parent.stdout.close()
    assert any(marker in trace for trace in traces(marker)), "killed all at once, they leave their directory"
    with LocalEnvd("namespaces"):
        assert gone(marker) == []


def test_a_server_whose_socket_does_not_listen_yet_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, listens = tmp_path / "slow", tmp_path / "listens"
    slow.write_text(f"""#!{sys.executable}
import pathlib, socket, sys, time
server = socket.socket(socket.AF_UNIX)
server.bind(sys.argv[sys.argv.index("--listen") + 1].removeprefix("unix:"))
time.sleep(0.3)
pathlib.Path({str(listens)!r}).touch()
server.listen()
time.sleep(60)
""")
    slow.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(slow))
    with LocalEnvd() as server:
        assert listens.exists() and server.alive


def test_finish_and_close_end_a_sandbox(anywhere: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        before = (await client.info()).live
        sandbox = await client.create(await client.put_template(FILES))
        assert (await client.info()).live == before + 1
        await sandbox.finish()
        assert (await client.info()).live == before
        await sandbox.close()
        with pytest.raises(SandboxGone):
            await sandbox.call(ToolCall("list", {}))

    anywhere.client(job)


def test_a_forgotten_sandbox_is_reaped(namespaces: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        before = (await client.info()).live
        sandbox = await client.create(await client.put_template(FILES), limits=Limits(lifetime_s=0.3))
        await asyncio.sleep(0.6)
        assert (await client.info()).live == before
        with pytest.raises(SandboxGone):
            await sandbox.call(ToolCall("list", {}))

    namespaces.client(job)


def test_templates_are_idempotent_and_checked(namespaces: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        one, two = await asyncio.gather(client.put_template(FILES), client.put_template(FILES))
        assert one == two != await client.put_template({"other": b""})
        for path in ("/etc/x", "../x", ".git/config", "a//b", ""):
            with pytest.raises(TemplateError):
                await client.put_template({path: b""})
        with pytest.raises(TemplateError, match="'a/b/c' lies below 'a', which is a file: leave one"):
            await client.put_template({"a": b"", "a/b/c": b""})
        with pytest.raises(TemplateError, match="put_template"):
            await client.create("0" * 64)

    namespaces.client(job)


def test_bad_limits_are_refused(namespaces: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        template = await client.put_template(FILES)
        with pytest.raises(EnvdError, match="positive"):
            await client.create(template, limits=Limits(memory_mb=-1))

    namespaces.client(job)


def test_many_sandboxes_live_at_once(namespaces: Harness) -> None:
    async def job(client: OperationsClient) -> set[bytes]:
        template = await client.put_template(FILES)

        async def one(number: int) -> bytes:
            sandbox = await client.create(template)
            await sandbox.call(ToolCall("write", {"path": "n", "content": str(number)}))
            assert (await sandbox.call(ToolCall("read", {"path": "n"}))).text == f"1 {number}"
            return await sandbox.finish()

        return set(await asyncio.gather(*(one(number) for number in range(64))))

    assert len(namespaces.client(job)) == 64


def test_help_teaches_and_a_bad_address_is_one_clear_line() -> None:
    help_text = subprocess.run(
        [sys.executable, "-m", "envd", "serve", "--help"], capture_output=True, text=True, check=True
    )
    assert "put_template" in help_text.stdout
    command = [sys.executable, "-m", "envd", "serve", "--listen", "unix:/no/such/directory/s", "--backend", "plain"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and done.stderr.splitlines()[-1].startswith("envd: ") and "Traceback" not in done.stderr


def test_a_server_that_was_killed_is_an_error_at_once_and_comes_back_at_its_address() -> None:
    resource, config = SandboxesResource(), SandboxesConfig()

    async def job() -> float:
        async with resource.client(config) as client:
            template = await client.put_template(FILES)
            marker = run_directory(client.address)
            os.kill(server_at(client.address), signal.SIGKILL)
            started = time.monotonic()
            for call in (
                client.create(template),
                client.verify(template, b"", {}, ["x"]),
                client.found(template, ["x"]),
            ):
                with pytest.raises(ServerUnavailable, match="envd serve"):
                    await call
            seconds = time.monotonic() - started
            await until_answered(client.put_template(FILES) for _ in range(1000))
            async with await client.create(template) as sandbox:
                assert (await sandbox.call(ToolCall("exec", {"command": "echo back"}))).text.startswith("back")
            assert gone(marker) == []
            await asyncio.to_thread(resource.close)
            with pytest.raises(ServerUnavailable):
                await client.put_template(FILES)
        return seconds

    try:
        assert asyncio.run(job()) < 10
    finally:
        resource.close()


def test_a_running_server_without_the_experiments_backend_refuses_its_sandboxes_and_verdicts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def refused(address: str) -> None:
        monkeypatch.setenv("TRIPLANE_ENVD", address)
        async with SandboxesResource().client(SandboxesConfig(backend="gvisor")) as client:
            template = await client.put_template(FILES)
            for call in (client.create(template), client.verify(template, b"", {}, ["x"])):
                with pytest.raises(EnvdError, match="backend 'gvisor' does not run here: this server has namespaces"):
                    await call

    with LocalEnvd("namespaces") as first, LocalEnvd("namespaces") as second:
        asyncio.run(refused(first.address))
        asyncio.run(refused(f"{first.address},{second.address}"))


def test_an_experiment_gets_its_backend_from_a_running_server_with_several(monkeypatch: pytest.MonkeyPatch) -> None:
    async def used(address: str) -> set[str]:
        monkeypatch.setenv("TRIPLANE_ENVD", address)
        async with SandboxesResource().client(SandboxesConfig(backend="plain")) as client:
            template = await client.put_template(FILES)
            async with await client.create(template) as sandbox:
                on_same_server = await sandbox.server.create(template)
                verdict = await client.verify(template, b"", {}, ["x"])
                return {verdict.backend, *[(await each.status()).backend for each in (sandbox, on_same_server)]}

    with LocalEnvd("namespaces,plain") as server, LocalEnvd("namespaces,plain") as second:
        assert asyncio.run(used(server.address)) == {"plain"}
        assert asyncio.run(used(f"{server.address},{second.address}")) == {"plain"}


async def until_answered(calls: Iterator[Awaitable[object]]) -> None:
    for call in calls:
        with suppress(ServerUnavailable):
            await call
            return
        await asyncio.sleep(0.1)


@pytest.mark.slow
def test_a_server_that_is_killed_while_it_starts_again_is_started_once_more() -> None:
    resource, config = SandboxesResource(), SandboxesConfig(backend="plain")

    async def job() -> None:
        address = resource.address(config)
        first = second = server_at(address)
        os.kill(first, signal.SIGKILL)
        while second == first:
            with suppress(AssertionError):
                second = server_at(address)
        assert not server_listens(address)
        os.kill(second, signal.SIGKILL)
        async with OperationsClient(address) as client:
            await until_answered(client.info() for _ in range(1000))
        assert resource.address(config) == address

    try:
        asyncio.run(job())
    finally:
        resource.close()


@pytest.mark.slow
def test_a_server_that_keeps_dying_is_given_up_and_the_next_request_starts_another() -> None:
    resource, config = SandboxesResource(), SandboxesConfig(backend="plain")

    async def job() -> None:
        address = resource.address(config)
        for _ in range(3):
            assert resource.address(config) == address
            async with OperationsClient(address) as client:
                await until_answered(client.info() for _ in range(1000))
            os.kill(server_at(address), signal.SIGKILL)
            while server_listens(address):
                await asyncio.sleep(0.01)
        async with asyncio.timeout(20):
            while resource.address(config) == address:
                await asyncio.sleep(0.1)
        async with OperationsClient(resource.address(config)) as client:
            assert (await client.info()).backend == "plain"

    try:
        asyncio.run(job())
    finally:
        resource.close()


def server_listens(address: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        return probe.connect_ex(address.removeprefix("unix:")) == 0


@pytest.mark.slow
def test_a_client_finds_a_server_that_came_back(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/s"
    command = [sys.executable, "-m", "envd", "serve", "--listen", address, "--backend", "plain", "--log-level", "error"]

    async def job() -> None:
        async with OperationsClient(address) as client:
            for _ in range(2):
                server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
                deadline = time.monotonic() + 30
                while time.monotonic() < deadline:
                    try:
                        assert (await client.info()).backend == "plain"
                        break
                    except ServerUnavailable:
                        await asyncio.sleep(0.2)
                else:
                    raise AssertionError("the client did not find the server")
                server.terminate()
                server.wait()

    asyncio.run(job())


def test_local_envd_outside_its_block_says_how_to_use_it() -> None:
    with pytest.raises(BackendUnavailable, match="with LocalEnvd"):
        _ = LocalEnvd().address
