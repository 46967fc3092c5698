"""The numbers of a report are those of the artifacts it names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from report_world import World, write_world

from contracts.artifacts import Artifact, ArtifactWriter, open_artifact
from contracts.chat import ChatTokenizer
from contracts.digests import digest_of
from contracts.episodes import TokenRole
from contracts.store import open_store
from inference.rollouts.straggler_bias import SolveRates
from ops.pod_tags import EXPERIMENT_LABEL
from ops.report.build import commit_report, compose
from ops.report.facts import histogram
from ops.report.history import earlier_rows, row_of
from ops.report.page import read_data
from ops.report.sources import find_sources
from ops.report.timings import RUNS, earlier_speeds, iteration_seconds
from ops.report.tokens import Vocabulary
from ops.rollout_numbers import sampling_speed
from resources.errors import NotMaterialized
from resources.refs import read_artifact, write_ref
from tests.cli.cli_history import EXPERIMENT, byte_tokenizer


def text_of(sequence: dict[str, Any], vocabulary: dict[str, str]) -> str:
    """As the page's script reads it."""
    joined = sequence.get("joined", {})
    return "".join(joined.get(str(at), vocabulary[str(token)]) for at, token in enumerate(sequence["ids"]))


def test_the_row_of_an_iteration_repeats_its_artifacts(world: World, first: dict[str, Any]) -> None:
    (row,) = first["rows"]
    assert row["train"]["reward"] == pytest.approx((1.1 + 3 * 0.1) / 4)
    assert (row["train"]["solved"], row["train"]["n"]) == (1, 4)
    assert row["gate"]["candidate"]["rate"] == 0.75 and row["gate"]["parent"]["rate"] == 0.25
    assert row["gate"]["candidate"]["low"] < 0.75 < row["gate"]["candidate"]["high"]
    assert row["held_out"]["difference"]["mean"] == pytest.approx(0.5)
    own = row["held_out"]["measures"]["candidate"]
    assert (own["k"], own["sampled"]["rate"], own["majority"]["rate"], own["any"]["rate"]) == (4, 0.75, 0.75, 1.0)
    assert own["greedy"]["rate"] is None and row["unseen"] is None
    assert first["headline"]["held_out maj@4"] == 0.75
    assert row["acting"] == world.history.digest("base") and row["candidate"] == world.history.digest("next")
    assert (row["decision"], row["episodes"], row["kept"]) == ("live", 4, 2)
    assert (row["seconds"], row["tokens_per_second"]) == ({"rollouts": 2.0}, 512.5)
    assert first["decision"]["reasons"] == ["good enough"]


def test_counts_add_up_to_the_episodes(first: dict[str, Any]) -> None:
    assert first["outcomes"] == {"failed": 3, "solved": 1}
    assert first["reasons"] == {"kept": 2, "zero_variance": 2}
    for found in first["histograms"].values():
        assert sum(found["counts"]) == 4 and found["missing"] == 0


def test_report_shows_families_before_and_after(first: dict[str, Any]) -> None:
    (family,) = first["families"]["held_out"]
    assert (family["family"], family["parent"]["rate"], family["candidate"]["rate"]) == ("sum", 0.25, 0.75)


def test_costs_are_sums_of_telemetry(first: dict[str, Any]) -> None:
    costs = {each["what"]: each for each in first["costs"]}
    assert costs["rollouts"]["seconds"] == pytest.approx(4 * 1.5)
    assert set(costs) == {
        "rollouts",
        *(f"{who} {split}" for who in ("parent", "candidate") for split in ("gate", "held_out")),
    }


def test_costs_by_iteration_name_the_tokens_lost_by_reason(world: World) -> None:
    store = world.store
    sources = find_sources(store, EXPERIMENT, "0000")
    spent = compose(sources, [], {}, gpus=2).spent["0000"]
    rollouts, dataset = sources.artifacts["rollouts"], sources.artifacts["dataset"]
    tokens = {row["episode_id"]: row["engine_tokens"] or 0 for row in rollouts.table("telemetry.parquet").to_pylist()}
    left_out = [row for row in dataset.table("members.parquet").to_pylist() if not row["kept"]]
    assert left_out and sum(spent["tokens_lost"].values()) == sum(tokens[row["episode_id"]] for row in left_out)
    assert set(spent["tokens_lost"]) == {row["reason"] for row in left_out}
    assert spent["engine_tokens"] == sum(tokens.values())
    assert spent["gpu_seconds"] == 2 * spent["training_seconds"]


def test_inputs_are_named_by_digest(world: World, first: dict[str, Any]) -> None:
    digests = {each["asset"]: each["digest"] for each in first["inputs"]}
    assert digests["rollouts"] == world.history.digest("rollouts")
    assert {"dataset", "checkpoint", "evaluation", "sampler"} <= set(digests)


def test_an_episode_reads_as_its_tokens_say(world: World, hostile_page: bytes) -> None:
    data = read_data(hostile_page)["viewer"]
    shown = {each["episode_id"]: each for each in data["episodes"]}
    tokenizer = ChatTokenizer(byte_tokenizer())
    for episode in world.hostile:
        found, sequence = shown[episode.episode_id], episode.sequences[0]
        (only,) = found["sequences"]
        assert text_of(only, data["vocabulary"]) == tokenizer.decode(sequence.token_ids)
        roles = [role for role, length in only["roles"] for _ in range(length)]
        assert roles == sequence.token_role
        policy = [value for value, role in zip(sequence.logprobs, roles, strict=True) if role == TokenRole.POLICY]
        assert [-each / 100 for each in only["logprobs"]] == pytest.approx(policy, abs=0.005)
        assert found["diff"] == episode.final_diff.decode(errors="replace")
        assert [call["result"] for call in found["calls"]] == [call.result for call in episode.tool_calls]
    tested = shown[world.hostile[1].episode_id]
    assert [test["status"] for test in tested["tests"]] == ["failed"]


@given(st.text(max_size=60))
def test_any_text_survives_the_cut_into_tokens(text: str) -> None:
    chat = ChatTokenizer(byte_tokenizer())
    ids = chat.encode_text(text)
    vocabulary = Vocabulary(chat)
    shown = vocabulary.sequence(ids, [1] * len(ids), [-1.0] * len(ids))
    joined = shown.get("joined", {})
    assert "".join(joined.get(str(at), vocabulary.texts[token]) for at, token in enumerate(ids)) == text


@given(st.lists(st.none() | st.floats(-1e6, 1e6) | st.integers(0, 5000).map(float), max_size=50))
def test_a_histogram_counts_every_value_in_few_bins(values: list[float | None]) -> None:
    found = histogram(values)
    known = [value for value in values if value is not None]
    assert sum(found["counts"]) == len(known) and found["missing"] == len(values) - len(known)
    assert len(found["counts"]) <= 27
    if known:
        slack = 1e-6 * max(1.0, *map(abs, known))
        assert found["low"] <= min(known) + slack
        assert max(known) <= found["low"] + len(found["counts"]) * found["width"] + slack


def test_a_report_is_found_again_and_chains(world: World) -> None:
    sources = find_sources(world.store, EXPERIMENT, "0000")
    once = commit_report(sources, [], {"0000": {"rollouts": 1.0}})
    again = commit_report(sources, [], {"0000": {"rollouts": 9.0}})
    assert again.ref == once.ref
    assert once.manifest.parents["rollouts"] == world.history.artifacts["rollouts"].ref
    digests = {entry.path: entry.digest for entry in once.manifest.files}
    assert digests["summary.json"] and digests["report.html"] is None and digests["timings.json"] is None
    (row,) = earlier_rows(world.store, EXPERIMENT, "0001")
    assert [row] == once.json("summary.json")["rows"]


def test_the_row_of_an_iteration_that_was_made_again_is_the_new_one(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    write_world(store)

    def report(iteration: str, **changes: Any) -> None:
        sources = find_sources(store, EXPERIMENT, iteration)
        made = commit_report(replace(sources, artifacts=sources.artifacts | changes), rows(iteration), {})
        write_ref(store, EXPERIMENT, "report", iteration, made.ref)

    def rows(iteration: str) -> list[dict[str, Any]]:
        return earlier_rows(store, EXPERIMENT, iteration)

    report("0000")
    report("0001")
    before = rows("0002")
    sources = find_sources(store, EXPERIMENT, "0000")
    rewards = open_artifact(store, sources.artifacts["rewards"].ref)
    table = rewards.table("rewards.parquet")
    column = table.schema.get_field_index("reward")
    table = table.set_column(column, table.schema.field("reward"), pa.array([0.125] * len(table), pa.float32()))
    with ArtifactWriter(store, "rewards", digest_of("regraded"), parents={}, config={}, code_version="1") as out:
        out.add_table("rewards.parquet", table)
        regraded = out.commit(meta=rewards.meta)
    report("0000", rewards=regraded)
    after = rows("0002")
    assert [row["train"]["reward"] for row in after] == [0.125, before[1]["train"]["reward"]] and len(before) == 2
    report("0001")
    chained = read_artifact(store, EXPERIMENT, "report", "0001")
    assert chained is not None and chained.json("summary.json")["rows"] == after == rows("0002")
    report("0000")
    assert rows("0002") == before, "the first one again, as after a mark is lifted"


def test_sampling_speed_is_that_of_the_page_of_the_rollouts_and_is_kept_for_later_reports(
    world: World, tmp_path: Path
) -> None:
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        for speed in (90.0, 700.5):
            shown = {"tokens per second": speed}
            made = dg.AssetMaterialization([EXPERIMENT, "rollouts"], partition="0000", metadata=shown)
            instance.report_runless_asset_event(made)
        assert sampling_speed(instance, EXPERIMENT, "0000") == 700.5
        assert sampling_speed(instance, EXPERIMENT, "0001") is None
    store = open_store(str(tmp_path / "store"))
    write_world(store)
    report = commit_report(find_sources(store, EXPERIMENT, "0000"), [], {}, {"0000": 700.5})
    write_ref(store, EXPERIMENT, "report", "0000", report.ref)
    assert earlier_speeds(store, EXPERIMENT, "0001") == {"0000": 700.5}
    assert earlier_speeds(store, EXPERIMENT, "0000") == {}


def test_seconds_are_found_among_many_runs_of_other_experiments(tmp_path: Path) -> None:
    @dg.op(name=f"{EXPERIMENT}__rewards")
    def rewards() -> None:
        pass

    @dg.job
    def ours() -> None:
        rewards()

    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        ours.execute_in_process(instance=instance, tags={"dagster/partition": "0003", EXPERIMENT_LABEL: EXPERIMENT})
        ours.execute_in_process(instance=instance, tags={"dagster/partition": "0003"})  # as from an asset's page
        for _ in range(RUNS):
            instance.create_run_for_job(ours, tags={"dagster/partition": "0003", EXPERIMENT_LABEL: "another"})
        found = iteration_seconds(instance, EXPERIMENT, "0003")
        one = [instance.get_run_step_stats(run.run_id) for run in instance.get_runs()]
    each = [stats.end_time - stats.start_time for run in one for stats in run if stats.end_time and stats.start_time]
    assert len(each) == 2 and found == {"rewards": pytest.approx(sum(each))}


def test_seconds_change_no_digest(world: World, tmp_path: Path) -> None:
    reports = []
    for number, seconds in enumerate((1.0, 2.0)):
        store = open_store(str(tmp_path / str(number)))
        write_world(store)
        sources = find_sources(store, EXPERIMENT, "0001")
        reports.append(commit_report(sources, earlier_rows(store, EXPERIMENT, "0001"), {"0001": {"rollouts": seconds}}))
    assert reports[0].ref == reports[1].ref


def test_an_iteration_that_never_sampled_is_refused_by_name(world: World) -> None:
    with pytest.raises(NotMaterialized, match="iteration 0007 has no rollouts"):
        find_sources(world.store, EXPERIMENT, "0007")


def test_row_shows_the_bias_by_stragglers_that_the_rollouts_estimate(world: World, first: dict[str, Any]) -> None:
    sources = find_sources(world.store, EXPERIMENT, "0000")
    rollouts, rates = sources.artifacts["rollouts"], SolveRates(kept=0.5, lowest=0.25, highest=0.75, estimated=0.375)
    manifest = rollouts.manifest.model_copy(update={"meta": rollouts.meta | rates.facts()})
    biased = replace(sources, artifacts={**sources.artifacts, "rollouts": Artifact(world.store, manifest)})
    row = row_of(biased)
    assert (row["solve_rate_kept"], row["solve_rate_estimated"], row["solve_rate_bias"]) == (0.5, 0.375, 0.125)
    assert "solve_rate_bias" not in first["rows"][0]
