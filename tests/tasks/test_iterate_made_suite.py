"""Iterations over a suite made of a package, with a policy that plays the oracle in half of its samples: rewards,
dataset, report; then its tasks by difficulty.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from contracts.artifacts import Artifact
from contracts.episodes import Slot
from contracts.tasks import Split
from inference.rollouts.evaluate import evaluation_slot
from inference.rollouts.plan import GroupPlan
from ops.report.page import read_data
from resources.refs import read_artifact
from tests.acceptance.laboratory import ROOT, Laboratory
from tests.tasks.half_oracle import plays_oracle

pytestmark = pytest.mark.slow
NAME, SEED = "made", 3
MODULES = {
    "numbers": (
        "def clamp(value, low=0, high=10):\n    if value < low:\n        return low\n    if value > high:\n"
        "        return high\n    return value\n\n\ndef mean(values):\n    if not values:\n        return None\n"
        "    return sum(values) / len(values)\n",
        "def test_clamp():\n    assert clamp(-1) == 0\n    assert clamp(5) == 5\n    assert clamp(11) == 10\n\n\n"
        "def test_mean():\n    assert mean([1, 2]) == 1.5\n    assert mean([]) is None\n",
    ),
    "words": (
        "def title(words, stop=('of', 'the')):\n    found = []\n    for word in words.split():\n"
        "        found.append(word if word in stop else word.capitalize())\n    return ' '.join(found)\n\n\n"
        "def longest(words):\n    best = ''\n    for word in words:\n        if len(word) > len(best):\n"
        "            best = word\n    return best\n",
        "def test_title():\n    assert title('lord of the rings') == 'Lord of the Rings'\n\n\n"
        "def test_longest():\n    assert longest(['a', 'abc', 'ab']) == 'abc'\n",
    ),
    "lists": (
        "def chunks(items, size):\n    found = []\n    for start in range(0, len(items), size):\n"
        "        found.append(items[start : start + size])\n    return found\n\n\n"
        "def flatten(rows):\n    return [each for row in rows for each in row]\n",
        "def test_chunks():\n    assert chunks([1, 2, 3], 2) == [[1, 2], [3]]\n\n\n"
        "def test_flatten():\n    assert flatten([[1], [2, 3]]) == [1, 2, 3]\n",
    ),
}


def package(root: Path) -> Path:
    (root / "tests").mkdir(parents=True)
    (root / "pack").mkdir()
    (root / "LICENSE").write_text("Permission is hereby granted, free of charge, to any person")
    (root / "pack" / "__init__.py").write_text("")
    for name, (code, tests) in MODULES.items():
        (root / "pack" / f"{name}.py").write_text(code)
        (root / "tests" / f"test_{name}.py").write_text(f"from pack.{name} import *\n\n\n{tests}")
    return root


def experiment_file(folder: Path, suite: str, store: str) -> Path:
    values = yaml.safe_load((ROOT / "tests" / "dagster" / "tiny.yaml").read_text())
    values["base"]["model"]["max_positions"] = 4096
    values |= {
        "name": NAME,
        "seed": SEED,
        "tasks": {"kind": "import", "suite": suite},
        "prompts": {"groups": 4, "reserve": 1, "workers": 1},
        "rollouts": {"group_size": 4, "max_turns": 3, "max_tokens": 4096, "max_turn_tokens": 2048},
        "engine": {
            "kind": "custom",
            "factory": "tests.tasks.half_oracle:open_engine",
            "options": {"store": store, "suite": suite},
        },
        "rewards": {"valid": 0.0},
        "dataset": {},
        "evaluation": {"gate_samples": 2, "held_out_samples": 1, "greedy": False},
    }
    path = folder / "made.yaml"
    path.write_text(yaml.safe_dump(values))
    return path


def made(lab: Laboratory, asset: str, iteration: str = "0000") -> Artifact:
    found = read_artifact(lab.store, NAME, asset, iteration)
    assert found is not None, asset
    return found


def expected(group: GroupPlan, iteration: str, samples: int) -> list[bool]:
    """Which samples of a group play the oracle."""
    slots = [Slot(NAME, iteration, group.group_id, group.task_id, sample, SEED) for sample in range(samples)]
    return [plays_oracle(slot.token_seed) for slot in slots]


def test_iterations_over_a_made_suite_reward_what_the_oracle_plays_and_draw_by_difficulty(tmp_path: Path) -> None:
    lab = Laboratory(tmp_path / "lab", tmp_path / "made.yaml")
    suite = lab.json("tasks", "make", str(package(tmp_path / "pack")), "--count", "16")
    assert all(suite["splits"].values()), suite["splits"]
    experiment_file(tmp_path, suite["digest"], lab.store.url)
    lab.iterate(1)

    samples = made(lab, "rollouts").table("episodes.parquet", ["episode_id", "sample"]).to_pylist()
    sample_of = {row["episode_id"]: row["sample"] for row in samples}
    rewards = made(lab, "rewards").table("rewards.parquet", ["episode_id", "group_id", "solved", "reward"]).to_pylist()
    plan = [GroupPlan.model_validate(each) for each in made(lab, "prompts").json("prompts.json")["groups"]]
    for group in plan:
        rows = {sample_of[row["episode_id"]]: row for row in rewards if row["group_id"] == group.group_id}
        solved = expected(group, "0000", 4)
        assert [rows[sample]["solved"] for sample in range(4)] == solved, group.task_id
        assert [rows[sample]["reward"] for sample in range(4)] == pytest.approx([float(each) for each in solved])
    varied = [group for group in plan if len(set(expected(group, "0000", 4))) == 2]
    assert varied, "with this seed some group is solved in part"
    train = made(lab, "dataset").table("train.parquet", ["group_id"])["group_id"].to_pylist()
    assert set(train) >= {group.group_id for group in varied}
    told = json.dumps(read_data(made(lab, "report").path("report.html").read_bytes()))
    assert all(group.task_id in told for group in plan)

    counts = ["--samples", "4", "-k", "2"]
    measured = lab.json("tasks", "difficulty", *lab.settings, "--suite", suite["digest"], "--policy", "base", *counts)
    rates = {row["task_id"]: row["rate"] for row in measured["rows"] if row["split"] == "train"}
    for task, rate in rates.items():
        slots = [evaluation_slot("evaluation", Split.TRAIN, task, sample, SEED) for sample in range(4)]
        assert rate == sum(plays_oracle(slot.token_seed) for slot in slots) / 4, task
    low = min(rate for rate in rates.values() if rate > min(rates.values()))
    inside = {task for task, rate in rates.items() if rate >= low}
    assert len(inside) < len(rates), "half of the samples, by chance more or fewer of a task"
    chosen = ["--set", f"tasks.difficulty.low={low}"]
    steps = {step["step"]: step for step in lab.json("iterate", *lab.settings, *chosen, "--dry-run")}
    assert f"{len(inside)} of {len(rates)} training tasks have a pass rate in [{low:g}, 1]" in steps["prompts"]["note"]
    lab.run("iterate", *lab.settings, *chosen, "-n", "1")
    prompts = made(lab, "prompts", "0001")
    assert prompts.manifest.parents["difficulty"].digest == measured["digest"]
    assert {group["task_id"] for group in prompts.json("prompts.json")["groups"]} <= inside
    assert measured["digest"] in json.dumps(lab.json("lineage", prompts.ref.digest))
