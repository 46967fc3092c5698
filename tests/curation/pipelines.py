"""Data pipelines of tests: a folder with sources and functions, and runs of pipelines over it."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from contracts.artifacts import Artifact
from contracts.store import open_store
from curation.pipeline.config import Pipeline
from curation.pipeline.plan import plan_pipeline
from curation.pipeline.runner import rows_reader, run_pipeline

ROWS = [
    {
        "id": number,
        "text": f"text {number % 40} of {number}",
        "lang": ("py", "go", "c")[number % 5 % 3],
        "user": number % 7,
    }
    for number in range(200)
]
FUNCTIONS = """
import os
import sys
from pathlib import Path

def shout(row, mark="!"):
    log = Path(__file__).with_name("calls.txt")
    with log.open("a") as file:
        file.write(f"{row['id']} {os.getpid()}\\n")
    return {"loud": row["text"].upper() + mark}

def odd(row):
    return {"loud": "x"} if row["id"] % 2 else None

def twice(row):
    return [{"part": 0}, {"part": 1}]

def fails(row):
    if row["id"] == 37:
        raise KeyError("nothing for 37")
    return {"loud": "x"}

def wrong_type(row):
    return {"part": "seven" if row["id"] == 5 else 7}

def empty(row):
    return {}

def given(row, value):
    return {"v": None if row["id"] else value}

def late(row):
    return None if row["id"] < 100 else {}

def grows(row):
    if row["id"] == 5:
        raise MemoryError
    return {}

def leaves(row):
    if row["id"] == 5:
        sys.exit(0)
    return {}

def whole(table):
    return table.append_column("part", table.column("id"))

def first(table):
    return table.append_column("part", [[table.column("id")[0].as_py()] * len(table)])
"""
PROGRAM = "import sys; from tests.curation.pipelines import main; main(sys.argv[1], sys.argv[2])"
ROOT = Path(__file__).parents[2]


def world(folder: Path) -> Path:
    """Write sources and functions."""
    folder.mkdir(exist_ok=True)
    pq.write_table(pa.Table.from_pylist(ROWS), folder / "rows.parquet", row_group_size=70)
    (folder / f"functions_{folder.parent.name}.py".replace("-", "_")).write_text(FUNCTIONS)
    with sqlite3.connect(folder / "users.db") as database:
        database.execute("CREATE TABLE users (id INTEGER, name TEXT, age INTEGER)")
        database.executemany(
            "INSERT INTO users VALUES (?, ?, ?)",
            [(0, "Ada", 30), (1, "Bo", 31), (2, "Cy", 32), (3, "Di", 33), (3, "Dan", 34)],
        )
    return folder


def function(folder: Path, name: str) -> str:
    """Reference to one of FUNCTIONS; modules of different tests have different names."""
    return f"{next(folder.glob('functions_*.py')).stem}:{name}"


def values(*stages: dict[str, Any], **settings: Any) -> dict[str, Any]:
    """A pipeline's file."""
    source = {"kind": "parquet", "path": "rows.parquet"}
    return {
        "name": "tiny",
        "key": "id",
        "source": source,
        "batch_rows": 16,
        "workers": 1,
        "stages": list(stages),
        **settings,
    }


def go(folder: Path, store: str, *stages: dict[str, Any], **settings: Any) -> Artifact:
    """Run a pipeline here."""
    return run_pipeline(plan_pipeline(Pipeline.model_validate(values(*stages, **settings)), folder), open_store(store))


def rows_of(artifact: Artifact) -> list[dict[str, Any]]:
    """Rows of a result."""
    return [row for batch in rows_reader(artifact, 1000).batches(None) for row in batch.table.to_pylist()]


def started(
    folder: Path, store: str, *stages: dict[str, Any], env: dict[str, str] | None = None, **settings: Any
) -> subprocess.Popen[str]:
    """Run a pipeline in a process of its own."""
    (folder / "tiny.yaml").write_text(yaml.safe_dump(values(*stages, **settings)))
    place = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **(env or {})}
    command = [sys.executable, "-c", PROGRAM, str(folder / "tiny.yaml"), store]
    return subprocess.Popen(command, env=place, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main(path: str, store: str) -> None:
    """Body of `started`."""
    file = Path(path)
    run_pipeline(
        plan_pipeline(Pipeline.model_validate(yaml.safe_load(file.read_text())), file.parent), open_store(store)
    )


def calls(folder: Path) -> list[tuple[int, int]]:
    """(id of the row, pid) of every call of `shout`."""
    log = folder / "calls.txt"
    lines = log.read_text().splitlines() if log.exists() else []
    return [(int(row), int(pid)) for row, pid in (line.split() for line in lines)]
