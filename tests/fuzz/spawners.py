"""The spawner under the sanitizers; inputs are datagrams of its control connection, with descriptors or without."""

from __future__ import annotations

import os
import secrets
import select
import shutil
import socket
import struct
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from contracts.owned import owned_name
from envd.native import build
from envd.sandbox.cgroups import OWNED, remove_groups
from envd.sandbox.linux import sandbox_owner
from tests.fuzz.agents import HERE, Finding
from tests.fuzz.mutation import Mutator

_REQUEST = struct.Struct("<IIQQIIII96s96s96s")
_REPORT = struct.Struct("<IIq240s")
_CREATE, _KILL, _ARCHIVE, _LEAVE = 1, 2, 3, 4
_READY, _ENDED = 1, 4
_FLAGS = (0, 0, 0, 1, 2, 4, 8, 9, 15, 16, 0xFFFFFFFF)
_FOUND_BY_SANITIZER = 99
_MOST_LIVE = 24
_MIB = 1 << 20
_NAMES = (
    b"template",
    b"template",
    b"template",
    b"",
    b".",
    b"..",
    b"a/b",
    b"x" * 95,
    b"x" * 96,
    b"none",
    b"te\0mp",
    b"\xff",
)


def build_spawner(directory: Path) -> Path:
    """Compile the spawner as it is fuzzed. Raises BuildError."""
    compiler = build.find_compiler(directory)
    program = directory / "fuzz-spawn"
    files = [*build.sources("envd-spawn"), HERE / "options.c"]
    build.compile_program(compiler, program.name, files, program, build.sanitize_flags(compiler))
    return program


class SpawnerTarget:
    """One spawner that is fuzzed. Raises BackendUnavailable's words as RuntimeError where namespaces do not work."""

    name = "spawner"

    def __init__(self, program: Path, seed: int) -> None:
        self.inputs = self.started = 0
        self._mutator = Mutator(seed, ())
        self._run_dir = Path("/tmp", f"{OWNED}{owned_name()}")
        template = self._run_dir / "templates/template"
        template.mkdir(parents=True)
        self._run_dir.chmod(0o711)
        (template / "f").write_text("x\n")
        for path in (template, template / "f"):
            os.chown(path, sandbox_owner(), sandbox_owner())
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._log = (self._run_dir / "stderr").open("w+b")
        module = [sys.executable, "-m", "envd.sandbox.spawner"]
        with theirs:
            command = [
                *module,
                str(theirs.fileno()),
                str(self._run_dir),
                f"{self._run_dir.name}-fuzz",
                str(program),
                "4",
            ]
            self._process = subprocess.Popen(
                command, pass_fds=[theirs.fileno()], stderr=self._log, start_new_session=True, cwd=HERE.parents[1]
            )
        self._control.settimeout(60)
        if len(hello := self._control.recv(_REPORT.size)) != _REPORT.size or _REPORT.unpack(hello)[0] != _READY:
            raise RuntimeError(f"the spawner does not start: {self._words()}")
        self._control.settimeout(30)
        self._streams: dict[int, socket.socket] = {}
        self._number = 0

    def step(self) -> None:
        """Send one datagram and hear what there is to hear. Raises Finding."""
        self.inputs += 1
        chance = self._mutator.chance
        data = self._request()
        if chance.random() < 0.2:
            data = self._mutator.bytes(data)
        if len(data) >= 4 and struct.unpack_from("<I", data)[0] == _LEAVE:
            return  # it would do that
        ours, theirs = socket.socketpair()
        with theirs, open("/dev/null", "r+b") as null, Path("/proc/self/cmdline").open("rb") as archive:  # noqa: PTH123
            fds = [[], [theirs.fileno()], [theirs.fileno()], [null.fileno()], [theirs.fileno(), archive.fileno()]]
            self._talk(data, chance.choice(fds))
        self._streams[self._number] = ours
        while len(self._streams) > _MOST_LIVE:
            self._end(min(self._streams))
        while self._hear(wait=False):
            continue

    def settle(self) -> None:
        """End all sandboxes and wait until it says of each that it has ended. Raises Finding."""
        for number in list(self._streams):
            self._end(number)
        self._number += 1
        # not known: answered at once, after all that was asked before
        self._talk(_REQUEST.pack(_KILL, self._number, 0, 0, 0, 0, 0, 0, b"", b"", b""), [])
        while self._hear(wait=True) != (_ENDED, self._number):
            continue

    def stop(self) -> None:
        """End it and remove all that is its own."""
        self._control.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        self._process.kill()
        self._process.wait()
        self._log.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)
        remove_groups(self._run_dir.name)

    def _request(self) -> bytes:
        chance, number = self._mutator.chance, self._mutator.number
        self._number += 1
        kind = chance.choice((_CREATE, _CREATE, _CREATE, _KILL, _ARCHIVE, 0, 5, number()))
        box = self._number if kind == _CREATE or chance.random() < 0.3 else self._number - chance.randrange(30)
        usual = (64 * _MIB, 16 * _MIB, 64, 100_000, 256)
        memory, disk, *others = (
            usual if chance.random() < 0.6 else [chance.choice((each, number(each))) for each in usual]
        )
        wide = chance.choice((1, 1, 1, 1 << 32, secrets.randbelow(1 << 30)))
        names = [chance.choice(_NAMES), chance.choice(_NAMES), chance.choice((b"", *_NAMES))]
        flags = chance.choice(_FLAGS)
        return _REQUEST.pack(
            kind, box & 0xFFFFFFFF, memory * wide & (1 << 64) - 1, disk * wide & (1 << 64) - 1, *others, flags, *names
        )

    def _end(self, number: int) -> None:
        self._streams.pop(number).close()
        self._talk(_REQUEST.pack(_KILL, number, 0, 0, 0, 0, 0, 0, b"", b"", b""), [])

    def _talk(self, data: bytes, fds: list[int]) -> None:
        try:
            socket.send_fds(self._control, [data or b"\0"], fds)
        except OSError as error:
            raise self._finding(f"does not take {data.hex()} ({error})") from None

    def _hear(self, *, wait: bool) -> tuple[int, int] | None:
        """Kind and number of what it says next; None where it says nothing."""
        if not wait and not select.select([self._control], [], [], 0)[0]:
            return None
        try:
            said = self._control.recv(1024)
        except OSError as error:
            raise self._finding(f"says nothing ({error})") from None
        if len(said) != _REPORT.size:
            raise self._finding(f"ended, or says {said.hex()}")
        kind, number, value, words = _REPORT.unpack(said)
        if b"\0" not in words or kind not in range(1, 7):
            raise self._finding(f"says {said.hex()}")
        self.started += kind == 2
        if kind == _ENDED and os.WIFEXITED(value) and os.WEXITSTATUS(value) == _FOUND_BY_SANITIZER:
            raise self._finding(f"has a sandbox whose process 1 ended by the sanitizer (number {number})")
        return kind, number

    def _finding(self, how: str) -> Finding:
        return Finding(f"the spawner {how}\n{self._words()}")

    def _words(self) -> str:
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(2)
        self._log.seek(0)
        return self._log.read().decode(errors="replace")
