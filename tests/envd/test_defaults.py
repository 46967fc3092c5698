"""What a server does that was told nothing: where it listens, whom it answers, and that it isolates or refuses to
start.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from contracts.rpc.connecting import port_of
from contracts.rpc.listening import Listening
from contracts.rpc.meeting import meeting_directory
from envd.client import Access
from envd.errors import AccessDenied, BackendUnavailable, EnvdError
from envd.local import LocalEnvd
from envd.meeting import KEY_FILE_VARIABLE, default_address
from envd.operations.client import OperationsClient
from tests.envd.harness import FILES
from tests.envd.test_verify_unprivileged import PYENV, SHOW_PYTHON, closed_above
from tests.ports import free_port

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SERVE = [sys.executable, "-m", "envd", "serve"]
NOBODY = 65534


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's runtime directory, short enough for a socket's path."""
    directory = Path(tempfile.mkdtemp(prefix="triplane-run-"))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    monkeypatch.delenv(KEY_FILE_VARIABLE, raising=False)
    yield directory
    shutil.rmtree(directory)


@contextmanager
def server(*options: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [*SERVE, "--backend", "plain", "--log-level", "error", *options], cwd=ROOT, stderr=subprocess.PIPE, text=True
    )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)
        assert process.stderr is not None
        process.stderr.close()


def told(process: subprocess.Popen[str]) -> str:
    """The two lines in which a server tells of the key that it made."""
    assert process.stderr is not None
    lines = ""
    for line in process.stderr:
        lines += line if line.startswith("envd: ") else ""
        if "it lies in" in line:
            break
    return lines


async def backend_of(client: OperationsClient) -> str:
    async with client, asyncio.timeout(30):
        return (await client.info()).backend


@pytest.mark.parametrize("user", [pytest.param(0, id="root"), pytest.param(NOBODY, id="user")])
@pytest.mark.parametrize("backend", ["auto", "namespaces"])
def test_confinement_without_namespaces_refuses_to_start_and_says_what_to_do(user: int, backend: str) -> None:
    if os.geteuid() != 0 and user == 0:
        pytest.skip("only root can be root without capabilities")
    user = user if os.geteuid() == 0 else os.geteuid()
    with tempfile.TemporaryDirectory(prefix="triplane-run-") as directory:
        os.chown(directory, user, user)
        options = ["--listen", f"unix:{directory}/s", "--state-dir", f"{directory}/state", "--backend", backend]
        command = [sys.executable, "-m", "tests.envd.confined", str(user), *SERVE, *options, "--log-level", "error"]
        if user != os.geteuid():
            if closed_above(ROOT / "envd") or closed_above(Path(sys.prefix)) or not shutil.which("unshare"):
                pytest.skip("another user can't read the checkout")
            shown = [directory, str(PYENV), closed_above(PYENV)]
            command = ["unshare", "--mount", "sh", "-c", f'{SHOW_PYTHON}exec "$@"', "sh", *shown, *command]
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "TMPDIR": directory},
        )
        assert done.returncode == 1, done.stderr
        assert done.stderr.count("envd: ") == 1 and "Traceback" not in done.stderr
        assert "namespaces" in done.stderr and "Operation not permitted" in done.stderr
        for fix in ("seccomp=deploy/envd-seccomp.json", "--privileged", "--backend plain, which isolates nothing"):
            assert fix in done.stderr
        assert not Path(directory, "s").exists()


def test_a_private_server_refuses_likewise() -> None:
    code = (
        "from tests.envd.confined import confine\nimport os, sys\nfrom envd.errors import BackendUnavailable\n"
        "from envd.local import LocalEnvd\nconfine(os.geteuid())\n"
        "try:\n    LocalEnvd().__enter__()\nexcept BackendUnavailable as error:\n    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert "no backend with isolation starts on this machine" in done.stdout and "--backend plain" in done.stdout


def test_a_server_without_an_address_is_found_by_its_user_and_closed_to_others(runtime: Path) -> None:
    with server() as process:
        assert asyncio.run(backend_of(OperationsClient())) == "plain"
        directory = runtime / "triplane"
        assert default_address() == f"unix:{directory}/envd.sock"
        assert [stat.S_IMODE((directory / each).stat().st_mode) for each in (".", "envd.sock")] == [0o700, 0o600]
        second = subprocess.run(
            [*SERVE, "--backend", "plain"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
        )
        assert second.returncode == 1 and "another server listens on" in second.stderr
        assert asyncio.run(backend_of(OperationsClient())) == "plain", "the second one has taken nothing from the first"
        process.kill()
        process.wait()
        with server():  # what a killed server left is in nobody's way
            assert asyncio.run(backend_of(OperationsClient())) == "plain"


@pytest.mark.parametrize("spoil", ["mode", "link"])
def test_a_meeting_directory_that_others_could_have_made_is_refused(runtime: Path, spoil: str) -> None:
    if spoil == "mode":
        (runtime / "triplane").mkdir()
        (runtime / "triplane").chmod(0o777)
    else:
        (runtime / "elsewhere").mkdir(mode=0o700)
        (runtime / "triplane").symlink_to(runtime / "elsewhere")
    with pytest.raises(EnvdError, match="must be a directory of this user's own with mode 0700"):
        OperationsClient()
    with pytest.raises(EnvdError, match="mode 0700"):
        default_address()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root is somebody else")
def test_another_users_runtime_directory_is_not_used(runtime: Path) -> None:
    os.chown(runtime, NOBODY, NOBODY)
    assert meeting_directory() == Path("/run/triplane")


def test_a_port_of_loopback_asks_for_a_key_that_the_server_made(runtime: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with server("--listen", address) as process:
        printed = told(process)
        file = runtime / "triplane" / f"port-{port_of(address)}.key"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        key = file.read_text().strip()
        assert len(key) >= 32 and key in printed and str(file) in printed
        assert asyncio.run(backend_of(OperationsClient(address))) == "plain", "this user's clients find the key"
        for access in (Access(), Access(key="x" * 32)):
            with pytest.raises(AccessDenied):
                asyncio.run(backend_of(OperationsClient(address, access)))
    assert not file.exists(), "it opens nothing any more"


def test_a_key_is_found_by_the_variable_and_a_new_server_has_a_new_one(
    runtime: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys, address = [], f"localhost:{free_port()}"
    for _ in range(2):
        with server("--listen", address) as process:
            keys.append(told(process).splitlines()[0].split()[-1])
            monkeypatch.setenv(KEY_FILE_VARIABLE, str(tmp_path / "key"))
            (tmp_path / "key").write_text("another-key-of-enough-characters\n")
            with pytest.raises(AccessDenied, match=KEY_FILE_VARIABLE):
                asyncio.run(backend_of(OperationsClient(address)))
            (tmp_path / "key").write_text(keys[-1] + "\n")
            assert asyncio.run(backend_of(OperationsClient(address))) == "plain"
    assert keys[0] != keys[1]


def test_only_insecure_opens_a_port_without_a_key(runtime: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    with server("--listen", address, "--insecure"):
        assert asyncio.run(backend_of(OperationsClient(address, Access()))) == "plain"
        assert not list(runtime.rglob("*.key"))
    assert Listening("unix:/x").made_key() is None
    assert Listening("unix-abstract:x").made_key() is not None, "it has no mode: whoever shares the network connects"


def test_every_socket_of_ours_is_the_users_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        with LocalEnvd("plain") as envd:
            about = Path(envd.address.removeprefix("unix:")).stat()
            assert stat.S_IMODE(about.st_mode) == 0o600
    finally:
        os.umask(old)


def test_a_servers_umask_keeps_no_sandbox_from_starting(tmp_path: Path) -> None:
    """A sandbox starts to find out whether a backend works. The log is as private as its operator has it."""
    log = tmp_path / "audit"
    old = os.umask(0o077)
    try:
        address = f"unix:{tmp_path}/socket"
        with server("--listen", address, "--backend", "namespaces", "--audit-log", str(log)):
            assert asyncio.run(backend_of(OperationsClient(address))) == "namespaces"
            assert stat.S_IMODE(log.stat().st_mode) == 0o600
    finally:
        os.umask(old)


def test_plain_is_had_by_name_and_says_that_it_isolates_nothing() -> None:
    async def job(address: str) -> list[str]:
        async with OperationsClient(address) as client:
            assert not (await client.info()).isolation
            await client.put_template(FILES)
            return [event.kind async for event in client.audit()]

    with LocalEnvd("plain") as envd:
        assert "isolation.none" in asyncio.run(job(envd.address))
    with pytest.raises(BackendUnavailable, match="choose from namespaces, plain"):
        LocalEnvd("none").__enter__()
