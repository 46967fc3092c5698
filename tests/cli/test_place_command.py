"""`triplane place` as a user types it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from triplane_dagster.cli.app import app
from triplane_dagster.memory import PUBLISHED

FLEET = """
gpus:
  - {node: a, kind: H100-80GB, count: 4}
services:
  policy: {model: policy, context: 32768, sequences: 64}
  judge: {model: judge, context: 8192, sequences: 12, servers: 2}
"""


@pytest.fixture
def fleet(tmp_path: Path) -> Path:
    for name, published in (("policy", "Qwen3-30B-A3B"), ("judge", "Qwen3-4B")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(PUBLISHED[published]))
    (tmp_path / "fleet.yaml").write_text(FLEET)
    return tmp_path / "fleet.yaml"


def test_it_prints_servers_and_the_commands_that_start_them(fleet: Path) -> None:
    said = CliRunner().invoke(app, ["place", str(fleet)]).output
    assert "judge: 12 of 12 sequences of 8192 tokens." in said and "4 of 4 GPUs in use" in said
    assert "a: nvidia-smi mig -i 3 -cgi " in said
    assert f"vllm serve {fleet.parent / 'policy'} --tensor-parallel-size 2 --max-model-len 32768" in said


def test_brackets_in_a_path_are_printed(fleet: Path) -> None:
    (fleet.parent / "policy").rename(fleet.parent / "policy[awq]")
    fleet.write_text(FLEET.replace("model: policy", "model: 'policy[awq]'"))
    assert "vllm serve '" + str(fleet.parent / "policy[awq]") in CliRunner().invoke(app, ["place", str(fleet)]).output


def test_json_names_every_server(fleet: Path) -> None:
    found = json.loads(CliRunner().invoke(app, ["place", str(fleet), "--json"]).output)
    assert found["served"]["judge"] == 12 and found["gpus"] == 4 and found["value"] <= found["bound"]
    assert {each["service"] for each in found["servers"]} == {"policy", "judge"}
    assert (
        sum(each["sequences"] for each in found["servers"] if each["service"] == "policy") == found["served"]["policy"]
    )
