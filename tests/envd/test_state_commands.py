"""`python -m envd hibernate`, `fork`, `migrate` and the other changes of state, against real servers."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from envd.__main__ import main
from envd.client import ToolCall
from envd.errors import SandboxGone
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.types import Handle
from tests.envd.harness import FILES, FIX, Harness

READ = ToolCall("read", {"path": "calc.py"})


@pytest.fixture
def handle(namespaces: Harness, tmp_path: Path) -> Iterator[Path]:
    """File with the handle of a sandbox whose calc.py was fixed."""

    async def made() -> Handle:
        async with OperationsClient(namespaces.address) as client:
            sandbox = await client.create(await client.put_template(FILES))
            await sandbox.call(FIX)
            return sandbox.handle

    found = asyncio.run(made())
    file = tmp_path / "sandbox.json"
    file.write_text(json.dumps(dataclasses.asdict(found)))
    yield file

    async def end() -> None:
        async with OperationsClient(namespaces.address) as client:
            await client.attach(found).close()

    asyncio.run(end())


def read(address: str, said: dict[str, str]) -> str:
    """calc.py of a sandbox."""

    async def job() -> str:
        async with OperationsClient(address) as client:
            return (await client.attach(Handle(said["id"], said["token"])).call(READ)).text

    return asyncio.run(job())


class Command:
    """The command line with one server's address."""

    def __init__(self, address: str, capsys: pytest.CaptureFixture[str]) -> None:
        self._address, self._capsys = address, capsys

    def __call__(self, *arguments: object) -> str:
        assert main([*map(str, arguments), "--address", self._address]) == 0, self._capsys.readouterr().err
        return self._capsys.readouterr().out

    def json(self, *arguments: object) -> dict[str, str]:
        said: dict[str, str] = json.loads(self(*arguments, "--json"))
        return said

    def fails(self, *arguments: object) -> str:
        assert main([*map(str, arguments), "--address", self._address]) == 1
        found = self._capsys.readouterr()
        assert found.out == ""
        return found.err


@pytest.fixture
def command(namespaces: Harness, capsys: pytest.CaptureFixture[str]) -> Command:
    return Command(namespaces.address, capsys)


def test_a_sandbox_hibernates_and_resumes_and_what_is_lost_is_told(command: Command, handle: Path) -> None:
    identity = json.loads(handle.read_text())["id"]
    said = command("hibernate", handle)
    assert said == f"id {identity}\nstate hibernated\nbackend namespaces\nnot kept: processes\n"
    assert command.json("resume", handle) == {
        "id": identity,
        "state": "running",
        "backend": "namespaces",
        "lost": ["processes"],
    }
    assert [command.json(name, handle)["lost"] for name in ("pause", "resume")] == [[], []]


def test_what_fork_and_restore_print_is_a_handle_for_the_next_command(
    command: Command, handle: Path, namespaces: Harness, tmp_path: Path
) -> None:
    fork = command.json("fork", handle)
    assert "a + b" in read(namespaces.address, fork) and fork["lost"] == ["processes"]
    kept = command.json("snapshot", handle)
    restored = command.json("restore", kept["snapshot"])
    assert "a + b" in read(namespaces.address, restored)
    assert len({fork["id"], restored["id"], json.loads(handle.read_text())["id"]}) == 3
    (tmp_path / "copy.json").write_text(json.dumps(fork))
    assert command.json("hibernate", tmp_path / "copy.json")["state"] == "hibernated"
    assert command("delete-snapshot", kept["snapshot"]) == f"snapshot {kept['snapshot']}\nstate deleted\n"
    assert "snapshot" in command.fails("restore", kept["snapshot"])


def test_a_sandbox_moves_to_another_server(command: Command, handle: Path, namespaces: Harness) -> None:
    with LocalEnvd("namespaces") as other:
        said = command.json("migrate", handle, other.address)
        assert (said["server"], said["lost"]) == (other.address, ["processes"])
        assert "a + b" in read(other.address, json.loads(handle.read_text()))
        with pytest.raises(SandboxGone, match="moved to"):
            read(namespaces.address, json.loads(handle.read_text()))


def test_wrong_handles_ids_and_servers_are_one_clear_error(command: Command, handle: Path, tmp_path: Path) -> None:
    assert "SANDBOX: " in command.fails("fork", tmp_path / "none")
    halves = [f'{{"id": "{half}", "token": "x"}}' for half in ("\\ud800", "a\\n")]
    for text in (
        *("[1]", "[" * 100_000, '{"id": null, "token": null}', '{"id": ["a"], "token": 5}', *halves),
        '{"id": "a", "token": "\u00e9"}',
    ):
        (tmp_path / "odd").write_text(text)
        assert command.fails("fork", tmp_path / "odd").endswith('is no handle: it must be JSON with "id" and "token"\n')
    (tmp_path / "unknown").write_text('{"id": "nobody", "token": "x"}')
    assert "nobody" in command.fails("hibernate", tmp_path / "unknown")
    wrong = json.loads(handle.read_text()) | {"token": "wrong"}
    (tmp_path / "wrong").write_text(json.dumps(wrong))
    assert wrong["id"] in command.fails("hibernate", tmp_path / "wrong")
    assert "nothing" in command.fails("restore", "nothing")


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["restore", "x", "--address", f"unix:{tmp_path}/none"]) == 1
    assert "no server answers" in capsys.readouterr().err


def test_help_teaches_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("pause", "resume", "hibernate", "fork", "snapshot", "restore", "delete-snapshot", "migrate"):
        with pytest.raises(SystemExit) as ended:
            main([name, "--help"])
        assert ended.value.code == 0 and "keep files only" in capsys.readouterr().out
