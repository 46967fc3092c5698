"""Base policies that are trained on a mixture: keys, lineage, quarantine, and what starts from an imported model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pytest
import torch

from assets.naming import key_of
from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter, find_artifact, open_artifact
from contracts.chat import chat_template
from contracts.errors import TriplaneError
from contracts.store import open_store
from curation.errors import MixtureError, PipelineError
from curation.pipeline.config import Pipeline
from curation.pipeline.plan import plan_pipeline
from curation.pipeline.runner import run_pipeline
from curation.pipeline.versions import record_version
from curation.tasks.suite import TaskSuiteConfig, generate_tasks
from ops.base_graph import BASE_POLICY, MIXED_BASE
from ops.graph import graph_of, spec_behind
from ops.ledger.recall import recall
from ops.ledger.trained import trained_tasks
from ops.named_evaluations import contamination
from ops.quarantine.question import reach_of
from ops.quarantine.retrain import plan_retraining
from resources.errors import RegistryError
from resources.experiment import Experiment, parse_experiment
from resources.overrides import merge
from resources.progress import no_progress
from resources.quarantine import Quarantine
from resources.refs import read_artifact, write_ref
from resources.registry import Registry
from tests.cli.cli_history import History, byte_tokenizer, write_history
from triplane_dagster.assembly import definitions_for
from triplane_dagster.dry_run import plan_of
from triplane_dagster.episode_index import memberships
from triplane_dagster.jobs import base_job_name
from triplane_dagster.lineage import trace
from triplane_dagster.sequence import run_iterations
from triplane_dagster.settings import changed_steps
from triplane_dagster.staleness import stale_steps

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
EPISODES = {"kind": "episodes", "experiment": "tiny", "iterations": ["0000"]}
SFT = {
    "max_steps": 4,
    "evaluate_every": 2,
    "snapshot_every": 2,
    "warmup_steps": 1,
    "batch_size": 3,
    "learning_rate": 1e-3,
}
SUITE = {"train": 4, "gate": 1, "held_out": 1, "unseen": 1}


def original(folder: Path) -> Path:
    """A tiny dense model with a tokenizer of bytes, as transformers writes it."""
    torch.manual_seed(0)
    config = transformers.Qwen3Config(
        vocab_size=263,
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text(byte_tokenizer().to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "<|endoftext|>"}))
    (folder / "chat_template.jinja").write_text(chat_template())
    return folder


class World:
    """A store in which the experiment tiny sampled and graded one iteration, and a file of chats."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.store = folder, open_store(str(folder / "store"))
        self.history: History = write_history(self.store)
        self.model, self.chats = original(folder / "model"), folder / "own.jsonl"
        rows = [
            {
                "messages": [{"role": "user", "content": f"say {word}"}, {"role": "assistant", "content": word}],
                "task_id": word,
            }
            for word in ("one", "two", "three", "four")
        ]
        self.chats.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def experiment(self, further: dict[str, Any] | None = None, **base: Any) -> Experiment:
        """The experiment; base: other settings of `base`, further: of other sections."""
        sources = [EPISODES, {"kind": "chats", "path": str(self.chats), "name": "own", "weight": 2}]
        start = {"path": str(self.model), "spaced": False}
        values = {"kind": "sft", "start": start, "mixture": sources, "sft": SFT} | base
        trainer = {"launcher": {"threads": 1}} | ({"lora": base["lora"]} if base.get("lora") else {})
        every = {"name": "taught", "tasks": SUITE, "base": values, "trainer": trainer}
        return parse_experiment(merge(every, further or {}, Experiment))

    def run(self, experiment: Experiment) -> Artifact:
        """The base policy, materialized by its asset."""
        with _instance(self.folder) as instance:
            job = definitions_for([experiment], no_progress).resolve_job_def(base_job_name(experiment))
            selected = [key_of(experiment, BASE_POLICY.name)]
            done = job.execute_in_process(instance=instance, asset_selection=selected)
            (event,) = done.get_asset_materialization_events()
            self.shown = {name: each.value for name, each in event.materialization.metadata.items()}
        found = read_artifact(self.store, experiment.name, BASE_POLICY.name)
        assert found is not None
        return found

    def planned(self, experiment: Experiment) -> tuple[str | None, str]:
        step = next(each for each in plan_of(experiment, self.store) if each.step == BASE_POLICY.name)
        return step.key, step.state


@contextmanager
def _instance(folder: Path) -> Iterator[dg.DagsterInstance]:
    (folder / "dagster").mkdir(exist_ok=True)
    with dg.DagsterInstance.local_temp(str(folder / "dagster")) as instance:
        yield instance


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return World(tmp_path)


def test_an_imported_model_is_trained_on_accepted_episodes_and_a_file(world: World) -> None:
    experiment = world.experiment()
    assert world.planned(experiment) == (None, "will run")
    made = world.run(experiment)
    assert made.meta["sources"] == {
        "episodes": {"rows": 1, "drawn": 4, "epochs": 4.0},
        "own": {"rows": 3, "drawn": 8, "epochs": pytest.approx(8 / 3)},
    }
    assert (world.shown["own: rows trained"], world.shown["episodes: left out, not solved"]) == (8, 3)
    assert {"loss/episodes", "loss/own", "validation_loss/own"} <= set(world.shown)
    assert world.planned(experiment) == (made.ref.key, "found")
    assert spec_behind(BASE_POLICY, made.manifest) is MIXED_BASE and MIXED_BASE in graph_of(experiment)
    assert changed_steps(world.store, experiment, []) == [] and stale_steps(world.store, experiment.name) == []
    assert world.run(experiment).ref == made.ref

    # lineage: the episode and its task lead to the policy, as does a task of the file
    solved = world.history.solved.episode_id
    for what, value in (("episode", solved), ("task", "add-0001"), ("task", "three")):
        found = recall(world.store, what, value)  # type: ignore[arg-type]
        assert (made.ref.digest, 0) in [(row["digest"], row["distance"]) for row in found.trained]
    assert recall(world.store, "episode", world.history.failed.episode_id).trained == []
    kinds = [(each.dataset.ref.kind, each.kept, each.reason) for each in memberships(world.store, solved)]
    assert kinds == [("dataset", True, None), ("accepted_episodes", True, None)]
    uses = trace(world.store, solved).uses
    assert [node.ref for node in uses[1].checkpoints] == [made.ref]

    # an evaluation on these tasks is contaminated
    trained = trained_tasks(world.store, [made.ref])[made.ref.digest]
    files = world.history.solved.files_digest
    assert {("add-0001", files), ("three", None)} <= trained
    columns = {"task_id": ["add-0001", "three", "add-0001", "five"], "image_digest": [files, files, "0" * 64, files]}
    with ArtifactWriter(world.store, "evaluation_run", "6" * 64, parents={}, config={}, code_version="1") as out:
        out.add_table("episodes.parquet", pa.table(columns))
        run = out.commit(meta={"split": "held_out"})
    assert contamination(run, trained)["trained_on"] == ["add-0001", "three"]


def test_chats_of_a_data_pipeline_are_trained_on_and_named_in_the_lineage(world: World) -> None:
    message = "STRUCT(role VARCHAR, content VARCHAR)[]"
    source = {"kind": "jsonl", "path": world.chats.name, "columns": {"task_id": "VARCHAR", "messages": message}}
    values = {"name": "talks", "key": "task_id", "source": source, "workers": 1}

    def record(*stages: dict[str, Any]) -> Artifact:
        plan = plan_pipeline(Pipeline.model_validate({**values, "stages": stages}), world.folder)
        return record_version(world.store, "talks", run_pipeline(plan, world.store)).artifact

    def experiment(path: str) -> Experiment:
        return world.experiment(mixture=[EPISODES, {"kind": "chats", "path": path, "name": "own", "weight": 2}])

    with pytest.raises(PipelineError, match="no pipeline talks has run"):
        world.planned(experiment("data:talks"))
    first = record({"kind": "where", "predicate": "task_id <> 'two'"})
    made = world.run(experiment("data:talks"))
    chats = open_artifact(world.store, made.manifest.parents["mixture own"])
    assert chats.manifest.parents["data"] == first.ref and chats.meta["train"] + chats.meta["validation"] == 3
    record()
    assert world.planned(experiment("data:talks@1")) == (made.ref.key, "found")
    assert world.planned(experiment("data:talks"))[1] == "will run"


def test_the_key_follows_content_weights_and_settings_but_not_places(world: World) -> None:
    experiment = world.experiment()
    key = world.run(experiment).ref.key
    moved = world.chats.rename(world.folder / "moved.jsonl")
    own = {"kind": "chats", "path": str(moved), "name": "own", "weight": 2}
    assert world.planned(world.experiment(mixture=[EPISODES, own])) == (key, "found")
    with pytest.raises(MixtureError, match=r"own\.jsonl can't be read \(.*No such file"):
        world.planned(experiment)
    for other in ({**own, "weight": 1}, {**own, "name": "other"}):
        other_key, state = world.planned(world.experiment(mixture=[EPISODES, other]))
        assert other_key not in (None, key) and state == "will run"
        assert changed_steps(world.store, world.experiment(mixture=[EPISODES, other]), []) == ["base_policy"]
    moved.write_text(moved.read_text() + "\n")
    assert world.planned(world.experiment(mixture=[EPISODES, own])) == (None, "will run")


def test_a_quarantined_episode_names_the_base_policy_and_leaves_it(world: World) -> None:
    experiment, solved = world.experiment(), world.history.solved.episode_id
    made = world.run(experiment)
    reach, marked = reach_of(world.store, "episode", solved)
    assert made.ref.uri in reach.checkpoints and reach.checkpoints[made.ref.uri]["distance"] == 0
    Quarantine(world.store).mark("episode", solved, marked, "test")
    assert world.planned(experiment) == (None, "will run")
    with pytest.raises(MixtureError, match=r"no episode of tiny/0000 is accepted \(1 quarantined, 3 not_solved\)"):
        world.run(experiment)
    spared, left = reach_of(world.store, "episode", world.history.failed.episode_id)
    assert made.ref.uri not in spared.checkpoints
    assert left.num_rows == 1


def test_adapters_of_the_base_policy_leave_the_imported_weights(world: World) -> None:
    lora = {"rank": 2, "alpha": 4.0}
    made, plain = (world.run(world.experiment(**change)) for change in ({"lora": lora}, {}))
    assert "adapter/adapter_config.json" in made.names() and "adapter/adapter_config.json" not in plain.names()
    start = made.manifest.parents["checkpoint"]
    assert start == plain.manifest.parents["checkpoint"]
    digests = {name: _weights(world, ref) for name, ref in (("start", start), ("lora", made.ref), ("plain", plain.ref))}
    assert digests["start"] == digests["lora"] != digests["plain"]
    assert made.manifest.config["lora"]["rank"] == 2


def _weights(world: World, ref: ArtifactRef) -> str:
    files = open_artifact(world.store, ref).manifest.files
    return next(str(each.digest) for each in files if each.path == "model.safetensors")


def test_scripted_episodes_are_a_source_too_in_the_layout_of_the_imported_model(world: World) -> None:
    small = {"count": 12, "validation_count": 4}
    scripted = {"kind": "scripted", "weight": 3}
    made = world.run(world.experiment(mixture=[scripted, EPISODES], demonstrations=small))
    assert made.manifest.parents["demonstrations"].kind == "demonstrations"
    assert {name: each["drawn"] for name, each in made.meta["sources"].items()} == {"scripted": 9, "episodes": 3}
    alone = world.run(world.experiment(mixture=[], demonstrations=small))
    assert alone.manifest.parents["demonstrations"] == made.manifest.parents["demonstrations"]
    assert "sources" not in alone.meta and "checkpoint" in alone.manifest.parents


def test_rows_of_the_gate_in_a_file_are_refused_with_their_line(world: World) -> None:
    gate = next(task for task in generate_tasks(TaskSuiteConfig(**SUITE)) if task.split == "gate")
    messages = [{"role": "user", "content": gate.instruction}, {"role": "assistant", "content": "done"}]
    with world.chats.open("a") as file:
        file.write(json.dumps({"messages": messages}) + "\n")
    with pytest.raises(MixtureError, match=rf"own\.jsonl line 5 is of task {gate.task_id} of the split gate"):
        world.run(world.experiment())


def test_episodes_of_another_tokenizer_or_another_grading_are_refused(world: World) -> None:
    text = (world.model / "tokenizer.json").read_text()
    (world.model / "tokenizer.json").write_text(text + "\n")
    with pytest.raises(MixtureError, match="the policy that sampled tiny/0000 has another tokenizer"):
        world.run(world.experiment())
    (world.model / "tokenizer.json").write_text(text)
    later = {**EPISODES, "iterations": ["0001"]}
    with pytest.raises(TriplaneError, match=r"has no tiny/rollouts\[0001\]: materialize it first"):
        world.run(world.experiment(mixture=[later]))
    other = {"rollouts": world.history.artifacts["base"].ref}
    with ArtifactWriter(world.store, "rewards", "5" * 64, parents=other, config={}, code_version="1") as out:
        out.add_table("rewards.parquet", world.history.artifacts["rewards"].table("rewards.parquet"))
        write_ref(world.store, "tiny", "rewards", "0000", out.commit().ref)
    with pytest.raises(MixtureError, match="the rewards of tiny/0000 are of other rollouts"):
        world.run(world.experiment())


SMALL = {
    "prompts": {"groups": 2, "reserve": 0},
    "rollouts": {"group_size": 2, "max_turns": 2, "max_tokens": 700, "max_turn_tokens": 24, "refill": False},
    "rewards": {"components": [{"kind": "length", "name": "length", "weight": -0.5, "budget": 48, "cushion": 48}]},
    "dataset": {"drop_zero_variance": False},
    "trainer": {"optimizer_steps": 1},
    "evaluation": {"gate_samples": 1, "held_out_samples": 0, "unseen_samples": 0},
}


def test_iterations_continue_the_adapters_and_are_tainted_by_an_episode_of_the_base_policy(world: World) -> None:
    experiment, solved = world.experiment(SMALL, lora={"rank": 2, "alpha": 4.0}), world.history.solved.episode_id
    with _instance(world.folder) as instance:
        assert run_iterations(experiment, 1, instance) == ["0000"]
    base, made = (read_artifact(world.store, "taught", *place) for place in (("base_policy",), ("checkpoint", "0000")))
    assert base is not None and made is not None
    assert made.manifest.parents["checkpoint"] == base.ref and "adapter/adapter_config.json" in made.names()
    reach, _ = reach_of(world.store, "episode", solved)
    assert [reach.checkpoints[each.ref.uri]["distance"] for each in (base, made)] == [0, 1]
    registry, state = Registry(world.store, "taught"), find_artifact(world.store, "trainer_state", made.ref.key)
    assert state is not None
    if registry.live() is None:
        registry.promote(made.ref, state.ref, parent=base.ref.digest, iteration="0000")
    with pytest.raises(RegistryError, match=r"base policy of taught was trained on them \(base.mixture\).* --to base`"):
        plan_retraining(world.store, experiment, reach.checkpoints)
