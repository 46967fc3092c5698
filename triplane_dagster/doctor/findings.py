"""Define checks and run all of them at once."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Finding:
    """Result of a check. missing: not present, which may be acceptable. broken: present but unusable."""

    state: State
    found: str
    fix: str = ""
    """Required installation or action, unless the state is ok."""


@dataclass(frozen=True)
class Check:
    """One check and its name."""

    name: str
    needed_for: str
    look: Callable[[], Finding]
    """Performs the check. An exception is a finding, too."""
    required: bool = False
    """Whether the default quickstart can't run without it."""
    timeout_s: float = 30.0


def ok(found: str) -> Finding:
    """Finding that something works."""
    return Finding("ok", found)


def missing(found: str, fix: str) -> Finding:
    """Finding that something is not present."""
    return Finding("missing", found, fix)


def broken(found: str, fix: str) -> Finding:
    """Finding that something is present but does not work."""
    return Finding("broken", found, fix)


def make(checks: Sequence[Check]) -> list[tuple[Check, Finding]]:
    """Run all checks and return them with their findings, in the given order.

    All checks run concurrently; a check is abandoned at its deadline.
    """
    found: dict[int, Finding] = {}
    threads = []
    for place, check in enumerate(checks):
        thread = threading.Thread(target=_look, args=(check, found, place), name=check.name, daemon=True)
        thread.start()
        threads.append((thread, time.monotonic() + check.timeout_s))
    for thread, deadline in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    return [(check, found.get(place) or _late(check)) for place, check in enumerate(checks)]


def _look(check: Check, found: dict[int, Finding], place: int) -> None:
    try:
        found[place] = check.look()
    except subprocess.TimeoutExpired as error:
        found[place] = broken(f"no answer within {error.timeout:g} s", "find what blocks it, or run this again")
    except Exception as error:  # noqa: BLE001 - what a check raises is what it found
        found[place] = broken(one_line(f"{type(error).__name__}: {error}"), "see the message")


def _late(check: Check) -> Finding:
    return broken(f"no answer within {check.timeout_s:g} s", "find what blocks it, or run this again")


def one_line(text: str, limit: int = 240) -> str:
    """`text` without line breaks, cut to a length."""
    flat = " ".join(text.split())
    return flat if len(flat) <= limit else flat[: limit - 1] + "…"


@dataclass(frozen=True)
class Said:
    """Output of a program."""

    code: int
    out: str
    err: str

    @property
    def last_words(self) -> str:
        """Last line of output, on stdout or stderr."""
        lines = [*self.out.splitlines(), *self.err.splitlines()]
        return one_line(next((line for line in reversed(lines) if line.strip()), "no output"))


def ask(command: Sequence[str], timeout_s: float = 10.0, environment: Mapping[str, str] | None = None) -> Said:
    """Run a program to its end.

    Raises FileNotFoundError, or subprocess.TimeoutExpired after killing it and what it started.
    """
    if shutil.which(command[0]) is None:  # Popen raises PermissionError where a folder of PATH can't be read
        raise FileNotFoundError(command[0])
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env=None if environment is None else {**os.environ, **environment},
    )
    try:
        out, err = child.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise
    return Said(child.returncode, out, err)


def trial(name: str, *arguments: str, timeout_s: float) -> Said:
    """Run `triplane_dagster.doctor.trials.<name>` in a separate process."""
    return ask([sys.executable, "-m", f"triplane_dagster.doctor.trials.{name}", *arguments], timeout_s)


def version_of(program: str, *arguments: str, fix: str) -> Finding:
    """Version that a program prints, or a finding that it is missing."""
    try:
        said = ask([program, *arguments])
    except FileNotFoundError:
        return missing(f"no {program} in PATH", fix)
    first = one_line((said.out or said.err).strip().partition("\n")[0])
    return ok(first) if said.code == 0 else broken(f"{program} fails: {said.last_words}", fix)
