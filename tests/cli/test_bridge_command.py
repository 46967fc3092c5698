"""`triplane bridge` refuses what it can't serve in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from contracts.errors import ArtifactMissing, ConfigError
from curation.rewards.config import RewardConfig
from curation.verify import Verifier
from envd.client import SandboxClient
from ops.bridge_hosting import EpisodeGrader
from triplane_dagster.cli.app import app


def test_bridge_without_a_policy_names_the_missing_asset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    done = CliRunner().invoke(app, ["bridge", "-e", "quickstart"])
    assert done.exit_code != 0 and isinstance(done.exception, (ArtifactMissing, SystemExit))
    assert "base_policy" in f"{done.exception}{done.output}"


def test_rewards_that_ask_a_model_are_refused() -> None:
    endpoint = {"url": "http://127.0.0.1:1/v1"}
    asking = {"kind": "judge", "name": "style", "model": "m", "weight": 1.0, "endpoint": endpoint}
    config = RewardConfig.model_validate({"components": [asking]})
    with pytest.raises(ConfigError, match=r"rewards.components\[style\] asks a model"):
        EpisodeGrader(Verifier(SandboxClient("unix:/nowhere"), None), config)
