"""Reward models over HTTP, in the shapes of vLLM's /classify, /score and /pooling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from judge_server import Reply, judge_server
from reward_rows import TASK, episode, grade, rollouts

from contracts.store import LocalStore
from curation.rewards import RewardConfig

CLASSIFIED = {"index": 0, "label": "LABEL_1", "probs": [0.25, 0.75], "num_classes": 2}
SCORED = {"index": 0, "object": "score", "score": 0.625}
POOLED_TOKENS = {"index": 0, "object": "pooling", "data": [[0.5], [-1.0], [2.5]]}
POOLED = {"index": 0, "object": "pooling", "data": [-3.5]}


def scoring(url: str, api: str, **changes: Any) -> RewardConfig:
    component = {
        "kind": "reward_model",
        "name": "taste",
        "weight": 1.0,
        "model": "rm",
        "api": api,
        **changes,
        "endpoint": {"url": f"{url}/{api}", "attempts": 1},
    }
    return RewardConfig.model_validate({"solved": 0, "valid": 0, "max_ungraded": 1.0, "components": [component]})


@pytest.mark.parametrize(
    ("api", "item", "changes", "value"),
    [
        ("classify", CLASSIFIED, {}, 0.75),
        ("classify", CLASSIFIED, {"index": 0}, 0.25),
        ("classify", CLASSIFIED, {"index": 2}, None),
        ("score", SCORED, {}, 0.625),
        ("pooling", POOLED_TOKENS, {}, 2.5),
        ("pooling", POOLED, {"clip_low": -1.0}, -1.0),
        ("pooling", {"index": 0, "data": []}, {}, None),
        ("pooling", {"index": 0, "data": "AACAPw=="}, {}, None),
        ("score", {"index": 0, "score": None}, {}, None),
        ("score", {"index": 0, "score": 10**400}, {}, None),
    ],
)
def test_a_score_is_read_from_the_routes_own_shape(
    tmp_path: Path, api: str, item: dict[str, Any], changes: dict[str, Any], value: float | None
) -> None:
    store = LocalStore(tmp_path)
    with judge_server(lambda path, body: (200, {"object": "list", "model": "rm", "data": [item]})) as server:
        config = scoring(server.url, api, **changes)
        played = rollouts(store, [episode("a")])
        graded = grade(store, played, config)
        assert graded.rewards["reward"].to_pylist() == [value]
        grade(store, played, config)
    assert len(server.asked) == 1 and server.asked[0]["model"] == "rm"


def test_what_is_scored_is_text_a_conversation_or_the_tokens_themselves(tmp_path: Path) -> None:
    paths: list[str] = []

    def behave(path: str, body: dict[str, Any]) -> Reply:
        paths.append(path)
        return 200, {"data": [CLASSIFIED | SCORED]}

    store = LocalStore(tmp_path)
    one = episode("a", says="I will add")
    played = rollouts(store, [one])
    with judge_server(behave) as server:
        grade(store, played, scoring(server.url, "classify", activation=False))
        grade(store, played, scoring(server.url, "classify", input="chat", template="{diff}"))
        grade(store, played, scoring(server.url, "classify", input="tokens"))
        grade(store, played, scoring(server.url, "score", template="{diff}"))
    text, chat, tokens, pair = server.asked
    assert "I will add" in text["input"] and TASK.instruction in text["input"] and text["use_activation"] is False
    assert chat["messages"] == [
        {"role": "user", "content": TASK.instruction},
        {"role": "assistant", "content": "right"},
    ]
    assert tokens["input"] == one.sequences[0].token_ids and "use_activation" not in tokens
    assert (pair["text_1"], pair["text_2"]) == (TASK.instruction, "right")
    assert paths == ["/classify", "/classify", "/classify", "/score"]


def test_a_route_of_another_shape_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    with judge_server(lambda path, body: (200, {"data": [SCORED]})) as server:
        graded = grade(store, rollouts(store, [episode("a")]), scoring(server.url, "classify"))
    assert "no data[0].probs: not an answer of vLLM's classify route" in graded.evidence["reason"][0].as_py()
    assert not store.list("judgements/")
