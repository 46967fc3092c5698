"""`python -m envd audit FILE --key-file KEY`: whether a signed audit log is whole and unchanged."""

from __future__ import annotations

import argparse
import hmac
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from contracts.errors import ConfigError, describe
from contracts.rpc.connecting import read_key
from envd.server.audit import SIGNED, signature

_MOST = 20
"""Maximum number of faults to print."""


@dataclass
class Found:
    """What the files of an audit log say."""

    numbers: list[int] = field(default_factory=list)
    """Of the events whose signature is right."""
    faults: list[str] = field(default_factory=list)
    lost: int = 0
    """Lines that the server itself reported as lost."""


def run_audit_check(argv: Sequence[str]) -> int:
    """Run the command and return its exit code: 1 for a log that was changed or can't be read."""
    parser = argparse.ArgumentParser(
        prog="python -m envd audit",
        description="Check a signed audit log with its rotated files and its trail of calls: each line's signature, and"
        " that no number is missing. What lacks at the ends, where rotation removes lines too, shows only in the first"
        " and the last number.",
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
    print(f"{len(found.numbers)} signed events{said}; {found.lost} lost by a full disk; {len(found.faults)} faults")
    return 1 if found.faults else 0


def check_audit_log(path: Path, key: bytes) -> Found:
    """Check FILE, FILE.calls and what was rotated of both. Raises ConfigError where one can't be read or is absent."""
    found = Found()
    for file in _files(path):
        try:
            lines = file.read_bytes().split(b"\n")
        except OSError as error:
            raise ConfigError(f"the audit log can't be read: {describe(error)}") from error
        for place, line in enumerate(lines, 1):
            if line:
                _check(line, f"{file.name}:{place}", key, found)
    found.numbers.sort()
    missing = [
        (low + 1, high - 1) for low, high in zip(found.numbers, found.numbers[1:], strict=False) if high > low + 1
    ]
    if sum(high - low + 1 for low, high in missing) > found.lost:
        found.faults += [f"events {low} to {high} are missing" for low, high in missing]
    if len(set(found.numbers)) < len(found.numbers):
        found.faults.append("numbers are there twice: lines were copied")
    return found


def _check(line: bytes, where: str, key: bytes, found: Found) -> None:
    before, _, given = line.rpartition(SIGNED.partition(b"%s")[0])
    try:
        event = json.loads(line)
    except ValueError:
        return  # a killed server's last line, whose number the next line has; else it is missing
    if not before or not hmac.compare_digest(given, signature(key, before) + b'"}'):
        found.faults.append(f"{where}: the signature is wrong")
        return
    found.numbers.append(event["number"])
    if event["kind"] == "audit.lost":
        found.lost += event["detail"]["count"]


def _files(path: Path) -> Iterator[Path]:
    if not path.is_file():
        raise ConfigError(f"{path} is not a file: name that of --audit-log")
    for each in (path, path.with_name(f"{path.name}.calls")):
        if each.is_file():
            yield each
        yield from sorted(each.parent.glob(f"{each.name}.[0-9]*"))
