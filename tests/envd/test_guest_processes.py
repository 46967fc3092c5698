"""What an agent answers about processes, of both agents."""

from __future__ import annotations

import asyncio
import signal
import time

import pytest

from envd.guest.link import GuestLink
from tests.envd.guests import Guest, alive, sh, until_alive


def test_a_process_streams_from_offsets_and_ends(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        process, pid = await link.start(
            ["sh", "-c", "echo one; echo err >&2; sleep 0.3; echo $A two; exit 7"], env={"A": "b"}
        )
        assert pid > 1
        chunk = await link.output(process, 1, 0, wait_s=10)
        assert (chunk.start, chunk.data, chunk.ended) == (0, b"one\n", False)
        started = time.monotonic()
        chunk = await link.output(process, 1, 4, wait_s=10)
        assert chunk.data == b"b two\n" and time.monotonic() - started < 5
        state = await link.wait(process, wait_s=10)
        assert (state.running, state.code, state.stdout, state.stderr) == (False, 7, 10, 4)
        chunk = await link.output(process, 1, 0, wait_s=10)
        assert (chunk.data, chunk.ended, chunk.total) == (b"one\nb two\n", True, 10)
        assert (await link.output(process, 2, 1, at_most=2, wait_s=10)).data == b"rr"
        assert [each.process for each in await link.processes()] == [process]
        assert state.argv[:2] == ("sh", "-c")

    guest.run(job)


def test_a_ring_replays_its_last_bytes_and_says_what_it_dropped(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        process, _ = await link.start(["seq", "1", "200000"], ring=8192)
        assert not (await link.wait(process, wait_s=20)).running
        while not (chunk := await link.output(process, 1, 0, wait_s=5)).ended:
            await asyncio.sleep(0.01)
        assert chunk.total == 1288895 and chunk.start == 1288895 - len(chunk.data) > 0
        assert 8192 <= len(chunk.data) <= 2 * 8192 and chunk.data.endswith(b"199999\n200000\n")
        assert (await link.output(process, 1, 1288890)).data == b"0000\n"

    guest.run(job)


def test_a_long_poll_ends_in_time_and_when_it_is_cancelled(guest: Guest, mark: str) -> None:
    async def job(link: GuestLink) -> None:
        process, _ = await link.start(["sleep", mark])
        started = time.monotonic()
        chunk = await link.output(process, 1, 0, wait_s=0.3)
        assert (chunk.data, chunk.ended) == (b"", False) and 0.25 < time.monotonic() - started < 3
        polls = [asyncio.create_task(link.wait(process, wait_s=60)) for _ in range(50)]
        await asyncio.sleep(0.1)
        for poll in polls[:-1]:
            poll.cancel()
        await link.signal(process, signal.SIGTERM)
        assert (await polls[-1]).code == -15
        assert (await link.processes())[0].running is False

    guest.run(job)


def test_the_end_of_an_old_process_is_still_told_when_many_younger_ones_have_ended(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        old, _ = await link.start(["cat"], stdin=True)
        for _ in range(80):
            process, _ = await link.start(["true"])
            await link.wait(process, wait_s=10)
            while not (await link.output(process, 2, 0, wait_s=5)).ended:
                await asyncio.sleep(0.01)
        await link.close_stdin(old)
        await link.wait(old, wait_s=10)
        await link.start(["true"])
        assert (await link.wait(old, wait_s=10)).code == 0
        assert len(await link.processes()) <= 66

    guest.run(job)


def test_processes_with_long_arguments_are_waited_for_and_listed(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        argv = ["true", *["x" * 110_000] * 10]
        for number in range(5):
            process, _ = await link.start(argv)
            assert (await link.wait(process, wait_s=10)).argv == tuple(argv)
            assert len(await link.processes()) == number + 1
        for _ in range(5):
            await link.start(argv)
        assert 5 < len(await link.processes()) < 10, "as many as a frame holds"

    guest.run(job)


def test_standard_input_is_fed_and_ended(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        process, _ = await link.start(["cat"], stdin=True)
        assert await link.stdin(process, b"hello ") == 6
        assert await link.stdin(process, b"there\n") == 6
        assert (await link.wait(process, wait_s=0.1)).running
        await link.close_stdin(process)
        assert (await link.wait(process, wait_s=10)).code == 0
        assert (await link.output(process, 1, 0, wait_s=5)).data == b"hello there\n"
        full, _ = await link.start(["sleep", "20"], stdin=True)
        accepted = [await link.stdin(full, b"x" * 50_000) for _ in range(4)]
        assert accepted[-1] == 0 and 0 < sum(accepted) < 200_000
        await link.signal(full, signal.SIGKILL)
        none, _ = await link.start(["cat"])
        assert (await link.wait(none, wait_s=10)).code == 0
        with pytest.raises(OSError):
            await link.stdin(none, b"x")

    guest.run(job)


def test_a_terminal_has_a_size_echoes_and_is_a_terminal(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        process, _ = await link.start(
            ["bash", "--norc", "-i"], pty=True, stdin=True, rows=31, columns=97, env={"PS1": ""}
        )
        await link.stdin(process, b"tty > /dev/null && stty size\n")
        seen = await until(link, process, b"31 97")
        await link.resize(process, 40, 120)
        await link.stdin(process, b"stty size; echo a$((1+1))b\n")
        seen = await until(link, process, b"a2b")
        assert b"40 120" in seen
        await link.stdin(process, b"sleep 50\n")
        await asyncio.sleep(0.3)
        await link.stdin(process, b"\x03PS1='an''other'; echo in$((2+2))terrupted\n")
        assert b"in4terrupted" in await until(link, process, b"another")  # an end is seen at a prompt only
        await link.close_stdin(process)
        assert not (await link.wait(process, wait_s=10)).running
        plain, _ = await link.start(["true"])
        with pytest.raises(OSError):
            await link.resize(plain, 1, 1)

    guest.run(job)


async def until(link: GuestLink, process: int, wanted: bytes) -> bytes:
    seen = b""
    while wanted not in seen:
        chunk = await link.output(process, 1, len(seen), wait_s=10)
        assert chunk.data, seen
        seen += chunk.data
    return seen


def test_a_process_that_outlives_its_time_is_killed_with_its_tree(guest: Guest, mark: str) -> None:
    async def job(link: GuestLink) -> None:
        process, _ = await link.start(["sh", "-c", f"sleep {mark} & sleep {mark}"], timeout_s=0.4)
        state = await link.wait(process, wait_s=10)
        assert state.timed_out and not state.running and state.code == -9
        kept, _ = await link.start(["sh", "-c", f"sleep {mark} & sleep {mark}"])
        assert await until_alive(mark, 2)
        await link.signal(kept, signal.SIGKILL, tree=True)
        assert (await link.wait(kept, wait_s=10)).code == -9
        assert await until_alive(mark, 0)

    guest.run(job)


def test_what_can_not_be_started_is_refused_by_its_reason(guest: Guest) -> None:
    (guest.workspace / "text").write_text("no program")

    async def job(link: GuestLink) -> None:
        for argv, directory, wanted in (
            (["no-such-program"], "", FileNotFoundError),
            (["./text"], "", PermissionError),
            ([], "", OSError),
            (["true"], "missing", FileNotFoundError),
        ):
            with pytest.raises(wanted):
                await link.start(argv, directory=directory)
        for ask in (link.wait(99), link.output(99, 1, 0), link.signal(99, 9), link.stdin(99, b"x")):
            with pytest.raises(OSError):
                await ask
        process, _ = await link.start(["pwd"], directory="/tmp")
        assert (await link.output(process, 1, 0, wait_s=10)).data == b"/tmp\n"
        assert (await link.wait(process, wait_s=10)).code == 0

    guest.run(job)


C_LIBRARYS_OWN = 0b11 << 31
"""Signals 32 and 33, which no program can set through the C library; who started the tests may have them ignored."""


def test_children_start_with_nothing_of_the_agents(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        process, _ = await link.start(["sh", "-c", "ls /proc/self/fd; grep -E '^Sig(Blk|Ign)' /proc/self/status"])
        await link.wait(process, wait_s=10)
        said = (await link.output(process, 1, 0, wait_s=10)).data.decode()
        assert said.splitlines()[:4] == ["0", "1", "2", "3"] and "SigBlk:\t0000000000000000" in said
        ignored = int(said.split("SigIgn:")[1].split()[0], 16)
        assert ignored & ~C_LIBRARYS_OWN == 0, said
        assert await sh(link, "ls /proc/self/fd | wc -l; grep -c 0000000000000000 /proc/self/status") != (1, "")
        (fds,) = await link.shell([("for fd in /proc/$BASHPID/fd/*; do echo ${fd##*/}; done", 10)])
        assert {int(word) for word in fds.head.split()} <= {0, 1, 2, 3, 255} | set(range(10, 20)) | {200, 201}

    guest.run(job)


def test_the_end_of_the_stream_ends_all_that_was_started(guest: Guest, mark: str) -> None:
    async def job(link: GuestLink) -> None:
        await link.start(["sleep", mark])
        await link.shell([(f"sleep {mark} & (setsid nohup sleep {mark} >/dev/null 2>&1 &)", 10)])
        assert await until_alive(mark, 3)

    guest.run(job)
    guest.process.wait(10)
    assert alive(mark) == []
