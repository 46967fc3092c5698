"""Both ends of the stream against a peer that lies: agents against hostile servers, links against hostile agents."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import struct
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envd.errors import SandboxGone
from envd.guest.channel import Channel
from envd.guest.escape import Escape
from envd.guest.link import Change, ChangeKind, Entry, GuestLink
from envd.guest.protocol import HEAD, MAX_FRAME, Answer, Ask, ProtocolError, Writer
from envd.guest.results import entry_and_data, only_state, output_chunk, read_changes, read_entry, shell_results, states
from tests.envd.guests import Guest

T = TypeVar("T")
OK, PART, ERROR = int(Answer.OK), int(Answer.PART), int(Answer.ERROR)


class Liar:
    """The other end of a link, in the test's hands."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        sock.setblocking(False)

    async def hear(self) -> tuple[int, int, bytes]:
        """One ask: (id, kind, fields)."""
        loop = asyncio.get_running_loop()
        head = b""
        while len(head) < HEAD.size:
            head += await loop.sock_recv(self.sock, HEAD.size - len(head))
        length, identity, kind = HEAD.unpack(head)
        body = b""
        while len(body) < length - 5:
            body += await loop.sock_recv(self.sock, length - 5 - len(body))
        return identity, kind, body

    async def say(self, identity: int, kind: int, body: bytes = b"") -> None:
        await self.raw(HEAD.pack(len(body) + 5, identity, kind) + body)

    async def raw(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self.sock, data)


def against(job: Callable[[GuestLink, Liar], Awaitable[T]], *, patience_s: float = 5.0) -> T:
    async def whole() -> T:
        ours, theirs = socket.socketpair()
        link = await GuestLink.over_socket(ours, patience_s=patience_s)
        with theirs:
            try:
                async with asyncio.timeout(20):
                    return await job(link, Liar(theirs))
            finally:
                link.close()
                await link.closed()

    return asyncio.run(whole())


def entry(path: str = "f", size: int = 3) -> bytes:
    return Writer().data(path.encode()).u8(1).u32(0o644).u64(size).i64(7).data(b"").body()


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        (OK, b""),
        (OK, entry()[:-1]),
        (OK, entry() + struct.pack("<I", 4) + b"abc"),
        (OK, entry() + struct.pack("<I", 2) + b"abc"),
        (OK, entry() + struct.pack("<I", 101) + b"x" * 101),
        (OK, struct.pack("<I", 0xFFFFFFFF) + b"x" * 50),
        (ERROR, b""),
        (ERROR, Writer().u32(0).data(b"no error").body()),
        (ERROR, Writer().u32(1 << 31).data(b"").body()),
        (ERROR, Writer().u32(2).data(b"x" * 5000).body()),
        (PART, b"a part of what has none"),
        (77, b"an unknown kind"),
        (OK, b"x" * 100_000),
    ],
)
def test_a_lie_in_an_answer_closes_the_link(kind: int, body: bytes) -> None:
    async def job(link: GuestLink, liar: Liar) -> None:
        reading = asyncio.create_task(link.read("f", at_most=100))
        other = asyncio.create_task(link.wait(1, wait_s=5))
        identity, _, _ = await liar.hear()
        await liar.say(identity, kind, body)
        for ask in (reading, other):
            with pytest.raises(SandboxGone, match="protocol"):
                await ask
        with pytest.raises(SandboxGone, match="protocol"):
            await link.stat(".")
        assert link.gone is not None

    against(job)


@pytest.mark.parametrize("length", [0, 4, MAX_FRAME + 1, 0xFFFFFFFF])
def test_a_frame_beyond_the_bounds_closes_the_link_before_it_is_read(length: int) -> None:
    async def job(link: GuestLink, liar: Liar) -> None:
        reading = asyncio.create_task(link.read("f"))
        identity, _, _ = await liar.hear()
        await liar.raw(struct.pack("<IIB", length, identity, OK))
        with pytest.raises(SandboxGone):
            await reading

    against(job)


def test_an_answer_to_nothing_closes_the_link() -> None:
    async def job(link: GuestLink, liar: Liar) -> None:
        await liar.say(12345, OK)
        await asyncio.wait_for(link.closed(), 5)
        assert "a reply without a request" in (link.gone or "")

    against(job)


def test_a_flood_of_parts_is_cut() -> None:
    async def job(link: GuestLink, liar: Liar) -> None:
        listing = asyncio.create_task(link.list("."))
        identity, _, _ = await liar.hear()
        part = Writer().u32(1).body() + entry("x" * 60_000)

        async def flood() -> None:
            while True:
                await liar.say(identity, PART, part)

        flooding = asyncio.create_task(flood())
        with pytest.raises(SandboxGone):
            await listing
        with pytest.raises(OSError):
            await flooding

    against(job)


def test_a_guest_that_never_answers_is_given_up_and_one_that_is_held_is_not() -> None:
    async def job(link: GuestLink, liar: Liar) -> None:
        started = time.monotonic()
        link.hold()
        asking = asyncio.create_task(link.stat("."))
        await asyncio.sleep(0.8)
        assert not asking.done()
        link.release()
        with pytest.raises(SandboxGone, match="hangs"):
            await asking
        assert 1.0 < time.monotonic() - started < 4

    against(job, patience_s=0.3)


def test_a_long_poll_is_no_hanging_guest() -> None:
    async def job(link: GuestLink, liar: Liar) -> None:
        polling = asyncio.create_task(link.output(1, 1, 0, wait_s=1.0))
        identity, _, _ = await liar.hear()
        await asyncio.sleep(0.9)
        await liar.say(identity, OK, Writer().u64(0).u64(2).u8(1).data(b"hi").body())
        assert (await polling).data == b"hi"

    against(job, patience_s=0.3)


def test_a_cancelled_ask_is_cancelled_in_the_guest_and_its_late_answer_is_no_fault() -> None:
    async def job(link: GuestLink, liar: Liar) -> None:
        reading = asyncio.create_task(link.read("f"))
        identity, _, _ = await liar.hear()
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        cancelling, kind, body = await liar.hear()
        assert kind == Ask.CANCEL and body == struct.pack("<I", identity)
        await liar.say(identity, OK, entry() + struct.pack("<I", 3) + b"abc")
        await liar.say(cancelling, OK)
        stat = asyncio.create_task(link.stat("f"))
        identity, _, _ = await liar.hear()
        await liar.say(identity, OK, entry())
        assert await stat == Entry("f", "file", 0o644, 3, 7, "")

    against(job)


def test_asks_are_bounded_while_the_guest_does_not_read() -> None:
    async def job(link: GuestLink, liar: Liar) -> None:
        asks = [asyncio.create_task(link.write("f", b"x" * 1_000_000)) for _ in range(64)]
        await asyncio.sleep(0.3)
        assert link._channel._writer.get_write_buffer_size() < 4_000_000  # type: ignore[union-attr]
        for ask in asks:
            ask.cancel()
        await asyncio.gather(*asks, return_exceptions=True)
        with pytest.raises(OSError) as caught:
            for _ in range(10_000):
                asyncio.create_task(link.stat(".")).add_done_callback(lambda done: done.cancelled() or done.exception())
                await asyncio.sleep(0)
            await link.stat(".")
        assert caught.value.errno == errno.EAGAIN

    against(job, patience_s=60)


def test_a_watch_that_nobody_reads_loses_changes_and_says_so() -> None:
    async def job(link: GuestLink, liar: Liar) -> None:
        watching = link.watch(".")
        first = asyncio.ensure_future(anext(watching))
        identity, _, _ = await liar.hear()
        await liar.say(identity, PART, Writer().u32(0).body())
        assert await first == ()
        for number in range(2000):
            await liar.say(identity, PART, Writer().u32(1).u8(2).data(str(number).encode()).body())
        await asyncio.sleep(0.1)
        seen: list[Change] = []
        while not seen or seen[-1].kind != ChangeKind.OVERFLOW:
            seen += await anext(watching)
        assert seen[0] == Change(ChangeKind.CHANGED, "0") and seen[-1].kind == ChangeKind.OVERFLOW
        assert len(seen) < 1000
        await watching.aclose()

    against(job)


def test_large_parts_of_a_watch_that_nobody_reads_are_bounded_in_bytes() -> None:
    async def job(link: GuestLink, liar: Liar) -> None:
        watching = link.watch(".")
        first = asyncio.ensure_future(anext(watching))
        identity, _, _ = await liar.hear()
        await liar.say(identity, PART, Writer().u32(0).body())
        assert await first == ()
        for _ in range(20):
            await liar.say(identity, PART, Writer().u32(1).u8(2).data(b"n" * 1_000_000).body())
        asking = asyncio.create_task(link.remove("f"))
        other, _, _ = await liar.hear()
        await liar.say(other, OK)
        await asking  # all parts before this answer have arrived
        held = next(iter(link._channel._asks.values()))
        assert held.queue is not None and 3_000_000 < sum(map(len, held.queue)) == held.queued < 5_000_000
        await watching.aclose()

    against(job)


def test_a_stream_that_was_cut_starts_anew_at_the_reset() -> None:
    async def job() -> None:
        ours, theirs = socket.socketpair()
        link = await GuestLink.over_socket(ours, escaped=True)
        liar = Liar(theirs)
        reset = await asyncio.get_running_loop().sock_recv(theirs, 9)
        assert len(reset) == 9 and reset.startswith(b"\xff\x01") and b"\xff" not in reset[1:]
        asking = asyncio.create_task(link.stat("f"))
        await asyncio.sleep(0)
        body = Writer().data(b"\xff\xff").u8(1).u32(0).u64(255).i64(-1).data(b"").body()
        frame = (HEAD.pack(len(body) + 5, 1, OK) + body).replace(b"\xff", b"\xff\x00")
        for byte in b"the rest of a frame \xff\x00 and half \xff" + reset + frame:
            await liar.raw(bytes([byte]))
        found = await asking
        assert (found.path, found.size, found.mtime_ns) == ("\udcff\udcff", 255, -1)
        await liar.raw(b"\xff\x07")
        await asyncio.wait_for(link.closed(), 5)
        assert "escaped" in (link.gone or "")
        theirs.close()

    asyncio.run(job())


@given(st.binary(max_size=400), st.lists(st.integers(1, 50), max_size=20))
def test_escaping_is_undone_however_it_is_cut(data: bytes, cuts: list[int]) -> None:
    escape = Escape()
    whole = b"junk\xff" + escape.reset + escape.encode(data)
    found, at = b"", 0
    for cut in [*cuts, len(whole)]:
        found += escape.decode(whole[at : at + cut])
        at += cut
    assert found == data


@given(st.binary(max_size=300))
def test_no_bytes_make_a_parser_fail_otherwise_than_as_a_protocol_error(body: bytes) -> None:
    for parse in (
        read_entry,
        only_state,
        states,
        read_changes,
        lambda data: entry_and_data(data, 50),
        lambda data: output_chunk(data, 50),
        lambda data: shell_results(data, 2, 100),
    ):
        try:
            parse(body)
        except ProtocolError:
            continue


@settings(max_examples=150, deadline=None)
@given(st.lists(st.binary(min_size=1, max_size=64), max_size=12), st.booleans())
def test_a_link_survives_or_closes_whatever_arrives(pieces: list[bytes], framed: bool) -> None:
    async def job() -> None:
        channel = Channel(5.0)
        asking = asyncio.create_task(channel.ask(Ask.STAT, b"", bound=10))
        await asyncio.sleep(0)
        for number, piece in enumerate(pieces):
            data = HEAD.pack(len(piece) + 5, 1 + number % 2, piece[0]) + piece if framed else piece
            channel.data_received(data)
        if not asking.done():
            channel.end("over")
        await asyncio.gather(asking, return_exceptions=True)
        assert len(channel._pending) <= MAX_FRAME

    asyncio.run(job())


FIELDS = st.one_of(
    st.binary(max_size=60),
    st.builds(
        lambda numbers, texts: Writer().items(texts).body() + b"".join(n.to_bytes(4, "little") for n in numbers),
        st.lists(st.integers(0, 0xFFFFFFFF), max_size=6),
        st.lists(st.binary(max_size=20), max_size=3),
    ),
    st.builds(
        lambda path, rest: Writer().data(path).body() + rest,
        st.sampled_from([b".", b"f", b"..", b"/", b"d/e", b"a\0b", b"\xff", b"x" * 300]),
        st.binary(max_size=30),
    ),
)
# What can't be sent: INIT sets the host's name nowhere, SHELL changes what comes after; they have tests of their own.
KINDS = st.sampled_from([ask.value for ask in Ask if ask not in (Ask.SHELL, Ask.START)] + [0, 99, 255])


def test_an_agent_answers_or_closes_whatever_a_server_sends(tmp_path: Path) -> None:
    count = 0

    @settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.tuples(KINDS, FIELDS), min_size=1, max_size=12))
    def fuzz(asks: list[tuple[int, bytes]]) -> None:
        nonlocal count
        count += 1
        guest = Guest(tmp_path / str(count))
        try:
            guest.socket.settimeout(10)
            data = b"".join(
                HEAD.pack(len(fields) + 5, number, ask) + fields for number, (ask, fields) in enumerate(asks, 1)
            )
            try:
                guest.socket.sendall(data)
                guest.socket.shutdown(socket.SHUT_WR)
                received = b""
                while more := guest.socket.recv(65536):
                    received += more
            except (BrokenPipeError, ConnectionResetError):
                received = b""
            at = 0
            while at + 4 <= len(received):
                length, identity, answer = HEAD.unpack_from(received, at)
                assert 5 <= length <= MAX_FRAME and 1 <= identity <= len(asks) and answer in (OK, PART, ERROR)
                at += 4 + length
            assert guest.process.wait(10) in (0, 1)
        finally:
            guest.stop()

    fuzz()


def test_an_agent_closes_at_a_frame_beyond_the_bounds(tmp_path: Path) -> None:
    for number, head in enumerate((HEAD.pack(MAX_FRAME + 1, 1, 1), HEAD.pack(4, 1, 1), HEAD.pack(5, 1, 200))):
        guest = Guest(tmp_path / str(number))
        try:
            guest.socket.settimeout(10)
            guest.socket.sendall(head + b"x" * 100)
            assert guest.process.wait(10) in (0, 1)
        finally:
            guest.stop()


def test_an_agent_keeps_little_while_the_server_does_not_read(tmp_path: Path) -> None:
    guest = Guest(tmp_path)
    try:
        (guest.workspace / "f").write_bytes(os.urandom(1_000_000))
        ask = Writer().data(b"f").u64(0).u32(1_000_000).body()
        guest.socket.settimeout(1.0)
        sent = 0
        try:
            for number in range(1, 200_000):
                guest.socket.sendall(HEAD.pack(len(ask) + 5, number, Ask.READ) + ask)
                sent += 1
        except TimeoutError:
            pass
        status = (Path("/proc") / str(guest.process.pid) / "status").read_text()
        resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
        assert 0 < sent < 199_999 and resident < 80_000, (sent, resident)
    finally:
        guest.stop()
