"""What an agent answers about commands and processes, of both agents."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from envd.errors import SandboxGone
from envd.guest.link import GuestLink
from envd.sandbox.proctree import descendants
from tests.envd.guests import KINDS, Guest


@pytest.fixture(params=KINDS)
def guest(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Guest]:
    started = Guest(request.param, tmp_path)
    yield started
    started.stop()


async def sh(link: GuestLink, command: str, deadline_s: float = 20, limit: int = 16384) -> tuple[int, str]:
    (result,) = await link.shell([(command, deadline_s)], limit=limit)
    return result.code, (result.head + result.tail).decode()


def alive(mark: str) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if f"sleep\0{mark}\0" in (entry / "cmdline").read_text():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


async def until_alive(mark: str, count: int) -> bool:
    """Whether so many run, soon: what was forked has yet to exec."""
    for _ in range(500):
        if len(alive(mark)) == count:
            return True
        await asyncio.sleep(0.01)
    return False


@pytest.fixture
def mark() -> Iterator[str]:
    """A number of seconds that no other sleep on this machine has."""
    name = f"9{time.time_ns() % 10**9}"
    yield name
    assert alive(name) == []


def test_the_shell_keeps_its_state_and_gives_exit_codes(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        assert await sh(link, "mkdir d; cd d; export X=5; f() { echo f$1; }; false") == (1, "")
        assert await sh(link, "basename $PWD; echo $X $GREETING; f 7; echo err >&2") == (0, "d\n5 hello\nf7\nerr\n")
        (died,) = await link.shell([("echo bye; exit 3", 20)])
        assert (died.code, died.died, died.timed_out, died.head) == (3, True, False, b"bye\n")
        assert await sh(link, "echo .$X.") == (0, "..\n")
        (killed,) = await link.shell([("kill -9 $$", 20)])
        assert (killed.code, killed.died) == (137, True)
        assert (await sh(link, "exec 2>&1; bash -c 'kill -TERM $$'"))[0] == 143
        assert await sh(link, "cat; read x; echo $?") == (0, "1\n")

    guest.run(job)


@pytest.mark.parametrize("warmed", [False, True])
def test_a_shell_that_died_while_nothing_ran_in_it_is_told_to_the_next_ask(guest: Guest, warmed: bool) -> None:
    async def job(link: GuestLink) -> None:
        for end, code in (("kill -9 $$", 137), ("kill -HUP $$", 129)):
            began = set(descendants(guest.process.pid))
            await link.warm_shell()
            (shell,) = set(descendants(guest.process.pid)) - began
            assert (await sh(link, f"X=1; touch ran; (sleep 0.3; {end}) >/dev/null 2>&1 &"))[0] == 0
            while Path(f"/proc/{shell}").exists():
                await asyncio.sleep(0.01)
            if warmed:
                await link.warm_shell()
            told = await link.shell([("rm ran", 20), ("rm ran", 20)])
            assert [(each.code, each.died, each.timed_out, each.head) for each in told] == [
                (code, True, False, b"")
            ] * 2
            assert await sh(link, "echo .$X.; ls ran") == (0, "..\nran\n")
            assert (await link.shell([("exit 4", 20)]))[0].died

    guest.run(job)


def test_a_shell_can_be_started_before_its_first_command(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        began = set(descendants(guest.process.pid))
        await link.warm_shell()
        (shell,) = set(descendants(guest.process.pid)) - began
        await link.warm_shell()
        (result,) = await link.shell([("echo $$", 20.0)])
        assert set(descendants(guest.process.pid)) - began == {shell}, "the one that was started takes the command"
        assert (result.code, result.head.strip().isdigit()) == (0, True)

    guest.run(job)


def test_commands_of_one_ask_run_at_once_and_answer_in_order(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        await link.shell([("X=1", 20)])
        started = time.monotonic()
        found = await link.shell([(f"sleep 0.5; echo {n}$X; X=2; exit {n}", 20) for n in range(6)])
        assert time.monotonic() - started < 2.5
        assert [(each.code, each.head) for each in found] == [(n, f"{n}1\n".encode()) for n in range(6)]
        assert await sh(link, "echo $X") == (0, "1\n")

    guest.run(job)


def test_shell_asks_queue_and_wait_for_each_other(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        found = await asyncio.gather(*(sh(link, f"echo -n {n} >> log; sleep 0.05; cat log") for n in range(6)))
        assert found == [(0, "012345"[: n + 1]) for n in range(6)]

    guest.run(job)


@pytest.mark.parametrize("size", [0, 1, 100, 101, 102, 5000, 1_288_895])
def test_output_is_cut_in_the_middle_and_its_true_size_told(guest: Guest, size: int) -> None:
    data = (b"0123456789abcdef" * (size // 16 + 1))[:size]
    (guest.workspace / "data").write_bytes(data)

    async def job(link: GuestLink) -> None:
        (result,) = await link.shell([("cat data", 20)], limit=101)
        assert result.true_bytes == size
        if size <= 100:
            assert (result.head, result.tail) == (data, b"")
        elif size > 101:
            assert (result.head, result.tail) == (data[:50], data[-50:])

    guest.run(job)


def test_a_deadline_kills_all_that_the_command_started_and_nothing_else(guest: Guest, mark: str) -> None:
    async def job(link: GuestLink) -> None:
        process, _ = await link.start(["sleep", mark])
        await link.shell([(f"sleep {mark} & echo $! > old", 20)])
        started = time.monotonic()
        (late,) = await link.shell(
            [(f"echo before; (setsid sleep {mark} &) ; sh -c 'sleep {mark} & sleep {mark}' & sleep {mark}", 1.0)]
        )
        assert time.monotonic() - started < 8
        assert (late.timed_out, late.died, late.head) == (True, False, b"before\n")
        assert await until_alive(mark, 2) and (await link.wait(process)).running
        assert await sh(link, "kill $(cat old) && echo killed") == (0, "killed\n")
        await link.signal(process, signal.SIGKILL)
        assert (await link.wait(process, wait_s=10)).code == -9

    guest.run(job)


def test_a_fork_storm_ends_at_its_deadline(guest: Guest, mark: str) -> None:
    async def job(link: GuestLink) -> None:
        storm = f"for n in $(seq 60); do (setsid sleep {mark} &); done; while :; do (sleep {mark} &) ; sleep 0.02; done"
        (late,) = await link.shell([(storm, 1.0)])
        assert late.timed_out
        assert await sh(link, "echo next") == (0, "next\n")

    guest.run(job)
    assert alive(mark) == []


def test_parallel_commands_end_together_when_one_is_late(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        fine, hung, also = await link.shell([("echo fine", 20), ("sleep 60", 0.7), ("sleep 60", 30)])
        assert (fine.code, fine.head, fine.timed_out) == (0, b"fine\n", False)
        assert hung.timed_out and (also.timed_out or also.died)

    guest.run(job)


def test_a_cancelled_command_ends_with_all_it_started_and_the_link_lives_on(guest: Guest, mark: str) -> None:
    async def job(link: GuestLink) -> None:
        running = asyncio.create_task(link.shell([(f"X=1; (setsid sleep {mark} &); sleep {mark}", 60)]))
        queued = asyncio.create_task(link.shell([(f"touch ran; sleep {mark}", 60)]))
        assert await until_alive(mark, 2)
        queued.cancel()
        running.cancel()
        await asyncio.gather(queued, running, return_exceptions=True)
        assert await sh(link, "echo next.$X") == (0, "next.\n")
        assert alive(mark) == [] and not (guest.workspace / "ran").exists()

    guest.run(job)


def test_background_output_mixes_into_nothing_and_blocks_nobody(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        await link.shell([("(while true; do echo noise; done) & (sleep 0.4; echo done > flag) & yes &", 20)])
        await asyncio.sleep(0.2)
        assert await sh(link, "echo quiet") == (0, "quiet\n")
        assert await sh(link, "sleep 0.5; cat flag; kill %1 %3") == (0, "done\n")

    guest.run(job)


def test_what_bash_can_not_forge(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        forged = 'for n in $(seq 9); do echo "$n 0" >&201; echo "$n 0" >&200; done 2>/dev/null; false'
        assert (await sh(link, forged))[0] == 1
        with pytest.raises(OSError):
            await link.shell([("echo a\0alone\0x", 5)])
        assert await sh(link, "echo " + "x" * 300_000 + " | wc -c") == (0, "300001\n")  # longer than a pipe holds

    guest.run(job)


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


def test_quit_ends_the_agent(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        await link.quit()
        with pytest.raises(SandboxGone):
            await link.stat(".")

    guest.run(job)
    assert guest.process.wait(10) == 0


def test_a_shell_with_no_scratch_answers_its_reason(guest: Guest, tmp_path: Path) -> None:
    async def job(link: GuestLink) -> None:
        await link.shell([("true", 10)])
        (tmp_path / "scratch").rename(tmp_path / "elsewhere")
        try:
            found = await link.shell([("echo still", 10)])
            assert found[0].head == b"still\n"
        except FileNotFoundError:
            pass  # an agent that uses named pipes says so
        assert (await link.stat(".")).type == "directory"

    guest.run(job)
