"""The agent under the sanitizers, which tells what code each input reached; inputs go in as connections of a server."""

from __future__ import annotations

import mmap
import select
import shutil
import socket
import subprocess
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np

from envd.guest.escape import Escape
from envd.guest.protocol import HEAD, MAX_FRAME, Answer, Ask
from envd.native import build
from tests.fuzz.mutation import Mutator
from tests.fuzz.recording import SESSIONS, Frame, frames_of, record

HERE = Path(__file__).resolve().parent
CELLS = 65536
_HANGS_S = 30.0
_LINGER_S = 0.03
_CORPUS = 4000
_CLEAN_EVERY = 200
_ANSWERS = frozenset(map(int, Answer))


class Finding(Exception):
    """An input that a program did not stand; the message says how."""


def build_agent(directory: Path, sources: Path = build.SOURCES) -> Path:
    """Compile the agent as it is fuzzed. sources: where its own files are. Raises BuildError."""
    compiler = build.find_compiler(directory)
    ours = [HERE / f"{name}.c" for name in ("agent", "coverage", "options")]
    files = [*sorted(sources.glob("guest*.c")), *ours]
    flags = [*build.sanitize_flags(compiler), "-fsanitize-coverage=trace-pc", f"-I{sources}", "-Wl,--wrap=launch"]
    program = directory / "fuzz-agent"
    build.compile_program(compiler, program.name, files, program, flags)
    return program


class AgentTarget:
    """One agent that is fuzzed."""

    def __init__(self, program: Path, directory: Path, seed: int, *, escaped: bool) -> None:
        """directory: on a tmpfs, for its workspace; everything in there is thrown away."""
        self.name = "agent, escaped" if escaped else "agent"
        self.inputs = 0
        self._escaped, self._directory = escaped, directory
        self._last: deque[bytes] = deque(maxlen=20)
        self._workspace = directory / "workspace"
        self._workspace.mkdir(parents=True)
        self._mutator = Mutator(seed, tuple(map(int, Ask)))
        self._corpus: list[list[Frame]] = [list(frames_of(record(session)[0])) for session in SESSIONS]
        self.seeds = len(self._corpus)
        (directory / "cells").write_bytes(bytes(CELLS))
        with (directory / "cells").open("r+b") as file:
            self._cells = np.frombuffer(mmap.mmap(file.fileno(), CELLS), dtype=np.uint8)
        self._seen = np.zeros(CELLS, dtype=np.uint8)
        self._log = (directory / "stderr").open("w+b")
        self._program = program
        self._process = self._start()

    @property
    def reached(self) -> int:
        """How many cells of its code have run."""
        return int(self._seen.sum())

    @property
    def corpus(self) -> int:
        """How many streams it holds that reached something new, seeds included."""
        return len(self._corpus)

    def _start(self) -> subprocess.Popen[bytes]:
        path = self._directory / "socket"
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            listener.listen(8)
            mode = "escaped" if self._escaped else "plain"
            return subprocess.Popen(
                [self._program, str(listener.fileno()), mode, self._directory, self._directory / "cells"],
                pass_fds=[listener.fileno()],
                stderr=self._log,
                env={"PATH": "/usr/bin:/bin", "ASAN_OPTIONS": f"log_path={self._directory / 'report'}"},
                start_new_session=True,
            )

    def step(self) -> None:
        """Try one input. Raises Finding."""
        frames = self._mutator.frames(self._corpus)
        self.attempt(self._mutator.stream(frames))
        new = self._cells & ~self._seen & 1
        if new.any():
            self._seen |= self._cells
            if frames and len(self._corpus) < _CORPUS:
                self._corpus.append(frames)
        if self.inputs % _CLEAN_EVERY == 0:
            self._clean()

    def attempt(self, stream: bytes) -> None:
        """Send one stream and read what comes of it. Raises Finding, which holds it as it was sent."""
        self.inputs += 1
        linger_s = _LINGER_S if self._mutator.chance.random() < 0.05 else 0.0
        escape = Escape() if self._escaped else None
        data = stream if escape is None else escape.reset + escape.encode(stream)
        if escape is not None and self._mutator.chance.random() < 0.05:
            data = self._mutator.bytes(data)
        self._last.append(data)
        try:
            answers = _converse(self._directory / "socket", data, linger_s)
        except TimeoutError:
            raise self._finding("hangs") from None
        except OSError:
            answers = b""  # it has gone, or closed before it was told everything
        if self._process.poll() is not None:
            raise self._finding(f"ended with code {self._process.returncode}")
        if any(self._directory.glob("report*")):
            raise self._finding("reports an error in one of its children")
        if escape is None and not _well_formed(answers):
            raise self._finding(f"answers what is no frame: {answers[:200].hex()}")

    def stop(self) -> None:
        """End it."""
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _clean(self) -> None:
        for path in self._workspace.iterdir():
            (
                shutil.rmtree(path, ignore_errors=True)
                if path.is_dir() and not path.is_symlink()
                else path.unlink(missing_ok=True)
            )

    def _finding(self, how: str) -> Finding:
        kept = Path(tempfile.mkdtemp(prefix="fuzz-finding-"))
        for number, each in enumerate(self._last):
            (kept / f"input-{number:02}").write_bytes(each)
        self._log.seek(0)
        reports = [path.read_text(errors="replace") for path in self._directory.glob("report*")]
        words = "\n".join([self._log.read().decode(errors="replace"), *reports])
        return Finding(
            f"the {self.name} {how}\n{words}\nThe last inputs are in {kept}, the latest has the highest number."
        )


def _converse(path: Path, data: bytes, linger_s: float) -> bytes:
    """Send, and read until the agent closes. linger_s: how long to wait before saying that no more comes.

    Raises TimeoutError, OSError.
    """
    answers = bytearray()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(_HANGS_S)
        sock.connect(str(path))
        sock.setblocking(False)
        left = memoryview(data)
        while left:  # read meanwhile: an agent that nobody listens to reads no more
            readable, writable, _ = select.select([sock], [sock], [], _HANGS_S)
            if not readable and not writable:
                raise TimeoutError
            if readable and not _receive(sock, answers):
                return bytes(answers)
            if writable:
                left = left[sock.send(left[: 1 << 16]) :]
        until = time.monotonic() + linger_s
        while (patience_s := until - time.monotonic()) > 0:
            if select.select([sock], [], [], patience_s)[0] and not _receive(sock, answers):
                return bytes(answers)
        sock.shutdown(socket.SHUT_WR)
        while select.select([sock], [], [], _HANGS_S)[0]:
            if not _receive(sock, answers):
                return bytes(answers)
    raise TimeoutError


def _receive(sock: socket.socket, into: bytearray) -> bool:
    """Read what is there; False at the end."""
    more = sock.recv(1 << 20)
    into += more
    return bool(more)


def _well_formed(answers: bytes) -> bool:
    """Whether these are frames that a server takes; the last may be cut."""
    at = 0
    while at + HEAD.size <= len(answers):
        size, identity, kind = HEAD.unpack_from(answers, at)
        if not HEAD.size - 4 <= size <= MAX_FRAME or identity == 0 or kind not in _ANSWERS:
            return False
        at += 4 + size
    return True
