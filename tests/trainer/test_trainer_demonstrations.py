"""Supervised data: mixtures, token budgets, microbatches, truncation, trained roles and schedules."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from trainer_world import World

from contracts.artifacts import Artifact, ArtifactWriter, open_artifact
from contracts.digests import digest_of
from contracts.episodes import TokenRole
from trainer.config import MixtureSource, RlConfig, SftConfig, SftJob
from trainer.data import RowsReader
from trainer.demonstrations import read_demonstrations
from trainer.errors import TrainingDataError
from trainer.metrics import Record
from trainer.order import Order, Source
from trainer.rl_progress import Progress
from trainer.run import run_job
from trainer.schedule import rate_factor
from trainer.truncation import Truncation, keep_tokens

PROMPT, POLICY, ENVIRONMENT = (int(role) for role in (TokenRole.PROMPT, TokenRole.POLICY, TokenRole.ENVIRONMENT))
TURNS = np.array([PROMPT, PROMPT, POLICY, POLICY, ENVIRONMENT, POLICY, ENVIRONMENT, ENVIRONMENT, POLICY, POLICY])


def kept(longest: int, rule: Truncation) -> list[int]:
    return np.flatnonzero(keep_tokens(TURNS, longest, rule)).tolist()


def test_truncation_keeps_what_its_rule_says() -> None:
    assert kept(10, "drop") == list(range(10))
    assert kept(9, "drop") == []
    assert kept(4, "left") == [6, 7, 8, 9]
    assert kept(4, "right") == [0, 1, 2, 3]
    assert kept(9, "last_turns") == [0, 1, 5, 6, 7, 8, 9]
    assert kept(7, "last_turns") == [0, 1, 5, 6, 7, 8, 9]
    assert kept(6, "last_turns") == [0, 1, 8, 9]
    assert kept(3, "last_turns") == []


@settings(deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 30),
    st.sampled_from(["drop", "left", "right", "last_turns"]),
)
def test_no_rule_keeps_more_than_fits(roles: list[int], longest: int, rule: Truncation) -> None:
    keep = keep_tokens(np.array(roles), longest, rule)
    assert keep.sum() <= max(longest, 0) or len(roles) <= longest
    assert keep.all() or len(roles) > longest


def rows_of(
    lists: list[tuple[list[int], list[int]]],
    longest: int,
    roles: tuple[TokenRole, ...] = (TokenRole.POLICY,),
    **settings: Any,
) -> RowsReader:
    table = pa.table(
        {
            "token_ids": pa.array([ids for ids, _ in lists], pa.list_(pa.int32())),
            "token_role": pa.array([roles for _, roles in lists], pa.list_(pa.uint8())),
        }
    )
    reader = RowsReader("rows", 100, longest, sum(len(ids) for ids, _ in lists), roles=roles, **settings)
    for batch in table.to_batches():
        reader.add(batch)
    return reader


def test_truncated_rows_are_counted_and_those_without_trained_tokens_left_out() -> None:
    long = (list(range(10)), TURNS.tolist())
    prompts = (list(range(10)), [PROMPT] * 9 + [POLICY])
    short = ([1, 2], [PROMPT, POLICY])
    reader = rows_of([long, prompts, short], 4, truncation="right")
    found = reader.finish()
    assert [each.token_ids.tolist() for each in found] == [[0, 1, 2, 3], [1, 2]]
    assert [each.scored.tolist() for each in found] == [[2, 3], [1]]
    assert (reader.truncated, reader.dropped, reader.rows, reader.seen) == (1, 1, 2, 3)
    assert found.place(1) == "row 2 of rows"
    left = rows_of([long], 2, truncation="left").finish()
    assert left[0].token_ids.tolist() == [8, 9] and left[0].scored.tolist() == [1]
    with pytest.raises(TrainingDataError, match="row 0 has 10 tokens, the model accepts 4"):
        rows_of([long], 4)


def test_roles_select_the_tokens_that_train() -> None:
    row = (list(range(10)), TURNS.tolist())
    both = rows_of([row], 10, roles=(TokenRole.POLICY, TokenRole.ENVIRONMENT)).finish()
    assert both[0].scored.tolist() == [2, 3, 4, 5, 6, 7, 8, 9]
    everything = rows_of([row], 10, roles=tuple(TokenRole)).finish()
    assert everything[0].scored.tolist() == list(range(1, 10))
    with pytest.raises(TrainingDataError, match="row 0 has no policy token"):
        rows_of([row], 10, roles=(TokenRole.FORCED,))


def test_a_demonstration_that_begins_with_a_policy_token_trains_the_later_ones() -> None:
    found = rows_of([([1, 2, 3], [POLICY] * 3)], 10).finish()
    assert found[0].scored.tolist() == [1, 2] and found.scored.tolist() == [2]
    with pytest.raises(TrainingDataError, match="row 0 has no policy token after its first position"):
        rows_of([([1, 2], [POLICY, PROMPT])], 10)


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0.1, 5)), min_size=2, max_size=4),
    st.integers(1, 7),
    st.integers(0, 20),
)
def test_a_mixture_keeps_its_shares_and_continues_from_its_counts(
    parts: list[tuple[int, float]], size: int, stop: int
) -> None:
    firsts = np.cumsum([0, *(count for count, _ in parts)])
    sources = [Source(int(first), count, weight) for first, (count, weight) in zip(firsts, parts, strict=False)]
    lengths = np.ones(int(firsts[-1]), np.int64)
    order, resumed = (Order(sources, lengths, size, None, 3) for _ in range(2))
    batches = [order.next() for _ in range(25)]
    share = np.array([weight for _, weight in parts]) / sum(weight for _, weight in parts)
    assert np.abs(np.array(order.drawn) - share * 25 * size).max() < len(parts)
    again = Order(sources, lengths, size, None, 3)
    assert [again.next() for _ in range(stop)] == batches[:stop]
    resumed.drawn = list(again.drawn)
    assert [resumed.next() for _ in range(25 - stop)] == batches[stop:]
    for source in sources:
        own = [row for batch in batches for row in batch if source.first <= row < source.first + source.count]
        whole = len(own) // source.count * source.count
        for first in range(0, whole, source.count):
            assert sorted(own[first : first + source.count]) == list(range(source.first, source.first + source.count))


@settings(deadline=None)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.integers(1, 40))
def test_a_token_budget_holds_and_no_row_is_left_out(lengths: list[int], budget: int) -> None:
    order = Order([Source(0, len(lengths), 1.0)], np.array(lengths), 1, budget, 0)
    seen: list[int] = []
    while len(seen) < 3 * len(lengths):
        batch = order.next()
        assert batch and (sum(lengths[row] for row in batch) <= budget or len(batch) == 1)
        seen += batch
    for first in range(0, 3 * len(lengths), len(lengths)):
        assert sorted(seen[first : first + len(lengths)]) == list(range(len(lengths)))


def rates(kind: Any, steps: int) -> list[float]:
    return [rate_factor(kind, step, 2, 10, 0.1) for step in range(steps)]


def test_schedules_rise_and_fall_to_the_final_rate() -> None:
    assert rates("constant", 12) == pytest.approx([1 / 3, 2 / 3] + [1.0] * 10)
    assert rates("linear", 12) == pytest.approx([1 / 3, 2 / 3] + [1 - 0.9 * n / 8 for n in range(8)] + [0.1] * 2)
    cosine = [0.1 + 0.45 * (1 + math.cos(math.pi * n / 8)) for n in range(8)]
    assert rates("cosine", 12) == pytest.approx([1 / 3, 2 / 3] + cosine + [0.1] * 2)


def test_a_schedule_of_rl_runs_over_all_iterations() -> None:
    config = RlConfig(learning_rate=1.0, schedule="linear", schedule_steps=10)
    assert Progress(before=100, learned=4, taken=1).learning_rate(config) == pytest.approx(0.5)
    assert Progress(before=100, learned=40).learning_rate(config) == 0.0
    assert Progress(before=100).learning_rate(RlConfig(learning_rate=0.3)) == 0.3
    with pytest.raises(ValueError, match="schedule cosine needs schedule_steps"):
        RlConfig(schedule="cosine")
    with pytest.raises(ValueError, match="schedule_steps=8: must be above warmup_steps=8, after which schedule linear"):
        RlConfig(schedule="linear", warmup_steps=8, schedule_steps=8)


@pytest.mark.parametrize(
    ("config", "values"),
    [(RlConfig, {"schedule_steps": 100}), (RlConfig, {"final_rate": 0.1}), (SftConfig, {"final_rate": 0.1})],
)
def test_settings_of_a_schedule_without_one_are_refused(
    config: type[RlConfig | SftConfig], values: dict[str, Any]
) -> None:
    (name,) = values
    with pytest.raises(ValueError, match=rf"{name}=\S+ has no effect with schedule constant: set schedule"):
        config.model_validate(values)


def test_settings_of_later_versions_are_dumped_only_if_they_are_set() -> None:
    later = set(SftConfig.LATER)
    assert not later & set(SftConfig().model_dump())
    values = {
        "schedule": "cosine",
        "final_rate": 0.1,
        "batch_tokens": 100,
        "microbatch_tokens": 64,
        "truncation": "left",
        "trained_roles": ["policy", "environment"],
        "router_z": 0.1,
    }
    assert set(values) == later
    assert values.items() <= SftConfig.model_validate(values).model_dump(mode="json").items()


def test_trained_roles_do_not_change_the_stopping_criterion(world: World) -> None:
    scored, learned = [], []
    for roles in (["policy"], ["policy", "environment"], ["environment"]):
        job = world.sft_job("-".join(roles), trained_roles=roles)
        train, _, validation = read_demonstrations(job, world.store, world.vocabulary)
        scored.append([each.scored.tolist() for each in validation])
        learned.append(train[0].scored.tolist())
    assert scored[0] == scored[1] == scored[2]
    assert sorted(learned[0] + learned[2]) == learned[1]


def test_texts_without_a_policy_are_validated_on_the_roles_that_are_trained(world: World) -> None:
    rows = [{"token_ids": [1, 2, 3], "token_role": [PROMPT] * 3, "clean": True}] * 4
    with ArtifactWriter(world.store, "demonstrations", "f" * 64, parents={}, config={}, code_version="1") as out:
        for name in ("train", "validation"):
            out.add_table(f"{name}.parquet", pa.Table.from_pylist(rows))
        found = out.commit()
    job = world.sft_job("texts", trained_roles=["prompt"]).model_copy(update={"demonstrations": found.ref})
    _, _, validation = read_demonstrations(job, world.store, world.vocabulary)
    assert [each.scored.tolist() for each in validation] == [[1, 2]] * 4


def steps_of(world: World, name: str, **config: Any) -> list[Record]:
    result = run_job(world.sft_job(name, **config))
    assert result is not None
    lines = open_artifact(world.store, result.checkpoint).path("metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines if "loss" in json.loads(line) and "lr" in json.loads(line)]


def test_microbatches_change_neither_loss_nor_gradient(world: World) -> None:
    whole, cut = (
        steps_of(world, f"cut-{tokens}", max_steps=2, router_balance=0.1, microbatch_tokens=tokens)
        for tokens in (None, 64)
    )
    for one, other in zip(whole, cut, strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-3)
        assert one["entropy"] == pytest.approx(other["entropy"], rel=1e-3)
    assert whole[0]["grad_norm"] == pytest.approx(cut[0]["grad_norm"], rel=1e-4)
    assert whole[0]["tokens"] == cut[0]["tokens"]


def other_demonstrations(world: World, rows: int) -> Artifact:
    table = world.demonstrations.table("train.parquet").slice(0, rows)
    with ArtifactWriter(
        world.store, "demonstrations", digest_of(["more", rows]), parents={}, config={}, code_version="1"
    ) as out:
        out.add_table("train.parquet", table)
        out.add_table("validation.parquet", world.demonstrations.table("validation.parquet"))
        return out.commit()


def mixed(world: World, name: str, **config: Any) -> SftJob:
    more = MixtureSource(demonstrations=other_demonstrations(world, 5).ref, weight=0.5)
    return world.sft_job(name, **config).model_copy(update={"mixture": (more,)})


@pytest.mark.slow
def test_a_killed_mixture_with_a_token_budget_continues_bit_for_bit(world: World) -> None:
    settings = {"batch_tokens": 100, "microbatch_tokens": 64, "schedule": "cosine"}
    undisturbed = run_job(mixed(world, "undisturbed", **settings))

    def kill(record: Record) -> None:
        if record["step"] == 5:
            raise RuntimeError("killed")

    with pytest.raises(RuntimeError):
        run_job(mixed(world, "killed", **settings), [kill])
    seen: list[Record] = []
    resumed = run_job(mixed(world, "killed", **settings), [seen.append])
    assert seen[0]["step"] == 5
    assert resumed is not None and undisturbed is not None
    assert resumed.checkpoint.digest == undisturbed.checkpoint.digest


def test_rows_of_a_mixture_are_those_of_its_sources(world: World) -> None:
    train, sources, validation = read_demonstrations(mixed(world, "read"), world.store, world.vocabulary)
    assert [(source.first, source.count, source.weight) for source in sources] == [(0, 192, 1.0), (192, 5, 0.5)]
    assert train[192].token_ids.tolist() == train[0].token_ids.tolist()
    assert "row 0 of" in train.place(192) and train.place(191).startswith("row 191 of")
    assert len(validation) == 56


def test_a_mixture_without_rows_is_refused_by_name(world: World) -> None:
    empty = other_demonstrations(world, 0)
    job = world.sft_job().model_copy(update={"mixture": (MixtureSource(demonstrations=empty.ref),)})
    with pytest.raises(TrainingDataError, match=f"{empty.ref.uri} has no demonstrations to train on: leave it out"):
        run_job(job)


def test_a_loss_that_is_no_number_names_the_row_and_keeps_the_last_state(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    import trainer.backends.torch as backend

    whole, calls = backend.score, list[int]()

    def broken(*arguments: Any, **named: Any) -> Any:
        scores = whole(*arguments, **named)
        calls.append(1)
        if len(calls) == 4 and torch.is_grad_enabled():
            scores.logprobs.data[0] = math.nan
        return scores

    monkeypatch.setattr(backend, "score", broken)
    settings = {"evaluate_every": 100, "max_steps": 6}
    with pytest.raises(Exception, match=r"row \d+ of artifacts/demonstrations/.*train.parquet has log probability nan"):
        run_job(world.sft_job("nan", **settings))
    monkeypatch.undo()
    seen: list[Record] = []
    resumed = run_job(world.sft_job("nan", **settings), [seen.append])
    assert seen[0]["step"] == 3
    whole_run = run_job(world.sft_job("whole", **settings))
    assert resumed is not None and whole_run is not None and resumed.checkpoint.digest == whole_run.checkpoint.digest
