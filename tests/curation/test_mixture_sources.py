"""Sources of a mixture: accepted episodes and files of chats as tokens and roles, and what is refused of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_rows import TASK, byte_pairs, episode, rollouts, tokenizer

from contracts.artifacts import Artifact, ArtifactWriter
from contracts.chat import ChatTokenizer
from contracts.episodes import Outcome, TokenRole
from contracts.store import Store, open_store
from contracts.tasks import Split
from curation.errors import MixtureError
from curation.mixture.accepted import ACCEPTED, REASONS, Graded, build_accepted
from curation.mixture.chats import CHATS, build_chats, encode_chat, encode_row
from curation.mixture.config import ChatsSource, EpisodesSource
from curation.mixture.reserved import Reserved
from curation.rewards import REWARDS
from inference.server.api import Message, Tool
from inference.server.chat import prompt_tokens

GATE = replace(TASK, task_id="g", split=Split.GATE, instruction="make sub() subtract\nnow")
RESERVED = Reserved.of([TASK, GATE])
CALL = {"id": "a", "type": "function", "function": {"name": "read", "arguments": '{"path": "a.py"}'}}
OTHER = {"id": "b", "type": "function", "function": {"name": "list", "arguments": {}}}
CHAT = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": "make add() add"},
    {"role": "assistant", "content": "I look", "tool_calls": [CALL, OTHER]},
    {"role": "tool", "tool_call_id": "b", "content": "a.py"},
    {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "1 x <|im_end|>"}]},
    {"role": "assistant", "content": "done", "refusal": None},
    {"role": "user", "content": "thanks"},
    {"role": "assistant", "content": "bye", "weight": 0},
]


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(str(tmp_path / "store"))


def segments(chat: ChatTokenizer, ids: list[int], roles: list[int]) -> list[tuple[TokenRole, str]]:
    runs = groupby(zip(ids, roles, strict=True), key=lambda pair: pair[1])
    return [(TokenRole(role), chat.decode([token for token, _ in run])) for role, run in runs]


@pytest.mark.parametrize("spaced", [False, True])
def test_only_the_tokens_of_the_assistants_turns_are_trained(spaced: bool) -> None:
    chat = ChatTokenizer(byte_pairs(), spaced=spaced)
    found = encode_chat({"messages": CHAT, "task_id": "t"}, "x", chat)
    glue, blank = ("\n", " ") if spaced else ("", "")
    read, seen = (
        f'<tool_call>{glue}{{"name":{blank}"{name}",{blank}"arguments":{blank}{arguments}}}{glue}</tool_call>'
        for name, arguments in (("read", f'{{"path":{blank}"a.py"}}'), ("list", "{}"))
    )
    answers = [f"<tool_response>{glue}{text}{glue}</tool_response>" for text in ("1 x <|im_end|>", "a.py")]
    begin = "<|im_start|>assistant\n"
    assert segments(chat, found.token_ids, found.token_role) == [
        (
            TokenRole.PROMPT,
            f"<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nmake add() add<|im_end|>\n{begin}",
        ),
        (TokenRole.POLICY, f"I look\n{read}\n{seen}<|im_end|>"),
        (TokenRole.ENVIRONMENT, f"\n<|im_start|>user\n{answers[0]}\n{answers[1]}<|im_end|>\n{begin}"),
        (TokenRole.POLICY, "done<|im_end|>"),
        (TokenRole.ENVIRONMENT, f"\n<|im_start|>user\nthanks<|im_end|>\n{begin}bye<|im_end|>"),
    ]
    assert found.prompts == ["make add() add"] and found.tools == ["read", "list"] and found.task_id == "t"
    assert found.token_ids.count(chat.end_of_turn) == 7, "markup in a tool's result is text"


def test_every_turn_is_trained_after_the_tokens_that_a_server_samples_it_from() -> None:
    chat = tokenizer()
    ids = encode_chat({"messages": CHAT}, "x", chat).token_ids
    in_order = [*CHAT[:3], CHAT[4] | {"content": "1 x <|im_end|>"}, CHAT[3], *CHAT[5:]]
    sent = [
        Message.model_validate({key: value for key, value in each.items() if key not in ("weight", "refusal")})
        for each in in_order
    ]
    for number in (2, 5, 7):
        prompt = prompt_tokens(chat, sent[:number], [])
        assert ids[: len(prompt)] == prompt


@pytest.mark.parametrize("ids", [("", ""), (None, "b")])
def test_results_without_ids_answer_the_calls_in_order(ids: tuple[str | None, str]) -> None:
    turn = {
        "role": "assistant",
        "tool_calls": [call | {"id": each} for call, each in zip((CALL, OTHER), ids, strict=True)],
    }
    answers = [
        {"role": "tool", "tool_call_id": each, "content": text} for each, text in zip(ids, ("one", "two"), strict=True)
    ]
    chat = tokenizer()
    found = encode_chat(said(turn, *answers, DONE), "x", chat)
    text = chat.decode(found.token_ids)
    assert 0 < text.find("<tool_response>one<") < text.find("<tool_response>two<")


def test_tools_are_listed_as_rollouts_list_them() -> None:
    from envd.tools import toolset_named
    from inference.rollouts.config import RolloutConfig
    from inference.rollouts.prompt import first_messages

    chat, tools = tokenizer(), [each.json_schema() for each in toolset_named("").listed.values()]
    rest = [{"role": "user", "content": TASK.instruction}, {"role": "assistant", "content": "done"}]
    for system in ("", "be brief"):
        leading = [{"role": "system", "content": system}] if system else []
        sampled = chat.prompt(first_messages(RolloutConfig(system_prompt=system, tool_prompt=True), TASK))
        for written in (tools, json.dumps(tools)):
            found = encode_chat({"messages": leading + rest, "tools": written}, "x", chat)
            assert found.token_ids[: len(sampled)] == sampled and found.token_role[len(sampled)] == TokenRole.POLICY
    assert Tool.model_validate(tools[0]).function.name


def built(store: Store, path: Path, longest: int | None = None, **config: Any) -> Artifact:
    source = ChatsSource(kind="chats", path=str(path), **config)
    with ArtifactWriter(store, CHATS, "1" * 64, parents={}, config={}, code_version="1") as out:
        return out.commit(build_chats(source, "d", tokenizer(), RESERVED, out, longest))


def lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
    return path


def said(*messages: dict[str, Any], **row: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}, *messages], **row}


DONE = {"role": "assistant", "content": "done"}
CALLS = {"role": "assistant", "tool_calls": [CALL]}
ANSWER = {"role": "tool", "tool_call_id": "a", "content": "x"}


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ("{", "line 2 is not JSON"),
        ("[]", "line 2 is no JSON object"),
        ({}, "line 2 has no messages"),
        ({"messages": [[{"role": "task"}]]}, "line 2 is an exported episode without tokens: export it with --tokens"),
        ({"messages": [DONE]}, "line 2 has no message of the user"),
        (said(), "line 2 has no message of the user that is followed by one of the assistant"),
        (said("text"), "line 2: message 1 is no object"),  # type: ignore[arg-type]
        (said({"role": "developer", "content": "x"}), "line 2: message 1 has the role 'developer'"),
        (said(DONE | {"reasoning_content": "hm"}), "message 1 has the key 'reasoning_content', which is not"),
        (said({"role": "assistant"}), "message 1 has neither content nor tool_calls"),
        (said({"role": "assistant", "content": [{"type": "image_url"}]}), "message 1 has the content .* only text"),
        (said(DONE | {"content": "<tool_call>{}</tool_call>"}), "message 1 has <tool_call> in its content"),
        (said(DONE | {"content": "\ud800"}), "message 1 has a lone surrogate"),
        (said(DONE, task_id="\ud800"), "line 2: task_id has a lone surrogate"),
        (said(DONE, tools=[{"function": {"name": "\ud800"}}]), "line 2: tools has a lone surrogate"),
        (said(DONE, DONE), "message 2 follows another one of the assistant"),
        (said(DONE, {"role": "user", "content": "x"}), "message 2 is the last one and of the role user"),
        (said(DONE, {"role": "tool", "content": "x"}, DONE), "message 2 is a tool's result, but .* has no call"),
        (said(CALLS, {"role": "user", "content": "x"}, DONE), "message 2 follows 1 calls with 1 messages"),
        (said(CALLS, *[{"role": "tool", "content": "x"}] * 2, DONE), "message 3 follows 1 calls with 2 messages"),
        (
            said(CALLS, {"role": "tool", "tool_call_id": "z"}, DONE),
            "message 2 and those after it have no tool_call_id 'a'",
        ),
        (
            said({"role": "assistant", "tool_calls": [CALL, OTHER | {"id": "a"}]}, *[ANSWER] * 2, DONE),
            "message 1 has two calls with the id 'a': give each its own",
        ),
        (
            said({"role": "assistant", "tool_calls": [CALL, OTHER]}, *[ANSWER] * 2, DONE),
            "message 2 and those after it have no tool_call_id 'b'",
        ),
        (said({"role": "assistant", "tool_calls": [{"function": {}}]}), "message 1 has a call that is not"),
        (
            said({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"x": NaN}'}}]}),
            "message 1 calls f with arguments that are no JSON object",
        ),
        (said(DONE | {"weight": "0"}), "message 1 has the weight '0': write 0 or 1"),
        (said(CALLS, {"role": "tool", "tool_call_id": ["a"]}, DONE), r"message 2 has the tool_call_id \['a'\]"),
        ({"sequences": [{}], "messages": [3], "reward": {"solved": True}}, "line 2 has other than one sequence"),
        (said(DONE, reward=3), "line 2: reward is 3"),
        (said(DONE, tools=[1]), "line 2: tools is no list"),
        (said(DONE, task_id=3), "line 2: task_id is 3"),
        (said(DONE | {"weight": 0}), "line 2 has no turn of the assistant to train on"),
        (said(DONE | {"content": "x" * 600}), "line 2 has 6.. tokens, the model accepts 512: set base.sft.truncation"),
        (said(DONE, task_id="g"), "line 2 is of task g of the split gate, which this experiment measures: remove"),
        ({"messages": [{"role": "user", "content": " make sub()  subtract now"}, DONE]}, "line 2 is of task g of the"),
        ({"messages": [{"role": "user", "content": GATE.instruction}, DONE], "task_id": "mine"}, "line 2 is of task g"),
        ({"sequences": [], "messages": [], "reward": {"solved": True}}, "line 2 has other than one sequence"),
    ],
)
def test_a_bad_row_is_named_with_file_line_and_message(row: Any, fault: str, store: Store, tmp_path: Path) -> None:
    with pytest.raises(MixtureError, match=fault) as error:
        built(store, lines(tmp_path / "own.jsonl", said(DONE), row), longest=512)
    assert str(error.value).startswith(f"{tmp_path}/own.jsonl line 2") and "\n" not in str(error.value)


def test_a_training_task_with_the_prompt_of_a_reserved_one_is_not_reserved() -> None:
    twin = replace(GATE, task_id="u", split=Split.TRAIN)
    reserved = Reserved.of([GATE, twin])
    assert reserved.task_of("u", [GATE.instruction]) is None
    assert reserved.task_of("other", [GATE.instruction]) == "task g of the split gate"


def test_reserved_rows_are_left_out_on_request_and_counted(store: Store, tmp_path: Path) -> None:
    path = lines(tmp_path / "own.jsonl", *(said(DONE, task_id=name) for name in ("t", "g", "a", "b")))
    made = built(store, path, reserved="leave_out")
    assert made.meta["left_out"] == {"reserved": 1}
    train, held = (set(made.table(f"{name}.parquet")["task_id"].to_pylist()) for name in ("train", "validation"))
    assert train | held == {"t", "a", "b"} and not train & held and len(held) == 1
    assert made.table("episodes.parquet")["task_id"].to_pylist() == ["t", "a", "b"]
    with pytest.raises(MixtureError, match=r"has no row to train on \(1 reserved\)"):
        built(store, lines(tmp_path / "all.jsonl", said(DONE, task_id="g")), reserved="leave_out")


def test_rows_of_one_task_are_never_in_both_files(store: Store, tmp_path: Path) -> None:
    rows = [said(DONE, task_id=f"task-{number % 40}") for number in range(400)]
    made = built(store, lines(tmp_path / "own.jsonl", *rows))
    train, held = (made.table(f"{name}.parquet")["task_id"].to_pylist() for name in ("train", "validation"))
    assert (len(train), len(held)) == (360, 40) and not set(train) & set(held)


@pytest.mark.parametrize(
    ("tasks", "held"),
    [
        ({"easy": 500, "hard3": 1}, {"hard3"}),
        ({"easy": 300, "hard1": 30, "hard2": 70}, {"hard1"}),
        ({"a": 20, "b": 19}, {"b"}),  # neither is a tenth
        ({"only": 20}, {"only"}),  # trained too
    ],
)
def test_a_task_with_most_rows_of_a_source_is_trained(
    tasks: dict[str, int], held: set[str], store: Store, tmp_path: Path
) -> None:
    rows = [said(DONE, task_id=name) for name, count in tasks.items() for _ in range(count)]
    made = built(store, lines(tmp_path / "own.jsonl", *rows))
    train, validation = (set(made.table(f"{name}.parquet")["task_id"].to_pylist()) for name in ("train", "validation"))
    assert validation == held and train == (set(tasks) - held or held)


def test_parquet_of_chats_is_read_unless_it_merges_arguments(store: Store, tmp_path: Path) -> None:
    turn = CALLS | {"content": ""}
    rows = [said(turn, task_id=str(number)) for number in range(3)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "own.parquet")
    made = built(store, tmp_path / "own.parquet")
    same = encode_chat(said(turn), "x", tokenizer()).token_ids
    assert made.table("train.parquet")["token_ids"].to_pylist() == [same, same]
    merged = [said({"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1}}}]})]
    pq.write_table(pa.Table.from_pylist(merged), tmp_path / "merged.parquet")
    with pytest.raises(MixtureError, match="has arguments as a struct: write it as JSON text"):
        built(store, tmp_path / "merged.parquet")
    times = pa.array([1, 2, 3], pa.timestamp("ns"))  # no datetime holds them
    pq.write_table(pa.Table.from_pylist(rows).append_column("made", times), tmp_path / "times.parquet")
    assert built(store, tmp_path / "times.parquet").table("train.parquet")["token_ids"].to_pylist() == [same, same]
    bad = pa.array([b"\xff"] * 3)
    text = pa.Array.from_buffers(pa.string(), 3, bad.buffers())
    pq.write_table(pa.Table.from_pylist(rows).append_column("task", text), tmp_path / "bad.parquet")
    with pytest.raises(MixtureError, match=r"bad\.parquet can't be read \('utf-8' codec"):
        built(store, tmp_path / "bad.parquet")
    (tmp_path / "text.parquet").write_text("x")
    with pytest.raises(MixtureError, match=r"text\.parquet can't be read"):
        built(store, tmp_path / "text.parquet")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 400)
    | st.floats()
    | st.text(max_size=4)
    | st.sampled_from(["assistant", "\ud800"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["role", "name", "\ud800"]), inner, max_size=2)
    ),
    max_leaves=5,
)


@settings(max_examples=600, deadline=None)
@given(st.data())
def test_whatever_a_row_holds_it_is_encoded_or_refused_in_one_line(data: st.DataObject) -> None:
    chat = said(*CHAT[2:], task_id="t", tools=[{"function": {"name": "read"}}])
    row = data.draw(st.sampled_from([chat, exported("1" * 32)]))
    row = json.loads(json.dumps(row))
    place = row
    while True:  # replace or remove one value anywhere in the row
        key = data.draw(st.sampled_from(sorted(place) if isinstance(place, dict) else range(len(place))))
        if isinstance(place[key], dict | list) and place[key] and data.draw(st.booleans()):
            place = place[key]
            continue
        if data.draw(st.booleans()):
            place[key] = data.draw(JSON)
        else:
            del place[key]
        break
    try:
        found = encode_row(row, "own.jsonl line 1", tokenizer())
    except MixtureError as error:
        assert str(error).startswith("own.jsonl line 1") and "\n" not in str(error) and str(error).encode()
    else:
        assert found is None or "".join([*found.prompts, *found.tools, str(found.task_id)]).encode()
        assert found is None or (len(found.token_ids) == len(found.token_role) and found.token_ids)


# accepted episodes


def graded(store: Store, verdicts: Mapping[str, tuple[bool | None, str]], **given: Any) -> Graded:
    """An iteration whose episodes have these (solved, verdict) by id. given: outcomes, tasks, quarantined."""
    outcomes, tasks = given.get("outcomes", {}), given.get("tasks", {})
    played = [
        replace(episode(name, outcome=outcomes.get(name, Outcome.COMPLETED)), task_id=tasks.get(name, "t"))
        for name in verdicts
    ]
    rows = [{"episode_id": name, "solved": solved, "verdict": said} for name, (solved, said) in verdicts.items()]
    with ArtifactWriter(store, "rewards", "2" * 64, parents={}, config={}, code_version="1") as out:
        out.add_table("rewards.parquet", pa.Table.from_pylist(rows, schema=REWARDS))
        rewards = out.commit()
    return Graded("one/0000", rollouts(store, played), rewards, given.get("quarantined", ()))


def accepted(store: Store, iteration: Graded, **config: Any) -> Artifact:
    source = EpisodesSource(kind="episodes", experiment="one", iterations=("0000",), **config)
    with ArtifactWriter(store, ACCEPTED, "3" * 64, parents={}, config={}, code_version="1") as out:
        return out.commit(build_accepted([iteration], source, tokenizer(), RESERVED, out))


SOLVED = (True, "completed")


def test_only_solved_episodes_that_nobody_doubts_are_accepted_with_their_own_tokens(store: Store) -> None:
    verdicts = {
        "good": SOLVED,
        "also": SOLVED,
        "wrong": (False, "completed"),
        "forged": (False, "tampered"),
        "forged_solved": (True, "tampered"),
        "unknown": (None, "not_graded"),
        "long": SOLVED,
        "doubted": SOLVED,
        "gate": SOLVED,
    }
    outcomes = {"long": Outcome.TRUNCATED}
    given = graded(store, verdicts, outcomes=outcomes, tasks={"gate": "g"}, quarantined={"doubted"})
    made = accepted(store, given, reserved="leave_out")
    reasons = {row["episode_id"]: row["reason"] for row in made.table("members.parquet").to_pylist()}
    assert reasons == {
        "good": None,
        "also": None,
        "wrong": "not_solved",
        "forged": "cheated",
        "forged_solved": "cheated",
        "unknown": "not_graded",
        "long": "not_ended",
        "doubted": "quarantined",
        "gate": "reserved",
    }
    rows = made.table("train.parquet").to_pylist()
    assert sorted(row["episode_id"] for row in rows) == ["also", "good"]
    (sequence,) = episode("good").sequences
    assert rows[0]["token_ids"] == sequence.token_ids and rows[0]["token_role"] == sequence.token_role
    assert made.meta["accepted"] == 2 and made.meta["left_out"]["cheated"] == 2


def test_an_episode_of_a_reserved_task_is_refused_by_id_and_by_prompt(store: Store) -> None:
    with pytest.raises(MixtureError, match="episode e of one/0000 is of task g of the split gate"):
        accepted(store, graded(store, {"e": SOLVED}, tasks={"e": "g"}))
    foreign = Reserved.of([replace(TASK, task_id="mine", split=Split.HELD_OUT)])
    source = EpisodesSource(kind="episodes", experiment="one", iterations=("0000",))
    with (
        ArtifactWriter(store, ACCEPTED, "4" * 64, parents={}, config={}, code_version="1") as out,
        pytest.raises(MixtureError, match="is of task mine of the split held_out"),
    ):
        build_accepted([graded(store, {"e": SOLVED})], source, tokenizer(), foreign, out)


def test_at_most_so_many_episodes_of_a_task_are_accepted(store: Store) -> None:
    tasks = {f"e{number}": "t" if number < 5 else "other" for number in range(6)}
    made = accepted(store, graded(store, dict.fromkeys(tasks, SOLVED), tasks=tasks), per_task=2)
    members = made.table("members.parquet").to_pylist()
    assert [row["reason"] for row in members].count("surplus") == 3
    assert sum(row["kept"] for row in members if tasks[row["episode_id"]] == "t") == 2
    assert next(row["kept"] for row in members if row["episode_id"] == "e5")


def test_no_accepted_episode_is_an_error_that_says_why(store: Store) -> None:
    with pytest.raises(
        MixtureError, match=r"no episode of one/0000 is accepted \(2 not_solved\): leave the source out"
    ):
        accepted(store, graded(store, dict.fromkeys("ab", (False, "completed"))))
    assert "tampered" not in REASONS, "a dataset's reasons of counted episodes would taint checkpoints"


# exported episodes


def exported(name: str, *, solved: bool = True, **change: Any) -> dict[str, Any]:
    (sequence,) = episode(name).sequences
    chat = tokenizer()
    names = {TokenRole.PROMPT: "task", TokenRole.POLICY: "policy", TokenRole.ENVIRONMENT: "environment"}
    texts = [
        {"role": names[role], "text": text} for role, text in segments(chat, sequence.token_ids, sequence.token_role)
    ]
    tokens = {"token_ids": sequence.token_ids, "token_role": sequence.token_role}
    return {
        "episode": name,
        "task": "t",
        "messages": [texts],
        "tool_calls": [{"name": "edit"}],
        "reward": {"solved": solved, "verdict": "completed"},
        "sequences": [tokens | change],
    }


def test_exported_episodes_keep_their_tokens_and_ids_and_unsolved_ones_are_left_out(
    store: Store, tmp_path: Path
) -> None:
    rows = [exported("1" * 32), exported("2" * 32, solved=False), exported("3" * 32) | {"reward": None}]
    made = built(store, lines(tmp_path / "own.jsonl", *rows))
    (row,) = made.table("train.parquet").to_pylist()
    assert (row["token_ids"], row["token_role"]) == (
        rows[0]["sequences"][0]["token_ids"],
        rows[0]["sequences"][0]["token_role"],
    )
    assert made.meta["left_out"] == {"not_solved": 2}
    assert made.table("members.parquet").to_pylist() == [{"episode_id": "1" * 32, "kept": True, "reason": None}]


def test_exported_tokens_of_another_tokenizer_are_refused(store: Store, tmp_path: Path) -> None:
    row = exported("1" * 32)
    for change, fault in (
        ({"token_ids": [token ^ 1 for token in row["sequences"][0]["token_ids"]]}, "tokens whose text differs"),
        ({"token_ids": [100_000] * len(row["sequences"][0]["token_ids"])}, "no tokens and roles of this tokenizer"),
        ({"token_role": [1]}, "no tokens and roles of this tokenizer"),
    ):
        with pytest.raises(MixtureError, match=f"line 1 has {fault}"):
            built(store, lines(tmp_path / "own.jsonl", exported("1" * 32, **change)))


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"episode": "run1-7"}, "episode is 'run1-7': write the 32 digits of an export"),
        ({"episode": "1" * 31}, "episode is"),
        ({"episode": "1" * 32 + "\n"}, "episode is"),
        ({"task": "\ud800"}, "task has a lone surrogate"),
        ({"tool_calls": [{"name": "\ud800"}]}, "tool_calls has a lone surrogate"),
    ],
)
def test_names_in_an_export_that_no_store_holds_are_refused(
    change: dict[str, Any], fault: str, store: Store, tmp_path: Path
) -> None:
    with pytest.raises(MixtureError, match=f"line 1: {fault}"):
        built(store, lines(tmp_path / "own.jsonl", exported("1" * 32) | change))
