"""Compiles envd's C programs into envd/native/bin: `python -m envd.native.build [--sanitize]`.

envd-guest is main*.c and guest*.c, envd-spawn is spawn*.c and guest*.c; both are static. The compiler is $CC, else the
system's (cc, gcc, clang), else `ziglang` from PyPI. Nothing is compiled when sources and flags are the same as last
time.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
BINARIES = SOURCES / "bin"
"""Where the programs are; the sanitized ones are in `sanitize` below it."""
PARTS = {"envd-guest": ("main", "guest"), "envd-spawn": ("spawn", "guest")}
"""Beginnings of the names of each program's sources."""
_STAMP = "built-from"
_SYSTEM = ("cc", "gcc", "clang")
_WARNINGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wvla", "-Wshadow", "-Wstrict-prototypes")
_RELEASE = ("-O2", "-g0", "-fPIE", "-fno-plt", "-ffunction-sections", "-fdata-sections", "-fstack-protector-strong")
_HARDENING = ("-fstack-clash-protection", "-fcf-protection=full", "-mbranch-protection=standard")
"""Each is used where the compiler knows it for this machine."""
_FORTIFY = ("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=3"), ("-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2")
"""The first that the compiler and its C library know. Musl, which ziglang links, has none and ignores it."""
_LINK = ("-Wl,--gc-sections", "-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack")
_SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_PROBE = '#include <stdio.h>\n#include <string.h>\nint main(void) { char to[8]; puts(strcpy(to, "x")); return 0; }\n'


class BuildError(Exception):
    """The programs can't be compiled here; the message says why in one line."""


@dataclass(frozen=True)
class Compiler:
    """A C compiler: its command line, and how it links a static program that is loaded anywhere."""

    command: tuple[str, ...]
    static: tuple[str, ...] = ("-static-pie",)
    environment: Mapping[str, str] = field(default_factory=dict)
    """Beside the process's own."""

    def run(self, arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Run it to its end."""
        environment = {**os.environ, **self.environment}
        command = [*self.command, *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    def knows(self, flags: Sequence[str]) -> bool:
        """Whether it compiles a small program with these flags without a warning."""
        with tempfile.TemporaryDirectory() as directory:
            source, target = Path(directory, "probe.c"), Path(directory, "probe.o")
            source.write_text(_PROBE)
            return self.run(["-O2", "-Werror", *flags, "-c", str(source), "-o", str(target)]).returncode == 0


def fingerprint(name: str) -> str:
    """Of a program's sources and the flags."""
    digest = hashlib.sha256(repr((_WARNINGS, _RELEASE, _HARDENING, _FORTIFY, _LINK, _SANITIZE)).encode())
    for path in sorted([*sources(name), *_headers(name)]):
        content = path.read_bytes()
        digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def recorded_fingerprint(name: str, directory: Path) -> str:
    """Of what the program in `directory` was built from; empty where there is none."""
    try:
        return (directory / f"{name}.{_STAMP}").read_text() if (directory / name).exists() else ""
    except OSError:
        return ""


def sources(name: str) -> list[Path]:
    """A program's source files."""
    return sorted(path for path in SOURCES.glob("*.c") if path.name.startswith(PARTS[name]))


def _headers(name: str) -> list[Path]:
    others = {part for parts in PARTS.values() for part in parts} - {*PARTS[name]}
    return [path for path in SOURCES.glob("*.h") if not path.name.startswith(tuple(others))]


def build(directory: Path = BINARIES, *, sanitize: bool = False) -> list[Path]:
    """Compile what changed and return the programs' paths. Raises BuildError."""
    if sanitize:
        directory = directory / "sanitize"
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock, tempfile.TemporaryDirectory(dir=directory) as work:
        fcntl.flock(lock, fcntl.LOCK_EX)
        stale = [name for name in PARTS if recorded_fingerprint(name, directory) != fingerprint(name)]
        if stale:
            compiler = find_compiler(Path(work))
            flags = sanitize_flags(compiler) if sanitize else _release_flags(compiler)
            for name in stale:
                now = fingerprint(name)
                compile_program(compiler, name, sources(name), Path(work) / name, flags)
                (directory / f"{name}.{_STAMP}").unlink(missing_ok=True)
                (Path(work) / name).replace(directory / name)
                (directory / f"{name}.{_STAMP}").write_text(now)
    return [directory / name for name in PARTS]


def find_compiler(cache: Path) -> Compiler:
    """$CC, else the system's compiler, else ziglang, which keeps what it compiles of its C library in `cache`.

    Raises BuildError.
    """
    chosen = shlex.split(os.environ.get("CC", ""))
    if chosen:
        if shutil.which(chosen[0]) is None:
            raise BuildError(f"envd's C programs are not built: CC names {chosen[0]!r}, which is not in PATH")
        return Compiler(tuple(chosen))
    for name in _SYSTEM:
        if shutil.which(name) is not None:
            return Compiler((name,))
    if importlib.util.find_spec("ziglang") is None:
        raise BuildError(
            "envd's C programs are not built: there is no C compiler. Install one (Debian: apt-get install gcc"
            f" libc6-dev) or run `{sys.executable} -m pip install ziglang`"
        )
    target = f"{platform.machine()}-linux-musl"
    kept = {"ZIG_GLOBAL_CACHE_DIR": str(cache / "zig"), "ZIG_LOCAL_CACHE_DIR": str(cache / "zig")}
    return Compiler((sys.executable, "-m", "ziglang", "cc", "-target", target), ("-static", "-pie"), kept)


def _release_flags(compiler: Compiler) -> list[str]:
    known = [flag for flag in _HARDENING if compiler.knows([flag])]
    fortified = next((flags for flags in _FORTIFY if compiler.knows(flags)), ())
    return [*_RELEASE, *known, *fortified, *compiler.static]


def sanitize_flags(compiler: Compiler) -> list[str]:
    """Of AddressSanitizer and UBSan. Raises BuildError where the compiler has no runtime of theirs."""
    if "ziglang" in compiler.command:
        raise BuildError(
            "ziglang has no AddressSanitizer: install gcc or clang (Debian: apt-get install gcc libc6-dev)"
        )
    return [*_SANITIZE]


def compile_program(compiler: Compiler, name: str, files: Sequence[Path], target: Path, flags: Sequence[str]) -> None:
    """Compile and link. Raises BuildError with the compiler's first error; the rest goes to standard error."""
    done = compiler.run([*_WARNINGS, *flags, *map(str, files), *_LINK, "-o", str(target)])
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        first = next((line for line in done.stderr.splitlines() if "error" in line), f"code {done.returncode}")
        raise BuildError(f"{' '.join(compiler.command)} can't compile {name}: {first.strip()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m envd.native.build", description="Compile envd's C programs.")
    parser.add_argument(
        "--sanitize", action="store_true", help="with AddressSanitizer and UBSan, into bin/sanitize, for tests"
    )
    try:
        built = build(sanitize=parser.parse_args(arguments).sanitize)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 1
    for path in built:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
