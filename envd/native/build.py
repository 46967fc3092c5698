"""Compiles envd's C programs into envd/native/bin: `python -m envd.native.build [--if-possible] [--sanitize]`.

envd-guest is every *.c but spawn*.c, envd-spawn every *.c but main*.c. Nothing is compiled when the sources are the same as last time.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
BINARIES = SOURCES / "bin"
"""Where the programs are; the sanitized ones are in `sanitize` below it."""
_STAMP = "built-from"
_WARNINGS = ("-std=c11", "-D_GNU_SOURCE", "-Wall", "-Wextra", "-Werror", "-Wvla", "-Wshadow", "-Wstrict-prototypes")
_RELEASE = ("-O2", "-g0", "-fno-plt", "-ffunction-sections", "-fdata-sections", "-fstack-protector-strong", "-static")
_LINK = ("-Wl,--gc-sections", "-Wl,-z,relro,-z,now", "-Wl,-z,noexecstack")
_SANITIZE = ("-O1", "-g", "-fno-omit-frame-pointer", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")


class BuildError(Exception):
    """The programs can't be compiled here; the message says why in one line."""


def fingerprint(name: str) -> str:
    """Of a program's sources and the flags."""
    digest = hashlib.sha256(repr((_WARNINGS, _RELEASE, _LINK, _SANITIZE)).encode())
    other = "spawn" if name == "envd-guest" else "main"
    for path in sorted([*programs().get(name, []), *SOURCES.glob("*.h")]):
        if not path.name.startswith(other):
            content = path.read_bytes()
            digest.update(f"{path.name} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def recorded_fingerprint(name: str, directory: Path = BINARIES) -> str:
    """Of what the program in `directory` was built from; empty where there is none."""
    try:
        return (directory / f"{name}.{_STAMP}").read_text() if (directory / name).exists() else ""
    except OSError:
        return ""


def programs() -> dict[str, list[Path]]:
    """The programs and their sources. A program whose own sources are not there is left out."""
    files = sorted(SOURCES.glob("*.c"))
    spawner = [path for path in files if not path.name.startswith("main")]
    guest = [path for path in files if not path.name.startswith("spawn")]
    found = {"envd-guest": guest, "envd-spawn": spawner}
    own = {"envd-guest": "main", "envd-spawn": "spawn"}
    return {name: paths for name, paths in found.items() if any(path.name.startswith(own[name]) for path in paths)}


def build(*, sanitize: bool = False) -> list[Path]:
    """Compile what changed and return the programs' paths. Raises BuildError."""
    directory = BINARIES / "sanitize" if sanitize else BINARIES
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for name, sources in programs().items():
            now = fingerprint(name)
            if recorded_fingerprint(name, directory) != now:
                with tempfile.TemporaryDirectory(dir=directory) as work:
                    _compile(name, sources, Path(work) / name, _SANITIZE if sanitize else _RELEASE)
                    (directory / f"{name}.{_STAMP}").unlink(missing_ok=True)
                    (Path(work) / name).replace(directory / name)
                (directory / f"{name}.{_STAMP}").write_text(now)
    return [directory / name for name in programs()]


def _compiler() -> list[str]:
    command = shlex.split(os.environ.get("CC", "")) or ["cc"]
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"envd's C programs are not built: there is no C compiler `{command[0]}` (Debian: apt-get install gcc libc6-dev); "
            "envd works without them, more slowly"
        )
    return command


def _compile(name: str, sources: Sequence[Path], target: Path, flags: Sequence[str]) -> None:
    compiler = _compiler()
    command = [*compiler, *_WARNINGS, *flags, *map(str, sources), *_LINK, "-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.stderr.write(done.stderr)
        first = next((line for line in done.stderr.splitlines() if "error" in line), f"code {done.returncode}")
        raise BuildError(f"{compiler[0]} can't compile {name}: {first.strip()}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Build; the process's exit code."""
    parser = argparse.ArgumentParser(prog="python -m envd.native.build", description="Compile envd's C programs.")
    parser.add_argument(
        "--if-possible", action="store_true", help="succeed, with a note, where there is no way to compile"
    )
    parser.add_argument(
        "--sanitize", action="store_true", help="with AddressSanitizer and UBSan, into bin/sanitize, for tests"
    )
    options = parser.parse_args(arguments)
    try:
        built = build(sanitize=options.sanitize)
    except BuildError as error:
        print(error, file=sys.stderr)
        return 0 if options.if_possible else 1
    for path in built:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
