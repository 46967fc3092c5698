"""`triplane data` runs pipelines and shows their versions."""

from __future__ import annotations

import json
from pathlib import Path

import duckdb
from cli_history import Run

PIPELINE = """
name: short
key: id
description: short texts
source: {kind: jsonl, path: "../../rows.jsonl", columns: {id: BIGINT, text: VARCHAR}}
stages:
  - {kind: where, predicate: "length(text) < 8"}
  - {kind: distinct, by: [text]}
"""


def test_pipeline_is_run_listed_and_shown(triplane: Run, here: Run, tmp_path: Path) -> None:
    folder = tmp_path / "experiments" / "data"
    folder.mkdir(parents=True)
    (folder / "short.yaml").write_text(PIPELINE)
    (folder / "broken.yaml").write_text("name: broken\n")
    rows = [{"id": number, "text": "x" * (number % 10)} for number in range(100)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = here("data", "names", "--json")
    assert json.loads(named.stdout) == [{"name": "short", "stages": 2, "description": "short texts"}]
    assert "warning: pipeline" in named.stderr and "broken.yaml" in named.stderr
    assert "broken.yaml: key" in here("data", "run", "broken").stderr
    planned = here("data", "run", "short", "--dry-run")
    assert "nothing was run" in planned.stdout and here("data", "list", "--json").stdout.strip() == "[]"
    done = triplane("data", "run", "short", "--json", "--workers", "1")
    made = json.loads(done.stdout)
    assert (made["version"], made["rows"]) == ("short@1", 8) and "100" in done.stderr
    assert made["stages"][1] == {"stage": "where", "in": 100, "out": 80, "left_out": {"false": 20}}
    assert duckdb.sql(f"SELECT count(*) FROM '{made['folder']}/*.parquet'").fetchall() == [(8,)]
    (folder / "short.yaml").write_text(PIPELINE.replace("< 8", "< 5"))
    assert json.loads(triplane("data", "run", "short", "--json").stdout)["version"] == "short@2"
    found = json.loads(here("data", "list", "--json").stdout)
    assert [(each["version"], each["rows"]) for each in found] == [("short@2", 5), ("short@1", 8)]
    assert "over the cap" not in here("data", "show", "short@1").stdout
    assert made["folder"] in here("data", "show", "short@1").stdout
    assert "short has versions 1 to 2" in here("data", "show", "short@3").stderr
