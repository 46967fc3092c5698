"""Whatever a policy leaves behind ends in a final state that can be graded, never in a fault of the infrastructure."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from envd.client import ToolCall, VerifyResult
from envd.errors import SandboxGone
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.sandbox import wire
from envd.sandbox.diff import MAX_DIFF_LINES, OVERSIZED, workspace_diff
from envd.sandbox.patch import NotPlain, apply_plain
from envd.server.zygotes import Link
from tests.envd.harness import FILES, FIX, HIDDEN, TESTS, Harness
from tests.envd.test_diff import build


def finished(harness: Harness, *commands: str) -> bytes:
    """The final state after a correct edit and these commands."""

    async def job(sandbox: ManagedSandbox) -> bytes:
        await sandbox.call(FIX)
        for command in commands:
            await sandbox.call(ToolCall("exec", {"command": command}))
        return await sandbox.finish()

    return harness.sandbox(job)


def graded(harness: Harness, diff: bytes) -> VerifyResult:
    async def job(client: OperationsClient) -> VerifyResult:
        return await client.verify(await client.put_template(FILES), diff, HIDDEN, TESTS)

    return harness.client(job)


DEEP = "mkdir -p $(printf 'd/%.0s' $(seq 1500))"


@pytest.mark.parametrize(
    "command",
    ["mkdir d; touch d/x; chmod 444 d", "mkdir d; touch d/x; chmod 0 d", "touch x; chmod 0 x", DEEP, "mkfifo pipe"],
)
def test_what_cannot_be_read_is_left_out_and_the_edit_still_counts(namespaces: Harness, command: str) -> None:
    assert finished(namespaces, command) == finished(namespaces)


OVER = [
    pytest.param("head -c 60000000 /dev/urandom > x", marks=pytest.mark.slow),
    "yes | head -c 60000000 > x",
    "yes '' | head -c 20000000 >> calc.py",
]


@pytest.mark.parametrize("command", OVER)
def test_a_final_state_beyond_the_bounds_is_the_same_for_all_and_fails(namespaces: Harness, command: str) -> None:
    diff = finished(namespaces, command)
    assert diff == OVERSIZED
    result = graded(namespaces, diff)
    assert result.exit == "apply_failed" and {outcome.status for outcome in result.outcomes} == {"missing"}


def test_many_lines_within_the_bounds_are_a_patch(tmp_path: Path) -> None:
    content = b"y\n" * (MAX_DIFF_LINES - 1) + b"y"
    before, after = build(tmp_path / "before", {"f": (b"", False)}), build(tmp_path / "after", {"f": (content, False)})
    apply_plain(before, workspace_diff(before, after))
    assert (before / "f").read_bytes() == content
    with pytest.raises(NotPlain):
        apply_plain(before, OVERSIZED)


def test_an_agent_that_fails_is_no_empty_final_state() -> None:
    async def scenario() -> None:
        ours, theirs = socket.socketpair()
        link = Link(*await asyncio.open_unix_connection(sock=ours), kill=lambda: None)
        with theirs:
            wire.send(theirs, {"failed": "OSError: no reason"})
            with pytest.raises(SandboxGone, match="OSError: no reason"):
                await link.ask({"op": "diff"}, timeout_s=5)

    asyncio.run(scenario())
