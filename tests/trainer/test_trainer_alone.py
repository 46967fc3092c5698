"""The trainer alone on Parquet files: the documented example, its errors, and the watchers."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from pydantic import ValidationError

from contracts.artifacts import ArtifactRef, open_artifact
from contracts.errors import TriplaneError
from contracts.store import open_store
from resources.trainer_config import ExperimentWatch
from trainer.__main__ import main
from trainer.alone import Plan, prepare
from trainer.episode_files import import_demonstrations, import_episodes
from trainer.errors import TrainingConfigError, TrainingDataError
from trainer.metrics import Record
from trainer.result import TrainResult
from trainer.run import run_job
from trainer.watchers import (
    MlflowConfig,
    WandbConfig,
    jsonl_watcher,
    mlflow_watcher,
    tensorboard_watcher,
    wandb_watcher,
)

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder with the files of docs/training.md."""
    blocks = re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert [name for name, _ in blocks] == ["make_data.py", "sft.yaml", "rl.yaml"]
    for name, text in blocks:
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    exec(compile((tmp_path / "make_data.py").read_text(), "make_data.py", "exec"), {})
    return tmp_path


def change(path: Path, **values: Any) -> Path:
    path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), **values}))
    return path


def run(path: Path) -> tuple[Plan, TrainResult]:
    plan = prepare(path)
    with plan.watched.watchers(plan.job.key) as watchers:
        result = run_job(plan.job, watchers)
    assert result is not None
    plan.finish(result.as_json())
    return plan, result


def test_the_documented_example_trains_and_the_next_run_starts_from_it(example: Path) -> None:
    _, sft = run(example / "sft.yaml")
    steps = [json.loads(line) for line in (example / "runs/sft/metrics.jsonl").read_text().splitlines()]
    losses = [step["loss"] for step in steps if "loss" in step]
    assert len(losses) == 20 and losses[-1] < 0.5 * losses[0]
    names = {path.name for path in (example / "runs/sft/checkpoint").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"} <= names
    plan, rl = run(example / "rl.yaml")
    assert json.loads((example / "runs/rl/result.json").read_text())["metrics"]["step"] == 24 == rl.metrics["step"]
    assert rl.metrics["reward_mean"] == 0.5 and rl.metrics["rows"] == 256
    store = open_store(plan.job.store)
    assert open_artifact(store, rl.checkpoint).manifest.parents["checkpoint"] == sft.checkpoint
    again, same = run(example / "rl.yaml")
    assert again.job.key == plan.job.key
    assert (same.checkpoint, same.trainer_state) == (rl.checkpoint, rl.trainer_state)


def test_a_job_of_an_experiment_is_watched_too(example: Path, capfd: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("tensorboard")
    job = prepare(example / "sft.yaml").job.model_dump_json()
    watched = ExperimentWatch(tensorboard=True, folder="watched").run("night", "base")
    assert watched is not None
    assert main(["--job", job, "--watch", watched.model_dump_json()]) == 0
    assert list((example / "watched/night/base/tensorboard").iterdir())
    assert main(["--job", job, "--watch", '{"output": "x", "name": "y"}']) == 2
    assert "--watch: watch: Field required" in capfd.readouterr().err
    (example / "file").write_text("")
    assert main(["--job", job, "--watch", watched.model_copy(update={"output": "file/x"}).model_dump_json()]) == 2
    assert "the folder of metrics can't be made" in capfd.readouterr().err
    assert ExperimentWatch().run("night", "base") is None
    with pytest.raises(ValidationError, match="set folder"):
        ExperimentWatch(tensorboard=True)


def test_an_output_holds_only_the_files_of_its_last_checkpoint(example: Path) -> None:
    run(example / "sft.yaml")
    config = {"learning_rate": 1e-3, "optimizer_steps": 1}
    output = example / "runs/rl"

    def files() -> list[str]:
        folder = output / "checkpoint"
        return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())

    run(change(example / "rl.yaml", config=config | {"lora": {"rank": 4}}))
    adapted = files()
    assert "adapter/adapter_config.json" in adapted
    plan, result = run(change(example / "rl.yaml", config=config))
    assert files() == [name for name in adapted if not name.startswith("adapter/")]
    # What a run leaves that is killed while it replaces the output's checkpoint.
    (output / "checkpoint").rename(output / ".checkpoint.old")
    (output / ".checkpoint.part/adapter").mkdir(parents=True)
    (output / ".checkpoint.part/adapter/adapter_config.json").write_text("{}")
    plan.finish(result.as_json())
    assert files() == [name for name in adapted if not name.startswith("adapter/")]
    assert [path.name for path in output.glob(".checkpoint*")] == []


def test_settings_that_decide_no_bit_keep_the_key_and_others_change_it(example: Path) -> None:
    path = example / "sft.yaml"
    key = prepare(path).job.key
    assert prepare(change(path, watch={"tensorboard": True})).job.key == key
    assert prepare(change(path, seed=1)).job.key != key


def test_a_mixture_of_files_and_a_validation_file(example: Path) -> None:
    rows = pq.read_table("demonstrations.parquet")
    pq.write_table(rows.slice(0, 40), "more.parquet")
    pq.write_table(rows.slice(0, 7), "held.parquet")
    data = [{"path": "demonstrations.parquet", "weight": 2.0}, {"path": "more.parquet"}]
    plan = prepare(change(example / "sft.yaml", data=data, validation="held.parquet"))
    (other,) = plan.job.mixture  # type: ignore[union-attr]
    store = open_store(plan.job.store)
    assert other.weight == 0.5 and open_artifact(store, other.demonstrations).table("train.parquet").num_rows == 40
    main = open_artifact(store, plan.job.demonstrations)  # type: ignore[union-attr]
    assert [main.table(f"{name}.parquet").num_rows for name in ("train", "validation")] == [256, 7]


def test_spans_and_roles_say_the_same(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    spans = [{"role": "policy", "start": 2, "end": 4}, {"role": "environment", "start": 4, "end": 5}]
    rows = [{"token_ids": [1, 2, 3, 4, 5, 6], "spans": spans}] * 30
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "spans.parquet")
    found = import_demonstrations(tmp_path / "spans.parquet", store, hold_out=True)
    train, validation = (found.table(f"{name}.parquet") for name in ("train", "validation"))
    assert train.column("token_role").to_pylist() == [[0, 0, 1, 1, 2, 0]] * 27 and validation.num_rows == 3
    assert import_demonstrations(tmp_path / "spans.parquet", store, hold_out=True).ref == found.ref


def episodes(**columns: Any) -> pa.Table:
    usual: dict[str, Any] = {
        "token_ids": [[1, 2, 3]] * 4,
        "token_role": [[0, 1, 1]] * 4,
        "logprobs": [[None, -1.0, -2.0]] * 4,
        "group_id": ["a", "a", "b", "b"],
        "reward": [1.0, 0.0, 1.0, None],
    }
    return pa.table({name: value for name, value in {**usual, **columns}.items() if value is not None})


def test_rewards_become_members_with_the_mean_of_their_group(tmp_path: Path) -> None:
    pq.write_table(episodes(), tmp_path / "e.parquet")
    found = import_episodes(tmp_path / "e.parquet", open_store(str(tmp_path / "store")))
    columns = ["episode_id", "group_id", "reward", "group_reward_mean"]
    assert found.table("members.parquet", columns).to_pylist() == [
        {"episode_id": f"row-00000000{row}", "group_id": group, "reward": reward, "group_reward_mean": mean}
        for row, group, reward, mean in [(0, "a", 1.0, 0.5), (1, "a", 0.0, 0.5), (2, "b", 1.0, 1.0)]
    ]
    assert found.table("train.parquet").num_rows == 3


def test_supports_of_a_file_reach_the_dataset(tmp_path: Path) -> None:
    pq.write_table(episodes(supports=[b"0", None, b"2", b"3"]), tmp_path / "e.parquet")
    found = import_episodes(tmp_path / "e.parquet", open_store(str(tmp_path / "store")))
    kept = episodes().column("reward").is_valid().to_pylist()
    expected = [each for each, graded in zip([b"0", None, b"2", b"3"], kept, strict=True) if graded]
    assert found.table("train.parquet", ["supports"]).column(0).to_pylist() == expected


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"logprobs": None}, r"e\.parquet has no column logprobs: see docs/training\.md"),
        ({"token_role": None}, r"e\.parquet has no column token_role \(or spans\)"),
        ({"episode_id": ["x", "y", "x", "z"]}, r"e\.parquet: episode_id x is in several rows"),
        ({"reward": ["good"] * 4}, r"e\.parquet: column reward of type string can't be read as double"),
        ({"reward": [1.0, None, float("nan"), 1.0]}, r"e\.parquet row 2 has the reward nan: write a finite number"),
        ({"reward": [1.0, 0.0, 1.0, float("-inf")]}, r"e\.parquet row 3 has the reward -inf"),
        ({"group_id": [None, "a", "b", "b"]}, r"e\.parquet: column group_id is null"),
        (
            {"token_role": None, "spans": [[{"role": "judge", "start": 0, "end": 1}]] * 4},
            r"e\.parquet row 0 has a span with role judge: use one of prompt, policy",
        ),
        (
            {"token_role": None, "spans": [[]] * 3 + [[None, {"role": "policy", "start": 1, "end": 3}]]},
            r"e\.parquet row 3 has the spans \[None, \{.*: list structs of role, start and end",
        ),
        ({"token_role": None, "spans": ["[]"] * 4}, r"e\.parquet row 0 has the spans '\[\]': list structs of role"),
        (
            {"token_role": None, "spans": [[]] * 3 + [[{"role": "policy", "start": 1, "end": 4}]]},
            r"e\.parquet row 3 has a span from 1 to 4, its tokens are 0 to 3",
        ),
    ],
)
def test_a_file_against_the_schema_is_refused_by_name(tmp_path: Path, columns: dict[str, Any], message: str) -> None:
    pq.write_table(episodes(**columns), tmp_path / "e.parquet")
    with pytest.raises(TrainingDataError, match=message):
        import_episodes(tmp_path / "e.parquet", open_store(str(tmp_path / "store")))


def test_a_truncated_or_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    store, path = open_store(str(tmp_path / "store")), tmp_path / "e.parquet"
    with pytest.raises(TrainingDataError, match=r"e\.parquet does not exist"):
        import_episodes(path, store)
    pq.write_table(episodes(), path)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TrainingDataError, match=r"e\.parquet is not a readable Parquet file"):
        import_episodes(path, store)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"config": {"max_steps": 0}},
            r"sft\.yaml field sft\.config\.max_steps: .*greater than or equal to 1 \(got 0\)",
        ),
        ({"epochs": 3}, r"sft\.yaml field sft\.epochs: Extra inputs are not permitted"),
        ({"config": {"max_gradient_norm": float("inf")}}, r"sft\.config\.max_gradient_norm: .* finite .*\(got inf\)"),
        ({"seed": -1}, r"sft\.yaml field sft\.seed: .*greater than or equal to 0 \(got -1\)"),
        ({"kind": "dpo"}, r"sft\.yaml field file"),
        ({"tokenizer": "nowhere"}, r"nowhere has no tokenizer\.json"),
        ({"data": "nowhere.parquet"}, r"nowhere\.parquet does not exist"),
    ],
)
def test_a_bad_setting_is_refused_by_name(example: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(TriplaneError, match=message):
        prepare(change(example / "sft.yaml", **values))


def test_a_setting_that_is_given_twice_is_refused(example: Path) -> None:
    path = example / "sft.yaml"
    path.write_text(f"{path.read_text()}\nkind: sft\n")
    with pytest.raises(TrainingConfigError, match=r"sft\.yaml is not YAML \(key 'kind' is given twice"):
        prepare(path)


def test_the_metrics_file_has_each_step_once_after_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with jsonl_watcher(path) as watch:
        for step in (1, 2, 3):
            watch({"step": step, "loss": 1.0})
    path.write_text(path.read_text() + '{"step": 4, "lo')
    with jsonl_watcher(path) as watch:
        watch({"step": 3, "loss": 2.0})
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["step"], record["loss"]) for record in records] == [(1, 1.0), (2, 1.0), (3, 2.0)]


RECORDS: list[Record] = [{"step": step, "seconds": 0.1, "loss": 1.0 / step, "note": "x"} for step in (1, 2, 3)]


def test_tensorboard_reads_what_the_watcher_wrote(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with tensorboard_watcher(tmp_path) as watch:
        for record in RECORDS:
            watch(record)
    with tensorboard_watcher(tmp_path) as watch:
        watch({"step": 3, "loss": 9.0})
    found = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert sorted(found.Tags()["scalars"]) == ["train/loss", "train/seconds"]
    values = {event.step: event.value for event in found.Scalars("train/loss")}
    assert values == pytest.approx({1: 1.0, 2: 0.5, 3: 9.0})


def test_mlflow_reads_what_the_watcher_wrote(tmp_path: Path) -> None:
    tracking = pytest.importorskip(
        "mlflow.tracking", reason="needs mlflow, too large for the extra `dev`: pip install mlflow"
    )
    config = MlflowConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    try:
        for part in (RECORDS[:2], RECORDS[2:]):
            with mlflow_watcher(config, tmp_path, "run", "k" * 64) as watch:
                for record in part:
                    watch(record)
    except ImportError as error:
        pytest.skip(f"this MLflow keeps no runs here: {error}")
    client = tracking.MlflowClient(tracking_uri=config.tracking_uri)
    experiment = client.get_experiment_by_name("triplane")
    (run_,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run_.info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 1.0), (2, 0.5), (3, 1.0 / 3)]


@pytest.mark.slow
def test_wandb_keeps_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="needs wandb, too large for the extra `dev`: pip install 'triplane[wandb]'")
    monkeypatch.setenv("WANDB_MODE", "offline")
    with wandb_watcher(WandbConfig(project="p"), tmp_path, "run", "a" * 64) as watch:
        for record in RECORDS:
            watch(record)
    assert list(tmp_path.glob("wandb/offline-run-*/*.wandb"))


@pytest.mark.parametrize("package", ["tensorboard", "wandb", "mlflow"])
def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    watchers: dict[str, Any] = {
        "tensorboard": lambda: tensorboard_watcher(tmp_path),
        "wandb": lambda: wandb_watcher(WandbConfig(project="p"), tmp_path, "run", "k"),
        "mlflow": lambda: mlflow_watcher(MlflowConfig(), tmp_path, "run", "k"),
    }
    with pytest.raises(TrainingConfigError, match=rf"watch\.{package}: .*pip install 'triplane\[{package}\]'"):
        with watchers[package]():
            pass


@pytest.mark.slow
def test_the_command_continues_after_kill_9_with_the_same_bits(example: Path) -> None:
    def start(name: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", "from triplane_dagster.cli import main; main()", "train", "--config", name]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=example)

    steps = {"config": {**yaml.safe_load((example / "sft.yaml").read_text())["config"], "max_steps": 400}}
    change(example / "sft.yaml", **steps)
    (example / "other.yaml").write_text((example / "sft.yaml").read_text().replace("runs/sft", "runs/other"))
    process = start("sft.yaml")
    metrics = example / "runs/sft/metrics.jsonl"
    deadline = time.monotonic() + 120
    while not metrics.exists() or len(metrics.read_text().splitlines()) < 20:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    results = []
    for name in ("sft.yaml", "other.yaml"):
        again = start(name)
        out, err = again.communicate(timeout=240)
        assert again.returncode == 0, err
        results.append(json.loads(out.splitlines()[-1]))
    assert results[0]["checkpoint"]["digest"] == results[1]["checkpoint"]["digest"]
    assert ArtifactRef(**results[0]["checkpoint"])
    losses = [
        [json.loads(line).get("loss") for line in (example / folder / "metrics.jsonl").read_text().splitlines()]
        for folder in ("runs/sft", "runs/other")
    ]
    assert losses[0] == losses[1] and np.isfinite([loss for loss in losses[0] if loss is not None]).all()
