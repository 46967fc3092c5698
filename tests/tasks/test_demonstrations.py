import asyncio
import re
from random import Random
from typing import Any

import pyarrow as pa
import pytest

from contracts.artifacts import Artifact
from contracts.chat import TURN_END, ChatTokenizer, message_views, parse_turn
from contracts.episodes import TokenRole
from contracts.store import Store
from contracts.tasks import Split
from curation.tasks.bugs import draw_bugs
from curation.tasks.compositions import deal_chains, families_of, family_name
from curation.tasks.demonstrations import (
    DEMONSTRATIONS,
    DemonstrationConfig,
    build_demonstrations,
    render_demonstrations,
    usual_mistakes,
)
from curation.tasks.expert import DONE, expert_episode
from curation.tasks.names import function_names
from curation.tasks.operations import OPERATIONS, places, trained
from curation.tasks.suite import TaskSuiteConfig, make_task
from envd.client import SandboxClient, ToolCall

SYMBOLS = {each.symbol for each in OPERATIONS}
CONFIG = DemonstrationConfig(count=1400, validation_count=140)


@pytest.fixture(scope="module")
def tables(tokenizer: ChatTokenizer) -> tuple[pa.Table, pa.Table]:
    return render_demonstrations(CONFIG, 0, tokenizer)


@pytest.mark.slow
def test_an_episode_costs_at_most_135_tokens_on_average_and_256_at_most(tables: tuple[pa.Table, pa.Table]) -> None:
    lengths = [len(ids) for ids in tables[0]["token_ids"].to_pylist()]
    assert sum(lengths) / len(lengths) < 135
    assert max(lengths) < 256


def test_rows_have_the_schema_and_one_role_a_token(tables: tuple[pa.Table, pa.Table]) -> None:
    for table in tables:
        assert table.schema == DEMONSTRATIONS
        assert (
            table["token_ids"].combine_chunks().value_lengths() == table["token_role"].combine_chunks().value_lengths()
        )
        assert set(table["token_role"].combine_chunks().flatten().to_pylist()) == {0, 1, 2}


def test_the_teacher_is_right_or_usually_mistaken_as_often_as_configured(
    tables: tuple[pa.Table, pa.Table], tokenizer: ChatTokenizer
) -> None:
    train, validation = tables
    assert abs(sum(train["clean"].to_pylist()) / len(train) - CONFIG.right_share) < 0.05
    assert all(validation["clean"].to_pylist())
    mistakes = usual_mistakes(CONFIG.seed)
    usual = sum(_written(row, tokenizer) == mistakes[row["family"]].symbol for row in train.to_pylist())
    assert abs(usual / len(train) - CONFIG.mistaken_share) < 0.05


def test_usual_mistakes_give_every_operation_of_a_place_to_another_one() -> None:
    mistakes = usual_mistakes(5)
    for place in ("inner", "middle", "outer"):
        own = {each: mistakes[family_name((place, each))] for each in trained(place)}
        assert set(own.values()) == set(own)
        assert all(one is not other for one, other in own.items())


def test_shares_above_one_are_refused() -> None:
    with pytest.raises(ValueError, match="exceed 1 in sum: lower one"):
        DemonstrationConfig(right_share=0.6, mistaken_share=0.5)


def test_validation_holds_no_task_of_training_and_all_families(tables: tuple[pa.Table, pa.Table]) -> None:
    train, validation = (set(table["task_id"].to_pylist()) for table in tables)
    assert (len(train), len(validation)) == (CONFIG.count, CONFIG.validation_count)
    assert not train & validation
    assert set(tables[1]["family"].to_pylist()) == {family_name(family) for family in families_of(Split.TRAIN)}


def test_every_policy_turn_parses_and_the_last_says_done(
    tables: tuple[pa.Table, pa.Table], tokenizer: ChatTokenizer
) -> None:
    several, depths = 0, set()
    for row in tables[0].slice(0, 300).to_pylist():
        turns = _policy_turns(row, tokenizer)
        parsed = [parse_turn(turn) for turn in turns]
        assert not [turn.error for turn in parsed if turn.error]
        reads = [{call.name for call in turn.calls} for turn in parsed[:-2]]
        assert reads == [{"read"}] * len(reads)
        assert [[call.name for call in turn.calls] for turn in parsed[-2:]] == [["edit"], []]
        assert turns[-1] == DONE
        several += len(parsed[0].calls) > 1
        depths.add(len(reads))
    assert several > 0
    assert depths == {1, 2, 3}


def test_a_mistaken_answer_changes_nothing_but_the_operation_of_the_line_it_names(
    tables: tuple[pa.Table, pa.Table], tokenizer: ChatTokenizer
) -> None:
    for row in tables[0].slice(0, 300).to_pylist():
        views = message_views(tokenizer, row["token_ids"], row["token_role"])
        edit = parse_turn(_policy_turns(row, tokenizer)[-2]).calls[0]
        shown = next(str(view["text"]) for view in reversed(views[:-3]) if view["role"] == TokenRole.ENVIRONMENT)
        (before,) = (
            line
            for line in re.split(r"\n|</?tool_response>", shown)
            if line.startswith(f"{edit.arguments['line']} ") and "return" in line
        )
        before, after = before.split(" ", 1)[1].split(" "), str(edit.arguments["new"]).split(" ")
        assert [word for word in before if word not in SYMBOLS] == [word for word in after if word not in SYMBOLS]


def test_a_note_compares_what_the_instruction_wants_with_what_the_file_has_and_decides_the_next_call() -> None:
    for bug in draw_bugs(60, Split.TRAIN, 0, Random("notes"), set()):
        first, *turns = expert_episode(bug, bug.right).turns
        assert first.note == ""
        for number, turn in enumerate(turns):
            want, have = re.fullmatch(r"want (.+) have (\S+) here", turn.note).groups()  # type: ignore[union-attr]
            index = len(bug.chain) - 1 - number
            assert f" {want} {bug.arguments[index + 1]}" in bug.instruction
            assert f" {have} {bug.arguments[index + 1]}" in (first, *turns)[number].responses[0]
            agree = next(each for each in OPERATIONS if each.word == want).symbol == have
            assert [call.name for call in turn.calls] == (["read"] if agree else ["edit"])


def test_no_demonstration_shows_a_held_out_composition_or_an_operation_in_an_unseen_place() -> None:
    held_out = {(len(chain), chain[:2]) for chain in deal_chains(0)[Split.HELD_OUT]}
    for bug in draw_bugs(3000, Split.TRAIN, 0, Random("demonstrated"), set()):
        assert (len(bug.chain), bug.chain[:2]) not in held_out
        for place, each in [*zip(places(len(bug.chain)), bug.chain, strict=True), (bug.place, bug.wrong)]:
            assert each in trained(place)


def test_the_same_seed_gives_the_same_artifact_and_names_only_of_the_train_split(
    tokenizer_artifact: Artifact, shared_store: Store, tokenizer: ChatTokenizer
) -> None:
    config = DemonstrationConfig(count=200, validation_count=20)
    artifact = build_demonstrations(config, TaskSuiteConfig(), tokenizer_artifact, shared_store)
    again = render_demonstrations(config, 0, tokenizer)
    assert artifact.table("train.parquet").equals(again[0])
    assert artifact.table("validation.parquet").equals(again[1])
    gate = {name for split, names in function_names(0).items() for name in names if split is not Split.TRAIN}
    texts = [tokenizer.decode(ids) for ids in again[0]["token_ids"].to_pylist()]
    assert not [text for text in texts if any(f"def {name}(" in text for name in gate)]


def test_the_suites_other_settings_do_not_render_demonstrations_anew(
    tokenizer_artifact: Artifact, shared_store: Store
) -> None:
    config = DemonstrationConfig(count=30, validation_count=5)
    first = build_demonstrations(config, TaskSuiteConfig(), tokenizer_artifact, shared_store)
    assert build_demonstrations(config, TaskSuiteConfig(train=9), tokenizer_artifact, shared_store).ref == first.ref


def test_real_sandboxes_answer_the_expert_word_for_word_and_its_diff_is_the_reference(envd_address: str) -> None:
    bugs = draw_bugs(22, Split.TRAIN, 0, Random("replay"), set())

    async def replay() -> None:
        async with SandboxClient(envd_address) as client:
            for bug in bugs:
                task = make_task(bug, Split.TRAIN)
                episode = expert_episode(bug, bug.right, parallel=bug.line == 3)
                sandbox = await client.create(await client.put_template(task.files))
                for turn in episode.turns:
                    calls = [ToolCall(call.name, call.arguments) for call in turn.calls]
                    assert [result.text for result in await sandbox.batch(calls)] == list(turn.responses)
                assert await sandbox.finish() == task.reference_diff

    asyncio.run(replay())


def _policy_turns(row: dict[str, Any], tokenizer: ChatTokenizer) -> list[str]:
    views = message_views(tokenizer, row["token_ids"], row["token_role"])
    return [str(view["text"]).removesuffix(TURN_END) for view in views if view["role"] == TokenRole.POLICY]


def _written(row: dict[str, Any], tokenizer: ChatTokenizer) -> str:
    """The operator that the demonstration's edit writes."""
    new = str(parse_turn(_policy_turns(row, tokenizer)[-2]).calls[0].arguments["new"])
    (symbol,) = (word for word in new.split(" ") if word in SYMBOLS)
    return symbol
