"""A suite without tasks in a split that an experiment uses is refused before anything is sampled, by name."""

from __future__ import annotations

from pathlib import Path

import dagster as dg
import pytest
from pinning import SPLITS, commit, make_base, pin

from assets import task_suite
from contracts.artifacts import Artifact, ArtifactWriter
from contracts.digests import digest_of
from contracts.store import Store, open_store
from contracts.suites import add_tasks
from curation.errors import TaskError
from curation.rewards import REWARDS
from ops.evaluation import require_graded
from ops.step import Step
from resources.experiment import Experiment
from resources.progress import no_progress
from resources.ref_io import RefIOManager
from resources.refs import has_ref
from resources.sandboxes import SandboxesResource
from resources.store import StoreResource
from triplane_dagster.sequence import run_iterations


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    return open_store()


def without_held_out(store: Store) -> Artifact:
    with ArtifactWriter(store, "task_suite", digest_of("no held out"), parents={}, config={}, code_version="1") as out:
        add_tasks(out, [])
        return out.commit(meta={"splits": {"train": 4, "gate": 1, "held_out": 0}})


def with_samples(experiment: Experiment, samples: int) -> Experiment:
    none = {"held_out_samples": samples, "unseen_samples": 0}
    return experiment.model_copy(update={"evaluation": experiment.evaluation.model_copy(update=none)})


@pytest.mark.parametrize("samples", [2, 0])
def test_a_failed_blocking_check_leaves_no_reference(
    samples: int, tiny: Experiment, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(step: Step, sandboxes: SandboxesResource) -> Artifact:
        return without_held_out(step.store)

    monkeypatch.setattr(task_suite, "make_suite", make)
    opened = StoreResource()
    done = dg.materialize(
        [task_suite.build(with_samples(tiny, samples))],
        raise_on_error=False,
        resources={
            "store": opened,
            "io_manager": RefIOManager(store=opened),
            "sandboxes": SandboxesResource(),
            "progress": dg.ResourceDefinition.hardcoded_resource(no_progress),
        },
    )
    (check,) = done.get_asset_check_evaluations()
    assert done.success is check.passed is has_ref(store, tiny.name, "task_suite") is (samples == 0)
    if not done.success:
        (failed,) = done.get_step_failure_events()
        assert "tiny/task_suite fails its check every_split_has_tasks" in str(
            failed.step_failure_data.error_display_string
        )


def test_an_iteration_does_not_begin_without_held_out_tasks(
    tiny: Experiment, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPLITS, "held_out", 0)
    make_base(store, tiny)
    with (
        dg.DagsterInstance.ephemeral() as instance,
        pytest.raises(TaskError, match=r"no tasks in held_out, which tiny uses.*evaluation\.held_out_samples: 0"),
    ):
        pin(tiny, instance, "0000")
    assert not has_ref(store, tiny.name, "iteration_inputs", "0000")


def test_a_command_names_the_empty_splits_before_it_makes_anything(
    tiny: Experiment, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SPLITS, "held_out", 0)
    monkeypatch.setitem(SPLITS, "train", 0)
    monkeypatch.setattr("ops.readings.find_built", lambda *_: commit(store, "task_suite", digest_of("mine")))
    with (
        dg.DagsterInstance.ephemeral() as instance,
        pytest.raises(TaskError, match="no tasks in train and held_out") as error,
    ):
        run_iterations(tiny, 1, instance)
    assert "_samples" not in str(error.value) and not has_ref(store, tiny.name, "base_policy")


def test_an_evaluation_without_tasks_is_no_fault_of_the_infrastructure() -> None:
    with pytest.raises(TaskError, match="evaluation of policy x on held out played no episode"):
        require_graded(REWARDS.empty_table(), 0.0, "policy x on held out")
