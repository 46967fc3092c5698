"""The Files and Processes services through their client."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
from contextlib import aclosing

import pytest

from envd.client import SandboxGone
from envd.errors import EnvdError, FileError
from envd.operations.client import ManagedSandbox
from tests.envd.harness import Harness


def test_files_are_written_read_listed_moved_and_removed(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        files = sandbox.files
        written = await files.write("a/b/c.bin", bytes(range(256)) * 10, mode=0o750)
        assert (written.path, written.type, written.size, written.mode) == ("a/b/c.bin", "file", 2560, 0o750)
        assert await files.read("a/b/c.bin", offset=250, length=10) == bytes(range(250, 256)) + bytes(range(4))
        assert await files.read("/workspace/a/b/c.bin", offset=2559) == b"\xff"
        await files.write("a/b/c.bin", b"short")
        assert (await files.stat("a/b/c.bin")).mode == 0o750, "mode 0 keeps what was there"
        entries, cut = await files.list("a", depth=9)
        assert [entry.path for entry in entries] == ["a/b", "a/b/c.bin"] and not cut
        assert (await files.list(".", depth=9, limit=2))[1]
        await files.make_directory("x/y")
        await files.move("a/b/c.bin", "x/y/d")
        assert await files.read("x/y/d") == b"short"
        await files.remove("x", recursive=True)
        with pytest.raises(FileError) as caught:
            await files.read("x/y/d")
        assert caught.value.errno == errno.ENOENT and "x/y/d" in str(caught.value)

    anywhere.sandbox(job)


REFUSED = {
    "a directory is no file": ("read", ("tests",), errno.EISDIR),
    "a full directory": ("remove", ("tests",), errno.ENOTEMPTY),
    "a file that is there": ("move", ("calc.py", "tests/test_calc.py"), errno.EEXIST),
    "a name too long": ("stat", ("n" * 300,), errno.ENAMETOOLONG),
}


@pytest.mark.parametrize("case", REFUSED, ids=lambda name: name.replace(" ", "-"))
def test_what_the_system_refuses_is_an_error_with_its_number(anywhere: Harness, case: str) -> None:
    method, arguments, number = REFUSED[case]

    async def job(sandbox: ManagedSandbox) -> None:
        with pytest.raises(FileError) as caught:
            await getattr(sandbox.files, method)(*arguments)
        assert caught.value.errno == number

    anywhere.sandbox(job)


def test_no_path_and_no_link_leaves_the_workspace_and_tries_are_recorded(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> list[str]:
        await sandbox.processes.run(["/bin/ln", "-s", "/etc", "out"])
        for path in ("../../../etc/hostname", "/etc/hostname", "out/hostname", "/proc/self/root/etc/hostname"):
            with pytest.raises(FileError):
                await sandbox.files.read(path)
        await sandbox.files.write("../../tmp/escaped", b"x")
        assert await sandbox.files.read("tmp/escaped") == b"x", "what is above the root is the root"
        return [event.kind async for event in sandbox._client.audit(sandbox_id=sandbox.id)]

    assert "path.escape" in anywhere.sandbox(job)


def test_a_large_file_goes_up_and_down_in_pieces(anywhere: Harness) -> None:
    content = os.urandom(5_000_000)

    async def job(sandbox: ManagedSandbox) -> None:
        await sandbox.files.upload("big", content)
        assert b"".join([piece async for piece in sandbox.files.download("big")]) == content
        assert await sandbox.files.read("big") == content
        with pytest.raises(FileError) as caught:
            await sandbox.files.upload("bigger", bytes(80 << 20))  # the client still writes when it is refused
        assert caught.value.errno == errno.EFBIG

    anywhere.sandbox(job)


def test_changes_are_watched(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        async with aclosing(sandbox.files.watch()) as events:
            assert (await anext(events)).kind == "watching"
            await sandbox.files.make_directory("seen")
            seen = [await asyncio.wait_for(anext(events), 5)]
            assert (seen[0].path, seen[0].kind) == ("seen", "created")
            copy = await sandbox.fork()  # the watch goes on through it, and says that something may have been missed
            while (await asyncio.wait_for(anext(events), 10)).kind != "overflow":
                pass
            await sandbox.files.make_directory("later")
            while (await asyncio.wait_for(anext(events), 5)).path != "later":
                pass
            await copy.close()

    anywhere.sandbox(job)


def test_a_process_gives_its_output_its_state_and_its_code(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        script = "echo $WORD; echo err >&2; pwd; exit 7"
        state, out, err = await sandbox.processes.run(
            ["/bin/bash", "-c", script], env={"WORD": "given"}, directory="tests"
        )
        assert out.startswith(b"given\n") and out.endswith(b"/tests\n") and err == b"err\n"
        assert (state.exit_code, state.state, state.timed_out, state.stdout_bytes) == (7, "exited", False, len(out))
        assert [each.process for each in await sandbox.processes.list()] == [state.process]

    anywhere.sandbox(job)


def test_a_reader_that_comes_back_goes_on_where_it_was(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        started = await sandbox.processes.start(["/bin/bash", "-c", "echo one; read x; echo two $x"], stdin=True)
        async with aclosing(sandbox.processes.connect(started.process)) as events:
            first = await anext(events)
        assert (first.channel, first.offset, first.data) == ("stdout", 0, b"one\n")
        assert await sandbox.processes.stdin(started.process, b"three\n") == 6
        rest = [event async for event in sandbox.processes.connect(started.process, stdout_offset=4)]
        assert (rest[0].offset, rest[0].data) == (4, b"two three\n")
        assert rest[-1].HasField("ended") and rest[-1].ended.exit_code == 0

    anywhere.sandbox(job)


def test_a_full_ring_drops_the_oldest_and_says_so(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        started = await sandbox.processes.start(["/bin/bash", "-c", "seq 1 100000"], ring_bytes=4096)
        while (await sandbox.processes.list())[0].state == "running":
            await asyncio.sleep(0.02)
        events = [event async for event in sandbox.processes.connect(started.process)]
        assert events[0].offset == 588895 - 4096 and b"".join(event.data for event in events).endswith(b"100000\n")

    anywhere.sandbox(job)


def test_signals_timeouts_and_the_end_of_input_end_processes(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        processes = sandbox.processes
        sleeper = await processes.start(["/bin/sleep", "1000"])
        await processes.signal(sleeper.process, signal.SIGTERM)
        reader = await processes.start(["/bin/cat"], stdin=True)
        await processes.close_stdin(reader.process)
        late, _, _ = await processes.run(["/bin/sleep", "1000"], timeout_s=0.3)
        assert late.timed_out and late.exit_code == -signal.SIGKILL
        ends = [[each async for each in processes.connect(one.process)][-1] for one in (sleeper, reader)]
        assert [each.ended.exit_code for each in ends] == [-signal.SIGTERM, 0]

    anywhere.sandbox(job)


def test_a_terminal_has_a_size_that_changes(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        if "pty" not in (await sandbox._client.info()).backends[0].features:
            pytest.skip("no terminals here")
        script = "stty size; read x; stty size"
        started = await sandbox.processes.start(["/bin/bash", "-c", script], pty=(10, 20), stdin=True)
        await asyncio.sleep(0.2)
        await sandbox.processes.resize(started.process, 30, 40)
        await sandbox.processes.stdin(started.process, b"\n")
        events = [event async for event in sandbox.processes.connect(started.process)]
        text = b"".join(event.data for event in events)
        assert b"10 20" in text and b"30 40" in text

    anywhere.sandbox(job)


def test_a_stream_goes_on_through_a_fork_and_ends_with_its_sandbox(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        started = await sandbox.processes.start(["/bin/bash", "-c", "echo a; sleep 1; echo b; sleep 1000"])
        async with aclosing(sandbox.processes.connect(started.process)) as events:
            assert (await anext(events)).data == b"a\n"
            copy = await sandbox.fork()
            second = await anext(events)
            assert (second.offset, second.data) == (2, b"b\n")
            await copy.close()
            await sandbox.close()
            with pytest.raises(SandboxGone):
                await anext(events)

    anywhere.sandbox(job)


WRONG = {
    "no program": lambda s: s.processes.start([]),
    "a program that is not there": lambda s: s.processes.start(["/no/such/program"]),
    "a process that is not there": lambda s: s.processes.signal(4711, 9),
    "a signal that is none": lambda s: s.processes.signal(1, 65),
    "a variable that is none": lambda s: s.processes.start(["/bin/true"], env={"A=B": "x"}),
    "a time that is none": lambda s: s.processes.start(["/bin/true"], timeout_s=float("nan")),
    "an offset that is none": lambda s: s.files.read("calc.py", offset=-1),
    "a directory that is not there": lambda s: s.processes.start(["/bin/true"], directory="nowhere"),
    "a path with a null": lambda s: s.files.read("a\0b"),
}


@pytest.mark.parametrize("case", WRONG, ids=lambda name: name.replace(" ", "-"))
def test_a_wrong_request_is_refused_and_the_sandbox_lives_on(anywhere: Harness, case: str) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        with pytest.raises(EnvdError) as caught:
            await WRONG[case](sandbox)
        assert not isinstance(caught.value, SandboxGone)
        assert await sandbox.files.read("calc.py")

    anywhere.sandbox(job)
