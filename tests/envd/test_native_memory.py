"""The agent under AddressSanitizer and UBSan: frames that once made it write beyond its memory, and numbers at their
bounds.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from envd.guest.link import GuestLink
from envd.guest.protocol import HEAD, Answer, Ask, Writer
from envd.native import build
from tests.envd.guests import Guest
from tests.needs import require

BROKEN_PROTOCOL = 1
FOUND_BY_SANITIZER = 99
U32 = struct.Struct("<I")


@pytest.fixture(scope="session")
def sanitized() -> Path:
    require("C compiler")  # ziglang has no sanitizers
    return build.build(sanitize=True)[0]


@pytest.fixture
def agent(sanitized: Path) -> Iterator[Guest]:
    """Its workspace is a tmpfs, which keeps any time that a file is given."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        log = Path(directory, "sanitizer")
        options = f"exitcode={FOUND_BY_SANITIZER}:log_path={log}:detect_leaks=0"
        guest = Guest(Path(directory), sanitized, ASAN_OPTIONS=options, UBSAN_OPTIONS=options)
        try:
            yield guest
        finally:
            guest.stop()
            found = [path.read_text() for path in Path(directory).glob("sanitizer*")]
            assert found == []


def sent(guest: Guest, kind: int, body: bytes) -> bytes:
    """What the agent answers to one frame after which nothing comes."""
    guest.socket.settimeout(20)
    guest.socket.sendall(HEAD.pack(len(body) + 5, 1, kind) + body)
    guest.socket.shutdown(socket.SHUT_WR)
    answer = b""
    while more := guest.socket.recv(65536):
        answer += more
    return answer


@pytest.mark.parametrize("kind", [Ask.START, Ask.INIT])
@pytest.mark.parametrize("count", [2, 3, 8, 64, 4096])
def test_a_list_that_counts_more_items_than_its_frame_holds_is_refused(agent: Guest, kind: Ask, count: int) -> None:
    first = b"x" * (4 * count - 4)  # as many bytes as the count asks for, all of them the first item's
    items = U32.pack(count) + U32.pack(len(first)) + first
    assert sent(agent, kind, (bytes(8) if kind == Ask.INIT else b"") + items) == b""
    assert agent.process.wait(20) == BROKEN_PROTOCOL


@pytest.mark.parametrize("limit", [0xFFFFFFFF, 0xFFFFFFFF - 63, 0xFFFFFFBF, 8 * 1024 * 1024])
def test_a_shell_limit_whose_answer_fits_no_frame_is_refused(agent: Guest, limit: int) -> None:
    answer = sent(agent, Ask.SHELL, Writer().u32(limit).u32(1).data(b"true").u32(1000).body())
    _, _, kind = HEAD.unpack_from(answer)
    assert (kind, U32.unpack_from(answer, HEAD.size)[0]) == (Answer.ERROR, errno.EMSGSIZE)


@pytest.mark.parametrize("count", [257, 100_000])
def test_more_commands_than_a_turn_holds_are_refused(agent: Guest, count: int) -> None:
    fields = Writer().u32(16).u32(count)
    for _ in range(count):
        fields.data(b"").u32(0)
    answer = sent(agent, Ask.SHELL, fields.body())
    _, _, kind = HEAD.unpack_from(answer)
    assert (kind, U32.unpack_from(answer, HEAD.size)[0]) == (Answer.ERROR, errno.EINVAL)


@pytest.mark.parametrize("seconds", [2**34, 2**55, -(2**55)])
def test_a_file_of_any_time_is_listed(agent: Guest, seconds: int) -> None:
    (agent.workspace / "f").write_text("x")
    os.utime(agent.workspace / "f", (seconds, seconds))
    if (agent.workspace / "f").stat().st_mtime_ns != seconds * 10**9:
        pytest.skip("this file system keeps no such time")

    async def job(link: GuestLink) -> tuple[int, int]:
        entries, _ = await link.list()
        return (await link.stat("f")).mtime_ns, entries[0].mtime_ns

    wrapped = (seconds * 10**9 + 2**63) % 2**64 - 2**63
    assert agent.run(job) == (wrapped, wrapped)


def test_the_id_0_cancels_nothing(agent: Guest) -> None:
    """Found by the fuzzer: what was cancelled has the id 0 in the agent until it ends, and was answered with it, which
    no server takes.
    """
    cancel = [Writer().u32(cancelled).body() for cancelled in (1, 0)]
    (agent.workspace / "full/directory").mkdir(parents=True)
    asks = [(Ask.REMOVE, Writer().data(b"full").u8(1).body()), *((Ask.CANCEL, body) for body in cancel)]
    frames = [HEAD.pack(len(body) + 5, number, kind) + body for number, (kind, body) in enumerate(asks, 1)]
    agent.socket.settimeout(20)
    agent.socket.sendall(b"".join(frames))
    agent.socket.shutdown(socket.SHUT_WR)
    answers = b""
    while more := agent.socket.recv(65536):
        answers += more
    at, found = 0, []
    while at < len(answers):
        size, identity, kind = HEAD.unpack_from(answers, at)
        found.append((identity, kind))
        at += 4 + size
    assert found == [(1, Answer.ERROR), (2, Answer.OK), (3, Answer.OK)]


def test_output_of_any_size_is_kept_within_its_limit(agent: Guest) -> None:
    async def job(link: GuestLink) -> list[tuple[int, int, int]]:
        found = []
        for size in (0, 1, 2, 255, 256, 257, 511, 512, 513, 70_000, 1_000_000):
            (result,) = await link.shell([(f"head -c {size} /dev/zero", 20)], limit=513)
            found.append((result.true_bytes, len(result.head), len(result.tail)))
        return found

    for true, head, tail in agent.run(job):
        assert (head, tail) == ((true, 0) if true <= 512 else (256, 256))
