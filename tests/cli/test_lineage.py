"""Lineage walks both ways, over artifacts made by the real writers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cli_history import History, Run
from hypothesis import given
from hypothesis import strategies as st

from contracts.artifacts import ArtifactRef, ArtifactWriter
from contracts.errors import ArtifactMissing
from contracts.store import open_store
from triplane_dagster.lineage import Edge, Graph, Node, ancestors, descendants, link, resolve, trace


def names(history: History, uris: set[str]) -> set[str]:
    return {name for name, artifact in history.artifacts.items() if artifact.ref.uri in uris}


def test_lineage_of_a_checkpoint_lists_its_ancestors(history: History) -> None:
    found = trace(history.store, history.digest("next"))
    made_of = names(history, {step.node.ref.uri for step in found.ancestors})
    assert made_of == {"dataset", "rollouts", "rewards", "inputs", "suite", "base"}


def test_lineage_of_a_policy_lists_its_descendants(history: History) -> None:
    found = trace(history.store, history.digest("base"))
    made_into = names(history, {step.node.ref.uri for step in found.descendants})
    assert made_into == {"inputs", "rollouts", "rewards", "dataset", "next", "next_state"}


def test_lineage_of_a_kept_episode_reaches_its_checkpoint(history: History) -> None:
    (use,) = trace(history.store, history.solved.episode_id).uses
    assert use.membership.kept
    assert [node.ref.digest for node in use.checkpoints] == [history.digest("next")]


def test_lineage_of_a_dropped_episode_gives_the_reason_and_no_descendants(history: History) -> None:
    found = trace(history.store, history.failed.episode_id)
    assert [(use.membership.kept, use.membership.reason) for use in found.uses] == [(False, "zero_variance")]
    assert found.descendants == ()


def test_unambiguous_prefixes_are_accepted(history: History) -> None:
    assert trace(history.store, history.solved.episode_id[:12]).episode is not None
    (node,) = trace(history.store, history.digest("dataset")[:10]).starts
    assert node.ref.kind == "dataset"
    (node,) = trace(history.store, history.artifacts["dataset"].ref.key[:10]).starts
    assert node.ref.kind == "dataset"


def test_ambiguous_prefix_lists_the_candidates(history: History) -> None:
    digests = [artifact.ref.digest for artifact in history.artifacts.values()]
    keys = [artifact.ref.key for artifact in history.artifacts.values()]
    first = next(letter for letter in "0123456789abcdef" if sum(name[0] == letter for name in digests + keys) > 1)
    with pytest.raises(ArtifactMissing, match="give more digits"):
        trace(history.store, first)


@pytest.mark.parametrize("query", ["", "zz", "0" * 64])
def test_an_unknown_digest_is_one_clear_error(history: History, query: str) -> None:
    with pytest.raises(ArtifactMissing, match="triplane status"):
        trace(history.store, query)


def test_missing_parent_is_listed_and_marked(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = open_store(str(tmp_path_factory.mktemp("gone")))
    gone = ArtifactRef(kind="dataset", key="a" * 64, digest="b" * 64)
    with ArtifactWriter(store, "checkpoint", "c" * 64, parents={"dataset": gone}, config={}, code_version="1") as out:
        out.add_json("config.json", {})
        made = out.commit()
    (step,) = trace(store, made.ref.digest).ancestors
    assert step.node.ref == gone and not step.node.present


@given(st.lists(st.sets(st.integers(0, 30), max_size=4), min_size=1, max_size=12), st.data())
def test_ancestors_and_descendants_are_inverse(parents: list[set[int]], data: st.DataObject) -> None:
    refs = [ArtifactRef(kind="node", key=f"{index:064x}", digest=f"{index:064x}") for index in range(len(parents))]
    edges = [
        Edge(refs[parent].uri, refs[child].uri, "input")
        for child, chosen in enumerate(parents)
        for parent in chosen
        if parent < child
    ]
    graph = link([Node(ref) for ref in refs], edges)
    one, other = (data.draw(st.sampled_from(refs)) for _ in range(2))
    assert (other.uri in above(graph, one)) == (one.uri in below(graph, other))


def above(graph: Graph, ref: ArtifactRef) -> set[str]:
    return {step.node.ref.uri for step in ancestors(graph, resolve(graph, ref.digest))}


def below(graph: Graph, ref: ArtifactRef) -> set[str]:
    return {step.node.ref.uri for step in descendants(graph, resolve(graph, ref.digest))}


def test_the_command_prints_both_directions(triplane: Run, history: History) -> None:
    printed = triplane("lineage", history.digest("rollouts")[:10]).stdout
    made_of, made_into = printed.split("made into")
    assert history.digest("base")[:12] in made_of
    assert history.digest("next")[:12] in made_into


def test_the_command_answers_for_an_episode_in_json(triplane: Run, history: History) -> None:
    found = json.loads(triplane("lineage", history.solved.episode_id[:12], "--json").stdout)
    assert found["episode"]["policy"] == history.digest("base")
    assert found["episode"]["image_digest"] == history.solved.files_digest
    assert found["datasets"][0]["checkpoints"] == [history.digest("next")]
    assert found["starts"][0]["config"]["step"] == "rollouts"
    assert {"role": "policy", "parent": history.artifacts["base"].ref.uri} in [
        {"role": edge["role"], "parent": edge["parent"]} for edge in found["edges"]
    ]


def test_an_unknown_digest_exits_1_with_one_line(triplane: Run) -> None:
    done = triplane("lineage", "feedbeef")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_debug_variable_shows_the_traceback(triplane: Run) -> None:
    assert "Traceback" in triplane("lineage", "feedbeef", env={"TRIPLANE_DEBUG": "1"}).stderr


def test_an_episode_of_an_unfinished_iteration_is_found_in_its_group(history: History, tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    with ArtifactWriter(store, "group", "d" * 64, parents={}, config={}, code_version="1") as out:
        out.add_table("episodes.parquet", history.artifacts["rollouts"].table("episodes.parquet"))
        out.add_table("sequences.parquet", history.artifacts["rollouts"].table("sequences.parquet"))
        out.commit()
    found = trace(store, history.solved.episode_id[:20])
    assert found.episode is not None and found.starts[0].ref.kind == "group"
    assert found.uses == ()


def test_equal_content_under_two_keys_is_one_result(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for key in ("1" * 64, "2" * 64):
        with ArtifactWriter(store, "checkpoint", key, parents={}, config={}, code_version="1") as out:
            out.add_json("config.json", {})
            made = out.commit()
    assert len(trace(store, made.ref.short).starts) == 2
    assert len(trace(store, "1" * 10).starts) == 1
