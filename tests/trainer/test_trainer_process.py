"""`python -m trainer` as another process sees it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from trainer_world import World

from contracts.artifacts import list_artifacts
from trainer.config import parse_job, read_job
from trainer.errors import TrainingConfigError
from trainer.lifetime import PARENT_VARIABLE

pytestmark = pytest.mark.slow


def trainer(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "trainer", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def test_a_job_runs_and_its_result_is_the_last_line_of_stdout(world: World) -> None:
    job = world.sft_job()
    process = trainer("--job", job.model_dump_json())
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    result = json.loads(out.splitlines()[-1])
    assert result["checkpoint"]["key"] == job.key == result["trainer_state"]["key"]
    assert "expected_solve" in err and "expected_solve" in result["metrics"]


def test_sigterm_ends_with_one_line_and_the_same_command_goes_on(world: World, tmp_path: Path) -> None:
    job = world.sft_job(max_steps=100_000, evaluate_every=100_000, snapshot_every=5)
    path = tmp_path / "job.yaml"
    path.write_text(yaml.safe_dump(json.loads(job.model_dump_json())))
    process = trainer("--config", str(path))
    deadline = time.monotonic() + 60
    while not list(list_artifacts(world.store, "trainer_snapshot")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 143
    assert err.splitlines()[-1] == "trainer: stopped by SIGTERM: run the same job again to continue"
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('{"kind": "sft"}', "job field sft.store: Field required"),
        ("/nowhere/job.json", "does not exist"),
        ('{"kind": "ppo"}', "job field job: "),
    ],
)
def test_a_malformed_job_ends_in_one_line_before_torch_is_loaded(source: str, message: str) -> None:
    process = trainer("--job", source)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert len(err.splitlines()) == 1 and message in err


def test_job_types_need_no_torch() -> None:
    code = "import sys, trainer.config; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_missing_artifact_ends_in_one_line(world: World) -> None:
    job = world.sft_job().model_copy(update={"store": str(Path(world.store.url).parent / "empty")})
    process = trainer("--job", job.model_dump_json())
    _, err = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(err.splitlines()) == 1 and "materialize tokenizer again" in err


def test_dagster_pipes_gets_metrics_and_the_result(world: World, tmp_path: Path) -> None:
    import base64
    import zlib

    def encoded(value: object) -> str:
        return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()

    context, messages = tmp_path / "context.json", tmp_path / "messages.jsonl"
    context.write_text(
        json.dumps(
            {
                "extras": {},
                "run_id": "r",
                "job_name": None,
                "retry_number": 0,
                "asset_keys": None,
                "code_version_by_asset_key": None,
                "provenance_by_asset_key": None,
                "partition_key": None,
                "partition_key_range": None,
                "partition_time_window": None,
            }
        )
    )
    environment = {
        **os.environ,
        "DAGSTER_PIPES_CONTEXT": encoded({"path": str(context)}),
        "DAGSTER_PIPES_MESSAGES": encoded({"path": str(messages)}),
    }
    command = [sys.executable, "-m", "trainer", "--job", world.sft_job().model_dump_json()]
    subprocess.run(command, env=environment, check=True, capture_output=True, timeout=120)
    sent = [json.loads(line) for line in messages.read_text().splitlines()]
    payloads = [line["params"]["payload"] for line in sent if line["method"] == "report_custom_message"]
    assert any("loss" in payload.get("metrics", {}) for payload in payloads)
    assert payloads[-1]["result"]["checkpoint"]["kind"] == "checkpoint"


def test_help_shows_a_job() -> None:
    process = trainer("--help")
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0 and "kind: sft" in out and "exit status" in out


def test_a_job_survives_json_and_yaml(world: World, tmp_path: Path) -> None:
    job = world.sft_job()
    assert parse_job(job.model_dump_json()) == job == read_job(job.model_dump_json())
    with pytest.raises(TrainingConfigError, match=r"sft\.config\.batch_size.*got 0"):
        parse_job(job.model_dump_json().replace('"batch_size":16', '"batch_size":0'))
    with pytest.raises(TrainingConfigError, match="neither JSON nor YAML"):
        parse_job("{: [")
    with pytest.raises(TrainingConfigError, match="key 'threads' is given twice"):
        parse_job(job.model_dump_json().replace('"threads":', '"threads":3,"threads":'))


LAUNCHER = f"""
import os, subprocess, sys
child = subprocess.Popen(
    [sys.executable, "-m", "trainer", "--job", sys.argv[1]], env=os.environ | {{"{PARENT_VARIABLE}": str(os.getpid())}}
)
child.wait()
"""


def test_a_trainer_ends_when_its_launcher_is_killed(world: World) -> None:
    job = world.sft_job("orphan", max_steps=100_000, evaluate_every=100_000, snapshot_every=5)
    launcher = subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, job.model_dump_json()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    before = len(list(list_artifacts(world.store, "trainer_snapshot")))
    while len(list(list_artifacts(world.store, "trainer_snapshot"))) == before:
        assert launcher.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    launcher.kill()
    _, err = launcher.communicate(timeout=60)  # ends when the trainer, which holds the pipe too, has ended
    assert err.splitlines()[-1] == "trainer: stopped by SIGTERM: run the same job again to continue"


def test_a_trainer_whose_launcher_is_gone_before_it_looks_does_not_start(world: World) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    done = subprocess.run(
        [sys.executable, "-m", "trainer", "--job", world.sft_job("late").model_dump_json()],
        env=os.environ | {PARENT_VARIABLE: str(gone.pid)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 143 and done.stderr.startswith("trainer: stopped by SIGTERM")
