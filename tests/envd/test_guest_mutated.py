"""The server's end against agents that answer as a real one did, but for what was changed at random: every lie ends in
an error of two kinds.
"""

from __future__ import annotations

import asyncio
import socket
from collections import defaultdict

import pytest

from envd.errors import SandboxGone
from envd.guest.escape import Escape
from envd.guest.link import GuestLink
from envd.guest.protocol import HEAD, Answer
from tests.fuzz.mutation import Mutator
from tests.fuzz.recording import SESSIONS, Frame, Session, frames_of, record

pytestmark = pytest.mark.slow

RUNS = 120
HANGS_S = 20.0
QUIET_S = 0.3


class Replayer:
    """An agent's end that says what was recorded, changed."""

    def __init__(self, sock: socket.socket, answers: list[Frame], mutator: Mutator, *, escaped: bool) -> None:
        self._sock, self._mutator, self._escaped = sock, mutator, escaped
        self._by_ask: defaultdict[int, list[Frame]] = defaultdict(list)
        self._all = answers
        self._heard = b""
        for frame in answers:
            self._by_ask[frame[0]].append(frame)
        sock.setblocking(False)

    async def serve(self) -> None:
        """Answer each ask until none has come for a while; then close, as an agent that ended."""
        try:
            if self._escaped:
                await self._send_raw(await asyncio.wait_for(self._take(9), HANGS_S))
            while True:
                await self._answer(await asyncio.wait_for(self._ask(), QUIET_S))
        except (OSError, EOFError):
            self._sock.close()

    async def _answer(self, identity: int) -> None:
        chance = self._mutator.chance
        frames = self._by_ask.get(identity) or [(identity, *chance.choice(self._all)[1:])]
        if chance.random() < 0.25:
            data = self._mutator.stream(self._mutator.frames([frames]))
        else:
            data = b"".join(HEAD.pack(len(body) + HEAD.size - 4, number, kind) + body for number, kind, body in frames)
        await self._send_raw(Escape().encode(data) if self._escaped else data)

    async def _take(self, count: int) -> bytes:
        while len(self._heard) < count:
            more = await asyncio.get_running_loop().sock_recv(self._sock, 65536)
            if not more:
                raise EOFError
            self._heard += more
        taken, self._heard = self._heard[:count], self._heard[count:]
        return taken

    async def _ask(self) -> int:
        """The id of the next ask."""
        size, identity, _ = HEAD.unpack(await self._fields(HEAD.size))
        await self._fields(size + 4 - HEAD.size)
        return int(identity)

    async def _fields(self, count: int) -> bytes:
        if not self._escaped:
            return await self._take(count)
        data = b""
        while len(data) < count:
            data += await self._take(1)
            if data.endswith(b"\xff"):
                await self._take(1)  # what stuffs it
        return data

    async def _send_raw(self, data: bytes) -> None:
        loop = asyncio.get_running_loop()
        at = 0
        while at < len(data):
            size = self._mutator.chance.choice((1, 7, 100, 70_000))
            await loop.sock_sendall(self._sock, data[at : at + size])
            at += size


async def against(session: Session, answers: list[Frame], mutator: Mutator, *, escaped: bool) -> BaseException | None:
    """Play a session with a replayer. Returns how it ended; None where it ran through."""
    ours, theirs = socket.socketpair()
    link = await GuestLink.over_socket(ours, patience_s=2.0, escaped=escaped)
    replaying = asyncio.create_task(Replayer(theirs, answers, mutator, escaped=escaped).serve())

    async def play() -> None:
        await link.init(host_name="box", env={"GREETING": "hello"})
        await session(link)

    playing = asyncio.create_task(play())
    done, _ = await asyncio.wait({playing}, timeout=HANGS_S)
    assert done, "the link waits for ever"
    link.close()
    await link.closed()
    await asyncio.wait_for(replaying, HANGS_S)
    return playing.exception()


@pytest.fixture(scope="module")
def recorded() -> dict[Session, list[Frame]]:
    return {session: list(frames_of(record(session)[1])) for session in SESSIONS}


@pytest.mark.parametrize("escaped", [False, True], ids=["plain", "escaped"])
@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.__name__.strip("_"))
def test_a_link_stands_what_a_mutated_agent_says(
    session: Session, escaped: bool, recorded: dict[Session, list[Frame]]
) -> None:
    ended: list[str] = []
    for run in range(RUNS):
        mutator = Mutator(run, tuple(map(int, Answer)))
        error = asyncio.run(against(session, recorded[session], mutator, escaped=escaped))
        assert error is None or isinstance(error, (OSError, SandboxGone)), (run, error)
        ended.append(type(error).__name__)
    assert ended.count("SandboxGone") > RUNS / 4, f"mutations are told from answers: {ended}"
