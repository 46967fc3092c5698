"""What an experiment's file may say of reward components, and what it is told when that is wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from contracts.artifacts import ArtifactRef
from contracts.store import open_store
from curation.rewards import RewardConfig
from ops.graph import REWARDS
from ops.state import IterationState
from resources.errors import ExperimentError
from resources.experiment import Experiment, parse_experiment
from triplane_dagster.cli.app import app

JUDGE = {"kind": "judge", "name": "review", "weight": 1, "model": "m", "endpoint": {"url": "http://judge:8000/v1"}}
SHARE = {"kind": "tests", "name": "share", "weight": 1}


def composed(*components: dict[str, Any]) -> Experiment:
    return parse_experiment({"name": "one", "rewards": {"components": list(components)}})


def rewards_key(experiment: Experiment, folder: Path) -> str:
    refs = {kind: ArtifactRef(kind=kind, key="0" * 64, digest="1" * 64) for kind in ("rollouts", "task_suite")}
    return REWARDS.work_on(IterationState(experiment, open_store(str(folder))), refs).key


@pytest.mark.parametrize(
    ("component", "says"),
    [
        (SHARE | {"wieght": 2}, r"components.0.wieght is not a field: did you mean weight\?"),
        (
            JUDGE | {"endpoint": {"url": "http://h/v1", "timeout": 3}},
            r"endpoint.timeout is not a field: did you mean timeout_s\?",
        ),
        (SHARE | {"kind": "lenght"}, "components.0 = .*'lenght'.*'length'"),
        (SHARE | {"name": "Share!"}, "components.0.name = 'Share!'"),
        (SHARE | {"name": "solved"}, "the name solved is used twice: give each component its own"),
        (SHARE | {"weight": float("nan")}, "components.0.weight = nan"),
        (SHARE | {"clip_low": 1, "clip_high": 0}, "clip_low 1.0 exceeds clip_high 0.0: swap them"),
        (
            {"kind": "length", "name": "l", "weight": 1, "budget": 5, "cushion": 6},
            "cushion 6 exceeds budget 5: lower it",
        ),
        ({"kind": "trace", "name": "t", "weight": 1, "rule": "luck"}, "components.0.rule = 'luck'"),
        (JUDGE | {"extra": {"top_p": float("inf")}}, "components.0.extra.top_p.* = inf: Input should be a finite"),
        (JUDGE | {"template": "{dif}"}, "template names {dif}: known are {task}, {diff}"),
        (JUDGE | {"template": "how good?"}, "template uses no part of the episode"),
        (JUDGE | {"lowest": 5, "highest": 5}, "lowest 5.0 is not below highest 5.0"),
        (JUDGE | {"endpoint": {"url": "ftp://h/v1"}}, "endpoint.url must be http"),
        (JUDGE | {"kind": "reward_model", "api": "score", "input": "tokens"}, "api score compares two texts"),
    ],
)
def test_a_wrong_component_is_one_line_with_the_fix(component: dict[str, Any], says: str) -> None:
    with pytest.raises(ExperimentError, match=says) as refused:
        composed(component)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "endpoint", [{"url": "http://user:s3cret-key@judge/v1"}, {"url": "http://judge/v1", "api_key_env": "s3cret-key"}]
)
def test_a_secret_written_into_the_file_is_refused_and_not_repeated(endpoint: dict[str, str]) -> None:
    with pytest.raises(ExperimentError, match=r"endpoint.*\(not shown\)") as refused:
        composed(JUDGE | {"endpoint": endpoint})
    assert "s3cret" not in str(refused.value)


def test_two_components_of_one_name_are_refused() -> None:
    with pytest.raises(ExperimentError, match="the name share is used twice"):
        composed(SHARE, SHARE)


def test_components_move_the_key_of_the_rewards_and_addresses_do_not(tmp_path: Path) -> None:
    plain, judged = composed(), composed(JUDGE)
    moved = composed(JUDGE | {"endpoint": {"url": "https://other/v1", "api_key_env": "KEY", "attempts": 1}})
    heavier = composed(JUDGE | {"weight": 2})
    assert rewards_key(plain, tmp_path) == rewards_key(parse_experiment({"name": "one"}), tmp_path)
    assert rewards_key(judged, tmp_path) == rewards_key(moved, tmp_path)
    assert len({rewards_key(each, tmp_path) for each in (plain, judged, heavier)}) == 3


def test_only_a_component_that_pays_for_tests_moves_the_key_with_their_confirmation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiments = [composed(), composed(JUDGE), composed(JUDGE, SHARE)]
    before = [rewards_key(each, tmp_path) for each in experiments]
    monkeypatch.setattr("curation.rewards.config.CONFIRMED_VERSION", "next")
    moved = [rewards_key(each, tmp_path) != key for each, key in zip(experiments, before, strict=True)]
    assert moved == [False, False, True]
    assert experiments[1].rewards.slice().keys() == RewardConfig().slice().keys() | {"components", "components_version"}


def test_an_experiment_with_components_survives_being_written_and_read() -> None:
    experiment = composed(SHARE, JUDGE)
    assert Experiment.model_validate_json(experiment.model_dump_json()) == experiment


def test_the_command_line_lists_the_rules() -> None:
    done = CliRunner().invoke(app, ["experiments", "raters", "--json"])
    assert done.exit_code == 0, done.output
    assert "read_before_edit" in [row["rule"] for row in json.loads(done.stdout)]
