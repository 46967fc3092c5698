"""What an agent answers about commands in its shell, of both agents."""

from __future__ import annotations

import asyncio
import errno
import signal
import time
from pathlib import Path

import pytest

from envd.guest.link import GuestLink
from envd.guest.protocol import MAX_FRAME
from envd.sandbox.proctree import descendants
from tests.envd.guests import Guest, alive, sh, until_alive


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


def test_commands_beyond_a_frame_are_an_error_and_the_agent_lives_on(guest: Guest) -> None:
    async def job(link: GuestLink) -> None:
        for commands in ([("true #" + "x" * MAX_FRAME, 20)], [("true #" + "x" * (MAX_FRAME // 3), 20)] * 3):
            with pytest.raises(OSError) as caught:
                await link.shell(commands)
            assert caught.value.errno == errno.EMSGSIZE
        assert (await sh(link, "true #" + "x" * (MAX_FRAME // 3)))[0] == 0

    guest.run(job)


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
