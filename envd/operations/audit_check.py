"""`python -m envd audit FILE --key-file KEY`: whether a signed audit log is whole and unchanged."""

from __future__ import annotations

import argparse
import hmac
import json
import math
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO

from contracts.errors import ConfigError, describe
from contracts.rpc.connecting import read_key
from envd.server.audit import FILES, SIGNED, signature

_MOST = 20
"""Maximum number of faults to print."""


@dataclass
class Found:
    """What the files of an audit log say."""

    numbers: list[int] = field(default_factory=list)
    """Of the events whose signature is right, sorted."""
    unsigned: dict[str, float] = field(default_factory=dict)
    """Numbers, by place, of the lines from before the log was signed, which anybody may have changed."""
    whole_from: int = 0
    """Number from which on none may be missing: rotation has removed older ones of FILE or of the trail."""
    faults: list[str] = field(default_factory=list)
    lost: int = 0
    """Lines that the server itself reported as lost."""


def run_audit_check(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 1 for a log that was changed or can't be read."""
    parser = argparse.ArgumentParser(
        prog="python -m envd audit",
        description="Check a signed audit log with its rotated files and its trail of calls: each line's signature, and"
        " that no number is missing. What lacks at the ends, where rotation removes lines too, shows only in the first"
        " and the last number, and what was changed before the log was signed does not show.",
    )
    parser.add_argument("file", type=Path, help="the file of --audit-log")
    parser.add_argument("--key-file", type=Path, required=True, metavar="FILE", help="the file of --audit-key")
    arguments = parser.parse_args(argv)
    try:
        found = check_audit_log(arguments.file, read_key(arguments.key_file).encode())
    except ConfigError as error:
        print(f"envd: {error}", file=sys.stderr)
        return 1
    for fault in found.faults[:_MOST]:
        print(f"envd: {fault}", file=sys.stderr)
    if len(found.faults) > _MOST:
        print(f"envd: and {len(found.faults) - _MOST} more", file=sys.stderr)
    said = f", numbers {found.numbers[0]} to {found.numbers[-1]}" if found.numbers else ""
    said += f", all from {found.whole_from} on" if found.whole_from > min(found.numbers, default=0) else ""
    said += f"; {len(found.unsigned)} lines before these are not signed" if found.unsigned else ""
    print(f"{len(found.numbers)} signed events{said}; {found.lost} lost by a full disk; {len(found.faults)} faults")
    return 1 if found.faults else 0


def check_audit_log(path: Path, key: bytes) -> Found:
    """Check FILE, FILE.calls and what was rotated of both. Raises ConfigError where one can't be read or is absent.

    A log with faults is read once more, up to its last number: a server may write while the files are read in turn.
    """
    found = _read(path, key)
    return _read(path, key, found.numbers[-1]) if found.faults and found.numbers else found


def _read(path: Path, key: bytes, last: float = math.inf) -> Found:
    """What the files say. last: number up to which all events must be there."""
    if not path.is_file():
        raise ConfigError(f"{path} is not a file: name that of --audit-log")
    found = Found()
    try:
        with ExitStack() as opened:
            for files in [_opened(each, opened) for each in (path, path.with_name(f"{path.name}.calls"))]:
                numbers: list[int] = []
                for name, file in reversed(files):
                    for place, line in enumerate(file.read().split(b"\n"), 1):
                        if line:
                            _check(line, f"{name}:{place}", key, numbers, found)
                if numbers and files[-1][0].endswith(f".{FILES - 1}"):  # a rotation may have removed older ones
                    found.whole_from = max(found.whole_from, min(numbers))
                found.numbers += numbers
    except OSError as error:
        raise ConfigError(f"the audit log can't be read: {describe(error)}") from error
    found.numbers.sort()
    missing = [
        (low + 1, high - 1)
        for low, high in pairwise(found.numbers)
        if found.whole_from <= low and low + 1 < high <= last
    ]
    if sum(high - low + 1 for low, high in missing) > found.lost:
        found.faults += [f"events {low} to {high} are missing" for low, high in missing]
    if len(set(found.numbers)) < len(found.numbers):
        found.faults.append("numbers are there twice: lines were copied")
    signed = found.numbers[0] if found.numbers else 0
    found.faults += [f"{where}: the line is not signed" for where, number in found.unsigned.items() if number >= signed]
    found.unsigned = {where: number for where, number in found.unsigned.items() if number < signed}
    return found


def _opened(path: Path, stack: ExitStack) -> list[tuple[str, BinaryIO]]:
    """Names and files of one log, newest first, so that a rotation meanwhile hides none; closed by the stack."""
    files = list[tuple[str, BinaryIO]]()
    for each in (path, *(path.with_name(f"{path.name}.{number}") for number in range(1, FILES))):
        with suppress(FileNotFoundError):
            files.append((each.name, stack.enter_context(each.open("rb"))))
    return files


def _check(line: bytes, where: str, key: bytes, numbers: list[int], found: Found) -> None:
    """Add a line to what was found. numbers: of the signed events before it in its log."""
    try:
        event = json.loads(line)
    except ValueError:
        return  # a killed server's last line, whose number the next line has; else it is missing
    if not isinstance(event, dict) or "hmac" not in event:
        number = event.get("number") if isinstance(event, dict) and not numbers else None
        found.unsigned[where] = number if isinstance(number, int) else math.inf
        return
    before, _, given = line.rpartition(SIGNED.partition(b"%s")[0])
    if not hmac.compare_digest(given, signature(key, before) + b'"}'):
        found.faults.append(f"{where}: the signature is wrong")
        return
    numbers.append(event["number"])
    if event["kind"] == "audit.lost":
        found.lost += event["detail"]["count"]
