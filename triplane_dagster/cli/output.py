"""Print tables, and JSON for programs."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from contracts.errors import ConfigError, describe
from contracts.owned import owned_name
from contracts.visible import visible, visible_json

Row = Mapping[str, Any]


def console() -> Console:
    """Console for tables. A narrow terminal wraps cells; a pipe gets wide lines."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=200)


def print_json(value: Any) -> None:
    """Print one JSON value on stdout."""
    print(visible_json(json.dumps(value, indent=1, ensure_ascii=False)))


def print_rows(rows: Sequence[Row], *, as_json: bool, title: str = "", empty: str = "nothing to show") -> None:
    """Print rows with equal keys. empty: text to print if there are none."""
    if as_json:
        print_json([dict(row) for row in rows])
    elif rows:
        console().print(table_of(rows, title=title))
    else:
        console().print(empty)


def table_of(rows: Sequence[Row], *, title: str = "") -> Table:
    """Build a table with the keys of the first row as its header."""
    table = Table(title=title or None, title_justify="left", header_style="bold")
    for name, value in rows[0].items():
        table.add_column(name, justify="right" if _is_number(value) else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(cell(value)) for value in row.values()))
    return table


def cell(value: Any) -> str:
    """Text of a value in a table."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:,.0f}"
    if isinstance(value, (list, tuple)):
        return ", ".join(cell(each) for each in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {cell(each)}" for name, each in value.items())
    return visible(str(value))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def write_page(target: Path, page: bytes) -> Path:
    """Write a page, in a folder that is made if needed, and return its path. Raises ConfigError."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{target} can't be written: {describe(error)}") from None
    write_file(target, [page])
    return target


def write_file(path: Path, pieces: Iterable[bytes]) -> int:
    """Write a file, whole or not at all, or to a pipe or device; returns the number of pieces.

    Raises ConfigError if it can't be written; a file that was there is as before.
    """
    try:
        target = path.resolve()  # of a link, the file
        if target.is_dir():
            raise ConfigError(f"{path} is a folder: name a file")
        if target.exists() and not target.is_file():
            return _write(target, pieces)
        part = target.with_name(f".{owned_name()}.part")
        try:
            count = _write(part, pieces)
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {describe(error)}") from None
    return count


def _write(path: Path, pieces: Iterable[bytes]) -> int:
    count = 0
    with path.open("wb") as file:
        for piece in pieces:
            file.write(piece)
            count += 1
        file.flush()
        if path.is_file():
            os.fsync(file.fileno())
    return count
