"""Manifests per second of `triplane store reindex`, on a store of synthetic iterations.

    manifests of N iterations, with or without their tables, and with or without manifests of groups -> rebuild

The manifests have the sizes and parents of real ones. The tables of all iterations are the same files, linked.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.measure import median
from contracts.artifacts import SCHEMA_VERSION, ArtifactRef, FileEntry, Manifest, content_digest, tool_versions
from contracts.digests import digest_of, file_sha256, table_digest
from contracts.episodes import EPISODES, TELEMETRY
from contracts.errors import TriplaneError
from contracts.store import open_store
from curation.dataset import MEMBERS
from curation.rewards import REWARDS
from ops.ledger.index import rebuild

EPISODES_EACH = 512
GROUPS = 64
_MODEL_FILES = ("chat_template.jinja", "config.json", "metrics.jsonl", "model.safetensors", "tokenizer.json")
_SPLITS = ("gate", "held_out", "held_out_greedy", "unseen", "unseen_greedy")
_FILES: Mapping[str, tuple[str, ...]] = {
    "iteration_inputs": ("inputs.json",),
    "prompts": ("prompts.json",),
    "rollouts": ("episodes.parquet", "plan.json", "sequences.parquet", "telemetry.parquet"),
    "rewards": ("evidence.parquet", "rewards.parquet"),
    "reward_flips": ("flips.parquet",),
    "dataset": ("members.parquet", "train.parquet"),
    "checkpoint": _MODEL_FILES,
    "trainer_state": ("state.json", "state.safetensors"),
    **{f"evaluation_run/{split}": ("episodes.parquet", "rewards.parquet", "telemetry.parquet") for split in _SPLITS},
    "evaluation": ("evaluation.json",),
    "sampler": ("decision.json",),
}
"""Artifacts of an iteration, with their files."""
_PARENTS: Mapping[str, tuple[str, ...]] = {
    "iteration_inputs": (),
    "prompts": (),
    "rollouts": ("iteration_inputs", "prompts"),
    "rewards": ("rollouts",),
    "reward_flips": ("rewards",),
    "dataset": ("rollouts", "rewards"),
    "checkpoint": ("dataset",),
    "trainer_state": ("dataset",),
    **{f"evaluation_run/{split}": ("checkpoint",) for split in _SPLITS},
    "evaluation": ("checkpoint", *(f"evaluation_run/{split}" for split in _SPLITS)),
    "sampler": ("checkpoint", "evaluation"),
}
INDEXED = len(_FILES)
"""Manifests of an iteration that the index reads."""


def rebuild_rates(scratch: Path, iterations: int, repeats: int) -> dict[str, float]:
    """Manifests per second of a rebuild, medians: of manifests alone, among those of groups, and with tables.

    Raises TriplaneError if a rebuild misses an artifact.
    """
    few = max(iterations // 10, 1)
    return {
        "rebuild_manifests_per_second": _rate(scratch / "alone", iterations, repeats),
        "rebuild_among_groups_per_second": _rate(scratch / "groups", few, repeats, groups=GROUPS),
        "rebuild_with_tables_per_second": _rate(scratch / "tables", few, repeats, tables=True),
    }


def _rate(folder: Path, iterations: int, repeats: int, *, groups: int = 0, tables: bool = False) -> float:
    _fill(folder, iterations, groups, tables)
    seconds = [_rebuild(folder, iterations * INDEXED) for _ in range(repeats)]
    shutil.rmtree(folder)
    return iterations * INDEXED / median(seconds)


def _rebuild(folder: Path, expected: int) -> float:
    store, started = open_store(str(folder)), time.perf_counter()
    done = rebuild(store)
    seconds = time.perf_counter() - started
    if done != expected:
        raise TriplaneError(f"the rebuild indexed {done} of {expected} artifacts")
    return seconds


def _fill(folder: Path, iterations: int, groups: int, tables: bool) -> None:
    files = _table_files(folder / "tables") if tables else {}
    before: dict[str, ArtifactRef] = {}
    for number in range(iterations):
        made: dict[str, ArtifactRef] = {}
        for name, paths in _FILES.items():
            parents = {role.replace("/", "_"): made[role] for role in _PARENTS[name]}
            if name in ("rollouts", "checkpoint", "trainer_state") and before:
                parents |= {"policy": before["checkpoint"], "trainer_state": before["trainer_state"]}
            made[name] = _write(folder, name, number, paths if tables else _without_tables(paths), parents, files)
        for group in range(groups):
            _write(folder, "group", number * groups + group, ("episodes.json",), {}, {})
        before = made


def _without_tables(paths: tuple[str, ...]) -> tuple[str, ...]:
    """The same number of files, of which the index reads none."""
    return tuple(path.replace(".parquet", ".bin") for path in paths)


def _write(
    folder: Path,
    name: str,
    number: int,
    paths: tuple[str, ...],
    parents: Mapping[str, ArtifactRef],
    tables: Mapping[str, tuple[Path, FileEntry]],
) -> ArtifactRef:
    kind, key = name.partition("/")[0], digest_of([name, number])
    entries = [
        tables[path][1]
        if path in tables
        else FileEntry(path=path, size=1000, sha256=key, digest=digest_of([key, path]))
        for path in paths
    ]
    place = {"experiment": "long", "iteration": f"{number:04d}"} if kind in ("iteration_inputs", "rollouts") else {}
    manifest = Manifest(
        kind=kind,
        schema_version=SCHEMA_VERSION,
        action_key=key,
        content_digest=content_digest(kind, SCHEMA_VERSION, entries),
        attempt=key[:12],
        files=entries,
        parents=dict(parents),
        config={**place, "settings": {f"value_{each}": each / 7 for each in range(12)}},
        code_version="3",
        meta={f"fact_{each}": each for each in range(6)},
        tool_versions=tool_versions(),
        created_unix=float(number),
    )
    home = folder / "artifacts" / kind / key
    (home / manifest.attempt).mkdir(parents=True)
    for path in paths:
        if path in tables:
            os.link(tables[path][0], home / manifest.attempt / path)
    (home / "manifest.json").write_text(manifest.model_dump_json(indent=1))
    return ArtifactRef(kind=kind, key=key, digest=manifest.content_digest)


def _table_files(folder: Path) -> dict[str, tuple[Path, FileEntry]]:
    """Tables of an iteration, which all iterations share."""
    folder.mkdir(parents=True)
    ids = [digest_of(["episode", each])[:32] for each in range(EPISODES_EACH)]
    call = {"turn": 0, "name": "edit", "arguments": '{"path": "a.py"}', "ok": True, "result": "edited one line\n" * 4}
    rows = {
        "episodes": [
            {
                "episode_id": each,
                "group_id": f"g{place // 8}",
                "task_id": f"t{place // 8}",
                "image_digest": digest_of(["image", place // 8]),
                "outcome": "completed",
                "policy_version": digest_of("policy"),
                "tool_calls": [call, call],
                "policy_tokens": 60,
                "final_diff": each.encode() * 16,
            }
            for place, each in enumerate(ids)
        ],
        "telemetry": [{"episode_id": each, "engine_tokens": 70, "seconds": 2.5} for each in ids],
        "rewards": [{"episode_id": each, "reward": 1.0, "solved": True, "verdict": "passed"} for each in ids],
        "members": [{"episode_id": each, "kept": True} for each in ids],
    }
    schemas = {"episodes": EPISODES, "telemetry": TELEMETRY, "rewards": REWARDS, "members": MEMBERS}
    found = {}
    for name, schema in schemas.items():
        whole = [{column: row.get(column) for column in schema.names} for row in rows[name]]
        table, path = pa.Table.from_pylist(whole, schema=schema), folder / f"{name}.parquet"
        pq.write_table(table, path, compression="zstd")
        digest = None if name == "telemetry" else table_digest(table)
        size = path.stat().st_size
        found[path.name] = (path, FileEntry(path=path.name, size=size, sha256=file_sha256(path), digest=digest))
    return found
