"""The agent in Python: serves one sandbox from inside it until the stream ends. It is the native agent's equal, for where there is no compiler.

It is process 1 of its sandbox in the namespaces backend, so its end is the end of everything in there; elsewhere it ends what it started.
One thread and one loop: file asks are answered at once, whatever the shell does. It speaks no escaped streams (envd/guest/escape.py).
"""

from __future__ import annotations

import errno
import os
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from envd.guest.files import Files
from envd.guest.loop import Loop, Timer
from envd.guest.processes import Process, Processes, write_output
from envd.guest.protocol import HEAD, VERSION, Answer, Ask, ProtocolError, Reader, Writer
from envd.guest.shell import Ended, Job, Shell
from envd.guest.stream import Stream
from envd.guest.watch import Watch
from envd.sandbox.proctree import kill_since, reap

_MAX_WAITING = 4096
_MAX_COMMANDS = 1024
_MAX_LIMIT = 1024 * 1024
Cancel = Callable[[], None]


class Agent:
    """One sandbox's end of the protocol."""

    def __init__(self, reading: int, writing: int, *, workspace: Path, scratch: Path) -> None:
        self._loop = Loop()
        self._stream = Stream(self._loop, reading, writing, self._serve_one)
        self._env = dict(os.environ)
        self._files = Files(workspace)
        self._workspace = workspace
        self._processes = Processes(self._loop, workspace)
        self._shell = Shell(self._loop, workspace, scratch, self._env, self._processes.pids, self._collect)
        self._waiting: dict[int, Cancel] = {}
        self._asks: dict[int, Callable[[int, Reader], None]] = {
            Ask.INIT: self._init,
            Ask.SHELL: self._run_shell,
            Ask.START: self._start,
            Ask.OUTPUT: self._output,
            Ask.WAIT: self._wait,
            Ask.PROCESSES: self._list_processes,
            Ask.STDIN: self._stdin,
            Ask.CLOSE_STDIN: self._close_stdin,
            Ask.SIGNAL: self._signal,
            Ask.RESIZE: self._resize,
            Ask.READ: self._read,
            Ask.WRITE: self._write,
            Ask.STAT: self._stat,
            Ask.LIST: self._list,
            Ask.MOVE: self._move,
            Ask.REMOVE: self._remove,
            Ask.MKDIR: self._mkdir,
            Ask.WATCH: self._watch,
            Ask.SYNC: self._sync,
            Ask.QUIT: self._quit,
            Ask.CANCEL: self._cancel,
        }

    def serve(self) -> None:
        """Answer until the stream ends; then end all that was started."""
        wake_read, wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            signal.signal(number, signal.SIG_DFL)  # what is started here inherits no one's choices
        if os.getpid() != 1:  # whoever started it has died, or says so: end with all that runs here
            signal.signal(signal.SIGTERM, lambda *_: self._loop.stop())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

        def child_ended() -> None:
            os.read(wake_read, 4096)
            self._collect()

        self._loop.watch(wake_read, child_ended)
        self._stream.flush()
        try:
            self._loop.run()
            self._stream.flush()
        except (OSError, ProtocolError):
            return  # the stream is closed with the process
        finally:
            kill_since(os.getpid(), frozenset())

    def _serve_one(self, identity: int, kind: int, body: bytes) -> None:
        serve = self._asks.get(kind)
        if serve is None:
            raise ProtocolError(f"unknown kind {kind}")
        if len(self._waiting) >= _MAX_WAITING:
            self._stream.fail(identity, OSError(errno.EAGAIN, "too many asks are outstanding"))
            return
        try:
            serve(identity, Reader(body))
        except OSError as error:
            self._stream.fail(identity, error)
        except (RecursionError, MemoryError, ValueError) as error:
            if isinstance(error, ProtocolError):
                raise
            self._stream.fail(identity, OSError(errno.EINVAL, f"{type(error).__name__}: {error}"))

    def _collect(self) -> None:
        for pid, code in reap().items():
            if not self._shell.ended(pid, code):
                self._processes.ended(pid, code)

    # What it is asked

    def _init(self, identity: int, fields: Reader) -> None:
        # The name, the entropy and the clock are the kernel's, which is not this agent's own: the backend sees to them.
        _, _, values, _ = fields.data(), fields.data(), fields.items(), fields.i64()
        fields.end()
        for value in values:
            key, _, content = os.fsdecode(value).partition("=")
            self._env[key] = content
        self._stream.answer(identity, Writer().u32(VERSION).u32(os.getpid()).body())

    def _run_shell(self, identity: int, fields: Reader) -> None:
        limit, count = fields.u32(), fields.u32()
        if count > _MAX_COMMANDS or not 2 <= limit <= _MAX_LIMIT:
            raise OSError(
                errno.EINVAL, f"a turn holds up to {_MAX_COMMANDS} commands with outputs of 2 to {_MAX_LIMIT} bytes"
            )
        commands = [(fields.data(), fields.u32() / 1000) for _ in range(count)]
        fields.end()
        if any(b"\0" in command for command, _ in commands):
            raise OSError(errno.EINVAL, "a command holds a NUL")

        def answer(found: list[Ended] | OSError) -> None:
            self._waiting.pop(identity, None)
            if isinstance(found, OSError):
                self._stream.fail(identity, found)
                return
            body = Writer().u32(len(found))
            for each in found:
                body.i32(each.code).u8(each.timed_out | each.died << 1).u64(each.true_bytes)
                body.data(each.head).data(each.tail)
            self._stream.answer(identity, body.body())

        job = Job(commands, limit, answer)
        self._waiting[identity] = lambda: self._shell.cancel(job)
        self._shell.submit(job)

    def _start(self, identity: int, fields: Reader) -> None:
        argv, values, directory, flags = fields.items(), fields.items(), fields.data(), fields.u8()
        rows, columns, timeout_ms, ring = fields.u32(), fields.u32(), fields.u32(), fields.u32()
        fields.end()
        env = dict(self._env)
        for value in values:
            key, _, content = os.fsdecode(value).partition("=")
            env[key] = content
        process = self._processes.start(argv, env, os.fsdecode(directory), flags, (rows, columns), timeout_ms, ring)
        self._stream.answer(identity, Writer().u32(process.number).u32(process.pid).body())

    def _output(self, identity: int, fields: Reader) -> None:
        number, channel, offset = fields.u32(), fields.u8(), fields.u64()
        at_most, wait_ms = fields.u32(), fields.u32()
        fields.end()
        process = self._processes.find(number)
        self._poll(
            identity, process, wait_ms, lambda late: write_output(process, channel, offset, at_most, even_nothing=late)
        )

    def _wait(self, identity: int, fields: Reader) -> None:
        number, wait_ms = fields.u32(), fields.u32()
        fields.end()
        process = self._processes.find(number)

        def state(late: bool) -> bytes | None:
            if process.running and not late:
                return None
            body = Writer()
            process.write_state(body)
            return body.body()

        self._poll(identity, process, wait_ms, state)

    def _poll(self, identity: int, process: Process, wait_ms: int, look: Callable[[bool], bytes | None]) -> None:
        """Answer once there is something to tell, or with what there is after wait_ms."""
        body = look(wait_ms == 0)
        if body is not None:
            self._stream.answer(identity, body)
            return
        timer: Timer

        def end() -> None:
            timer.cancel()
            process.wakes.remove(wake)
            self._waiting.pop(identity, None)

        def wake(late: bool = False) -> None:
            body = look(late)
            if body is not None:
                end()
                self._stream.answer(identity, body)

        timer = self._loop.after(wait_ms / 1000, lambda: wake(late=True))
        process.wakes.append(wake)
        self._waiting[identity] = end

    def _list_processes(self, identity: int, fields: Reader) -> None:
        fields.end()
        known = list(self._processes.all())
        body = Writer().u32(len(known))
        for process in known:
            process.write_state(body)
        self._stream.answer(identity, body.body())

    def _stdin(self, identity: int, fields: Reader) -> None:
        process, data = self._processes.find(fields.u32()), fields.data()
        fields.end()
        self._stream.answer(identity, Writer().u32(self._processes.write(process, data)).body())

    def _close_stdin(self, identity: int, fields: Reader) -> None:
        process = self._processes.find(fields.u32())
        fields.end()
        self._processes.close_stdin(process)
        self._stream.answer(identity)

    def _signal(self, identity: int, fields: Reader) -> None:
        process, number, tree = self._processes.find(fields.u32()), fields.u32(), fields.u8()
        fields.end()
        self._processes.signal(process, number, bool(tree))
        self._stream.answer(identity)

    def _resize(self, identity: int, fields: Reader) -> None:
        process, rows, columns = self._processes.find(fields.u32()), fields.u32(), fields.u32()
        fields.end()
        self._processes.resize(process, rows, columns)
        self._stream.answer(identity)

    def _read(self, identity: int, fields: Reader) -> None:
        path, offset, at_most = _path(fields), fields.u64(), fields.u32()
        fields.end()
        self._stream.answer(identity, self._files.read(path, offset, at_most))

    def _write(self, identity: int, fields: Reader) -> None:
        path, flags, mode, offset, data = _path(fields), fields.u8(), fields.u32(), fields.u64(), fields.data()
        fields.end()
        self._stream.answer(identity, self._files.write(identity, path, flags, mode, offset, data))

    def _stat(self, identity: int, fields: Reader) -> None:
        path, follow = _path(fields), fields.u8()
        fields.end()
        self._stream.answer(identity, self._files.stat(path, bool(follow)))

    def _list(self, identity: int, fields: Reader) -> None:
        path, depth, limit, flags = _path(fields), fields.u32(), fields.u32(), fields.u8()
        fields.end()
        for part, truncated in self._files.entries(path, depth, limit, flags):
            if part:
                self._stream.answer(identity, part, Answer.PART)
            else:
                self._stream.answer(identity, Writer().u8(truncated).body())

    def _move(self, identity: int, fields: Reader) -> None:
        source, target, overwrite = _path(fields), _path(fields), fields.u8()
        fields.end()
        self._stream.answer(identity, self._files.move(source, target, bool(overwrite)))

    def _remove(self, identity: int, fields: Reader) -> None:
        path, recursive = _path(fields), fields.u8()
        fields.end()
        self._files.remove(path, bool(recursive))
        self._stream.answer(identity)

    def _mkdir(self, identity: int, fields: Reader) -> None:
        path, parents = _path(fields), fields.u8()
        fields.end()
        self._stream.answer(identity, self._files.mkdir(path, bool(parents)))

    def _watch(self, identity: int, fields: Reader) -> None:
        path, recursive = _path(fields), fields.u8()
        fields.end()
        watch = Watch(
            self._loop, self._workspace, path, bool(recursive), lambda part: self._tell_change(identity, part)
        )
        self._waiting[identity] = watch.close

    def _tell_change(self, identity: int, part: bytes) -> None:
        if not self._stream.crowded:  # else the server does not read: what nobody takes is lost
            self._stream.answer(identity, part, Answer.PART)

    def _sync(self, identity: int, fields: Reader) -> None:
        fields.end()
        self._files.sync()
        self._stream.answer(identity)

    def _quit(self, identity: int, fields: Reader) -> None:
        fields.end()
        self._stream.answer(identity)
        self._loop.stop()

    def _cancel(self, identity: int, fields: Reader) -> None:
        other = fields.u32()
        fields.end()
        self._files.drop(other)
        cancel = self._waiting.pop(other, None)
        if cancel is not None:
            cancel()
            self._stream.fail(other, OSError(errno.ECANCELED, os.strerror(errno.ECANCELED)))
        self._stream.answer(identity)


def refuse(sock: socket.socket, error: BaseException) -> None:
    """Answer the first ask that came, or will come, with the reason why there is no agent."""
    words = f"{type(error).__name__}: {error}".encode(errors="replace")[:1024]
    body = Writer().u32(getattr(error, "errno", None) or errno.EIO).data(words).body()
    try:
        sock.sendall(HEAD.pack(len(body) + 5, 1, Answer.ERROR) + body)
    except OSError:
        pass  # the server has gone too


def _path(fields: Reader) -> str:
    data = fields.data()
    if b"\0" in data:
        raise OSError(errno.EINVAL, "a path holds a NUL")
    return os.fsdecode(data)
