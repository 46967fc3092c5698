import asyncio
from random import Random

import pyarrow as pa
import pytest

from contracts.artifacts import Artifact
from contracts.chat import TURN_END, ChatTokenizer, message_views, parse_turn
from contracts.episodes import TokenRole
from contracts.store import Store
from contracts.tasks import Split
from curation.tasks.bugs import draw_bugs
from curation.tasks.demonstrations import (
    DEMONSTRATIONS,
    DemonstrationConfig,
    build_demonstrations,
    render_demonstrations,
)
from curation.tasks.expert import DONE, open_workbench
from curation.tasks.families import FAMILIES
from curation.tasks.names import name_pools
from curation.tasks.suite import TaskSuiteConfig, make_task
from envd.client import SandboxClient, ToolCall

CONFIG = DemonstrationConfig(count=1400, validation_count=140)


@pytest.fixture(scope="module")
def tables(tokenizer: ChatTokenizer) -> tuple[pa.Table, pa.Table]:
    return render_demonstrations(CONFIG, 0, tokenizer)


def test_an_episode_costs_at_most_80_tokens_on_average_and_130_at_most(tables: tuple[pa.Table, pa.Table]) -> None:
    lengths = [len(ids) for ids in tables[0]["token_ids"].to_pylist()]
    assert sum(lengths) / len(lengths) < 80
    assert max(lengths) < 130


def test_rows_have_the_schema_and_one_role_a_token(tables: tuple[pa.Table, pa.Table]) -> None:
    for table in tables:
        assert table.schema == DEMONSTRATIONS
        assert (
            table["token_ids"].combine_chunks().value_lengths() == table["token_role"].combine_chunks().value_lengths()
        )
        assert set(table["token_role"].combine_chunks().flatten().to_pylist()) == {0, 1, 2}


def test_the_share_of_right_answers_is_the_configured_one(tables: tuple[pa.Table, pa.Table]) -> None:
    train, validation = tables
    share = sum(train["clean"].to_pylist()) / len(train)
    assert abs(share - CONFIG.clean_share) < 0.05
    assert all(validation["clean"].to_pylist())


def test_validation_holds_no_task_of_training_and_all_families(tables: tuple[pa.Table, pa.Table]) -> None:
    train, validation = (set(table["task_id"].to_pylist()) for table in tables)
    assert (len(train), len(validation)) == (CONFIG.count, CONFIG.validation_count)
    assert not train & validation
    assert set(tables[1]["family"].to_pylist()) == {family.name for family in FAMILIES}


def test_every_policy_turn_parses_and_the_last_says_done(
    tables: tuple[pa.Table, pa.Table], tokenizer: ChatTokenizer
) -> None:
    several = 0
    for row in tables[0].slice(0, 300).to_pylist():
        views = message_views(tokenizer, row["token_ids"], row["token_role"])
        turns = [str(view["text"]).removesuffix(TURN_END) for view in views if view["role"] == TokenRole.POLICY]
        parsed = [parse_turn(turn) for turn in turns]
        assert not [turn.error for turn in parsed if turn.error]
        assert [[call.name for call in turn.calls] for turn in parsed[1:]] == [["edit"], []]
        assert turns[-1] == DONE
        several += len(parsed[0].calls) > 1
    assert several > 0


def test_a_noisy_answer_still_names_the_right_arguments_and_line(
    tables: tuple[pa.Table, pa.Table], tokenizer: ChatTokenizer
) -> None:
    for row in tables[0].slice(0, 300).to_pylist():
        views = message_views(tokenizer, row["token_ids"], row["token_role"])
        edit = parse_turn(str(views[3]["text"]).removesuffix(TURN_END)).calls[0]
        module = str(views[2]["text"])
        numbered = next(line for line in module.splitlines() if "def " in line)
        names = numbered.split("(")[1].split(")")[0].split(", ")
        assert all(name in edit.arguments["new"] for name in names)
        assert f"{edit.arguments['line']}     return" in module


def test_the_same_seed_gives_the_same_artifact_and_names_only_of_the_train_split(
    tokenizer_artifact: Artifact, shared_store: Store, tokenizer: ChatTokenizer
) -> None:
    config = DemonstrationConfig(count=200, validation_count=20)
    artifact = build_demonstrations(config, TaskSuiteConfig(), tokenizer_artifact, shared_store)
    again = render_demonstrations(config, 0, tokenizer)
    assert artifact.table("train.parquet").equals(again[0])
    assert artifact.table("validation.parquet").equals(again[1])
    gate = set(name_pools(0)[Split.GATE].functions) | set(name_pools(0)[Split.HELD_OUT].functions)
    texts = [tokenizer.decode(ids) for ids in again[0]["token_ids"].to_pylist()]
    assert not [text for text in texts if any(f"def {name}(" in text for name in gate)]


def test_the_suites_other_settings_do_not_render_demonstrations_anew(
    tokenizer_artifact: Artifact, shared_store: Store
) -> None:
    config = DemonstrationConfig(count=30, validation_count=5)
    first = build_demonstrations(config, TaskSuiteConfig(), tokenizer_artifact, shared_store)
    assert build_demonstrations(config, TaskSuiteConfig(train=9), tokenizer_artifact, shared_store).ref == first.ref


def test_real_sandboxes_answer_the_expert_word_for_word_and_its_diff_is_the_reference(envd_address: str) -> None:
    bugs = draw_bugs(14, name_pools(0)[Split.TRAIN], Random("replay"), set())

    async def replay() -> None:
        async with SandboxClient(envd_address) as client:
            with open_workbench() as bench:
                for bug in bugs:
                    task = make_task(bug, Split.TRAIN)
                    episode = bench.play(bug, bug.family, parallel=bug.line == 3)
                    sandbox = await client.create(await client.put_template(task.files))
                    for turn in episode.turns:
                        calls = [ToolCall(call.name, call.arguments) for call in turn.calls]
                        assert [result.text for result in await sandbox.batch(calls)] == list(turn.responses)
                    assert await sandbox.finish() == task.reference_diff

    asyncio.run(replay())
