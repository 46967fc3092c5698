"""Seconds and memory of a question to a large ledger: `triplane recall` over millions of episodes.

    synthetic rows of N iterations -> a merged segment and 15 small ones -> questions, each in a fresh process
    synthetic manifests of iterations -> the ledger rebuilt (`rebuild`)

Each iteration has 64 groups of 8 episodes, its dataset keeps three of four, and each checkpoint continues the one
before, as in a long experiment. A task is drawn once in about 80 iterations.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import duckdb
from pydantic import Field

from benchmarks.measure import median, resident
from benchmarks.rebuild import EPISODES_EACH, GROUPS, INDEXED, rebuild_rates
from benchmarks.result import Options, Result
from contracts.errors import TriplaneError
from contracts.store import open_store
from ops.ledger.segments import FLUSH_ROWS, TABLES, Ledger

EPISODES = 512
TASKS = 5_000
SMALL = 15
"""Iterations in segments of their own, the most before a merge."""
QUESTIONS = {
    "task": "t00042",
    "episode": "",
    "image": "",
    "rule": "3-",
    "tool": "exec",
}
"""Question -> value; that of an empty one is looked up in the middle of the ledger."""

_ITERATIONS = "SELECT range AS i, printf('%04d', range) AS iteration FROM range({first}, {last})"
_KINDS = ("iteration_inputs", "rollouts", "rewards", "dataset", "checkpoint", "trainer_state")
_EDGES = (
    ("rollouts", "iteration_inputs", 0),
    ("rewards", "rollouts", 0),
    ("dataset", "rollouts", 0),
    ("dataset", "rewards", 0),
    ("checkpoint", "dataset", 0),
    ("checkpoint", "checkpoint", 1),
)
"""(kind, kind of the parent, iterations between)."""


class RecallOptions(Options):
    """Options of the `recall` benchmark."""

    iterations: int = Field(10_000, ge=100, le=200_000)
    """Number of iterations, of 512 episodes each."""
    repeats: int = Field(3, ge=1, le=50)
    """Repetitions of each question and of each rebuild; results are medians."""
    rebuilt: int = Field(1_500, ge=10, le=100_000)
    """Iterations of the store whose ledger is rebuilt, of 15 manifests each."""


OPTIONS = RecallOptions


def run(options: RecallOptions) -> Result:
    """Build the ledger and ask each question, of `recall` and of `quarantine --dry-run`.

    Raises TriplaneError for a question that fails.
    """
    with tempfile.TemporaryDirectory(prefix="bench-recall-") as scratch:
        started = time.perf_counter()
        _build(scratch, options.iterations)
        built = time.perf_counter() - started
        store = open_store(scratch)
        size = sum(entry.size for entry in store.entries("artifacts/ledger/"))
        values = _values(scratch, options.iterations // 2)
        rows = [_ask(scratch, what, values[what], options.repeats) for what in QUESTIONS]
        marks = [_ask(scratch, what, values[what], options.repeats, "quarantine") for what in QUESTIONS]
    with tempfile.TemporaryDirectory(prefix="bench-rebuild-") as scratch:
        rates = rebuild_rates(Path(scratch), options.rebuilt, options.repeats)
    one = [row for row in rows if row["question"] not in ("tool", "rule")]
    metrics = {
        "seconds": max(row["seconds"] for row in one),
        "quarantine_seconds": max(row["seconds"] for row in marks if row["question"] not in ("tool", "rule")),
        "seconds_of_all_episodes": max(row["seconds"] for row in rows),
        "peak_gib": max(row["peak GiB"] for row in rows + marks),
        "ledger_gib": size / 2**30,
        **rates,
    }
    episodes = options.iterations * EPISODES
    notes = [
        f"{episodes:,} episodes of {options.iterations:,} iterations, {size / 2**20:.0f} MiB, made in {built:.0f} s",
        "seconds: a whole question in a process that has its modules; tool and rule match every episode",
        f"rebuild: {options.rebuilt:,} iterations of {INDEXED} manifests; a tenth of them with {GROUPS} group manifests"
        f" each, and a tenth with tables of {EPISODES_EACH} episodes; files in the page cache",
    ]
    return Result(metrics, rows + marks, notes)


def _build(folder: str, iterations: int) -> None:
    ledger = Ledger(open_store(folder))
    bulk = iterations - SMALL
    ledger.replace(lambda out: _write(out, 0, bulk))
    for first in range(bulk, iterations):
        with tempfile.TemporaryDirectory() as scratch, ledger.opened() as (db, segments):
            _write(Path(scratch), first, first + 1)
            rows = {name: db.read_parquet(f"{scratch}/{name}.parquet").to_arrow_table() for name in TABLES}
            ledger.append(segments, {name: rows[name].cast(TABLES[name]) for name in TABLES})


def _write(folder: Path, first: int, last: int) -> None:
    uri = "'artifacts/{kind}/' || sha256('{kind}' || (i - {back}))"
    kinds = ", ".join(f"'{kind}'" for kind in _KINDS)
    edges = " UNION ALL ".join(
        f"SELECT i, {uri.format(kind=child, back=0)} AS child, {uri.format(kind=parent, back=back)} AS parent,"
        f" '{parent}' AS role FROM iterations"
        for child, parent, back in _EDGES
    )
    own = f"FROM (FROM iterations, range({EPISODES}) AS e(e))"
    ids = "unhex(sha256(i || '/' || e)[:32]) AS episode_id"
    queries = {
        "artifacts": f"""SELECT 'artifacts/' || kind || '/' || sha256(kind || i) AS uri, kind,
            sha256(kind || i) AS digest,
            if(kind = 'iteration_inputs', 'long', NULL) AS experiment,
            if(kind = 'iteration_inputs', iteration, NULL) AS iteration,
            if(kind = 'rewards', '3-0123456789ab', NULL) AS rule, i::DOUBLE AS created_unix
            FROM iterations, (SELECT unnest([{kinds}]) AS kind) ORDER BY i""",
        "edges": f"SELECT child, parent, role FROM ({edges}) ORDER BY i",
        "episodes": f"""SELECT {ids}, {uri.format(kind="rollouts", back=0)} AS home,
            printf('%04d-%02d', i, e // 8) AS group_id,
            printf('t%05d', hash(i * 64 + e // 8) % {TASKS}) AS task_id,
            sha256('image' || hash(i * 64 + e // 8) % {TASKS}) AS image_digest,
            if(e % 3 = 0, 'solved', 'completed') AS outcome, sha256('checkpoint' || (i - 1)) AS policy,
            ['edit', 'exec', 'read_file'] AS tools, 60 + e % 50 AS policy_tokens, 70 + e % 50 AS engine_tokens,
            2.5 + e % 7 AS seconds, 1.5 AS sampling_seconds, 0.5 AS tool_seconds {own} ORDER BY i, e""",
        "grades": f"""SELECT {ids}, {uri.format(kind="rewards", back=0)} AS home, (e % 3 = 0)::FLOAT AS reward,
            e % 3 = 0 AS solved, 'completed' AS verdict {own} ORDER BY i, e""",
        "members": f"""SELECT {ids}, {uri.format(kind="dataset", back=0)} AS home, e % 4 > 0 AS kept,
            if(e % 4 > 0, NULL, 'zero_variance') AS reason {own} ORDER BY i, e""",
    }
    with duckdb.connect() as db:
        db.execute(f"CREATE VIEW iterations AS {_ITERATIONS.format(first=first, last=last)}")
        for name, query in queries.items():
            casts = ", ".join(f'"{field.name}"' for field in TABLES[name])
            db.sql(f"SELECT {casts} FROM ({query})").write_parquet(
                str(folder / f"{name}.parquet"), compression="zstd", row_group_size=FLUSH_ROWS
            )


def _values(folder: str, middle: int) -> dict[str, str]:
    with Ledger(open_store(folder)).opened() as (db, _):
        found = db.sql(
            "SELECT hex(episode_id), image_digest FROM episodes"
            " WHERE home = 'artifacts/rollouts/' || sha256('rollouts' || $middle) LIMIT 1",
            params={"middle": middle},
        ).fetchall()[0]
    return {**QUESTIONS, "episode": found[0].lower(), "image": found[1]}


def _ask(folder: str, what: str, value: str, repeats: int, command: str = "recall") -> dict[str, Any]:
    found = [_apart(folder, what, value, command) for _ in range(repeats)]
    return {
        "command": command,
        "question": what,
        "episodes": found[0]["episodes"],
        "checkpoints": found[0]["checkpoints"],
        "seconds": median([each["seconds"] for each in found]),
        "slowest": max(each["seconds"] for each in found),
        "peak GiB": max(each["peak"] for each in found) / 2**30,
    }


def _apart(folder: str, what: str, value: str, command: str) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.recall", folder, what, value, command],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise TriplaneError(f"{command} of {what} {value} failed: {(done.stderr.splitlines() or ['no message'])[-1]}")
    answer: dict[str, float] = json.loads(done.stdout)
    return answer


def _main(folder: str, what: str, value: str, command: str) -> None:
    from ops.ledger.recall import recall
    from ops.quarantine.question import reach_of

    store, started = open_store(folder), time.perf_counter()
    if command == "recall":
        found = recall(store, what, value)  # type: ignore[arg-type]
        episodes, checkpoints = found.episodes, len(found.trained)
    else:
        reach, _ = reach_of(store, what, value, only_count=True)  # type: ignore[arg-type]
        episodes, checkpoints = reach.episodes, len(reach.checkpoints)
    answer = {"seconds": time.perf_counter() - started, "episodes": episodes, "checkpoints": checkpoints}
    print(json.dumps({**answer, "peak": resident("VmHWM")}))


if __name__ == "__main__":
    _main(*sys.argv[1:])
