"""What the training job asks for is run one iteration after another: by the sensor, by night, and by nothing else."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import dagster as dg
import pytest
import yaml
from dagster._core.remote_origin import (
    RegisteredCodeLocationOrigin,
    RemoteInstigatorOrigin,
    RemoteRepositoryOrigin,
)
from dagster._core.scheduler.instigation import InstigatorState, InstigatorStatus, InstigatorType, SensorInstigatorData
from dagster._core.storage.tags import AUTO_RETRY_RUN_ID_TAG, PARENT_RUN_ID_TAG, ROOT_RUN_ID_TAG
from dagster._utils.tags import TagConcurrencyLimitsCounter
from pinning import commit, counting_store, decide, make_base, pin, sample

from assets.naming import key_of
from contracts.digests import digest_of
from contracts.store import Store, open_store
from resources.errors import ExperimentBusy, ExperimentError, RegistryError, TargetRefused
from resources.experiment import Experiment, OffPolicyConfig, ScheduleConfig, load_experiment
from resources.refs import remove_ref, write_ref
from triplane_dagster.assembly import definitions_for
from triplane_dagster.cli.iterate import warn_of_other_request
from triplane_dagster.jobs import EXPERIMENT_TAG, base_job_name, iteration_job_name
from triplane_dagster.lost_retries import RETRY_TAG
from triplane_dagster.pools import limit_pools
from triplane_dagster.schedules import night_request, nightly
from triplane_dagster.sensors import next_request
from triplane_dagster.sequence import run_iterations
from triplane_dagster.targets import begin_target, last_target, request_target, unfinished_target
from triplane_dagster.ticks import forget_future_ticks
from triplane_dagster.training_job import NIGHT_TAG, Training, train_config, train_job, train_job_name
from triplane_dagster.unfinished import require_idle

TINY = Path(__file__).parent / "tiny.yaml"
PRODUCTION = Path(__file__).parents[2] / "deploy" / "dagster-production.yaml"
NIGHT = datetime(2030, 1, 2, 2, tzinfo=UTC)


class Desk:
    """One experiment whose iterations take no time: what is requested succeeds, fails or is refused as told."""

    def __init__(self, experiment: Experiment, store: Store, instance: dg.DagsterInstance) -> None:
        self.experiment, self.store, self.instance = experiment, store, instance
        self.definitions = definitions_for([experiment])

    def train(self, **training: Any) -> str:
        """Run `NAME_train`; raises what its op raises. Returns the run's id."""
        job = self.definitions.resolve_job_def(train_job_name(self.experiment))
        config = train_config(self.experiment, Training(**training))
        return job.execute_in_process(instance=self.instance, run_config=config).run_id

    def tick(self) -> dg.RunRequest | str:
        """The one run that the sensor requests, or why it requests none."""
        answer = next_request(self.instance, self.store, self.experiment)
        if isinstance(answer, dg.SkipReason):
            return answer.skip_message or ""
        (request,) = answer.run_requests or ()
        added = [key for each in answer.dynamic_partitions_requests or () for key in each.partition_keys]
        assert added == ([request.partition_key] if request.partition_key else [])
        return request

    def launch(
        self, request: dg.RunRequest, status: dg.DagsterRunStatus, killed: dg.DagsterRun | None = None
    ) -> dg.DagsterRun:
        """A run of the request in this state, as the daemon creates it. killed: the run that this one repeats."""
        tags = {**request.tags, **({"dagster/partition": request.partition_key} if request.partition_key else {})}
        job = self.definitions.resolve_job_def(request.job_name or "")
        root = killed.run_id if killed else None
        tags |= {PARENT_RUN_ID_TAG: root, ROOT_RUN_ID_TAG: root} if root else {}
        run = self.instance.create_run_for_job(
            job, status=status, tags=tags, run_config=request.run_config, root_run_id=root, parent_run_id=root
        )
        if killed is not None:
            self.instance.add_run_tags(killed.run_id, {AUTO_RETRY_RUN_ID_TAG: run.run_id})
        return run

    def serve(self, decision: Any = "live") -> str | None:
        """Let the requested iteration succeed with this decision. Returns its key, or None if none was requested."""
        request = self.tick()
        if isinstance(request, str):
            return None
        self.launch(request, dg.DagsterRunStatus.SUCCESS)
        decide(self.store, self.experiment, str(request.partition_key), decision)
        return request.partition_key

    def with_(self, **sections: Any) -> Desk:
        """The same desk, with other settings."""
        return Desk(self.experiment.model_copy(update=sections), self.store, self.instance)

    def stopping(self) -> Desk:
        """The same desk, with promotion.on_refusal stop."""
        return self.with_(promotion=self.experiment.promotion.model_copy(update={"on_refusal": "stop"}))


@pytest.fixture
def desk(tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    store = open_store()
    make_base(store, tiny)
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        yield Desk(tiny, store, instance)


def test_requested_iterations_run_one_after_another_and_no_more(desk: Desk) -> None:
    assert "no iterations are asked for, launch tiny_train" in str(desk.tick())
    desk.train(iterations=3, reason="a test")
    assert [desk.serve() for _ in range(4)] == ["0000", "0001", "0002", None]
    assert "the last request, iterations 0000 to 0002, ended: all of them were made" in str(desk.tick())
    desk.train(iterations=1)
    assert [desk.serve(), desk.serve()] == ["0003", None]


def test_with_overlap_an_iteration_is_requested_while_the_one_before_it_trains(desk: Desk) -> None:
    both = desk.with_(off_policy=OffPolicyConfig(overlap=True))
    both.train(iterations=2)
    running: list[dg.DagsterRun] = []

    def asked() -> list[tuple[str, str]]:
        answer = next_request(both.instance, both.store, both.experiment)
        requests = [] if isinstance(answer, dg.SkipReason) else list(answer.run_requests or ())
        running.extend(both.launch(each, dg.DagsterRunStatus.STARTED) for each in requests)
        return [(str(each.job_name), str(each.partition_key)) for each in requests]

    def end_runs() -> None:
        while running:
            both.instance.delete_run(running.pop().run_id)

    def sampled(iteration: str) -> None:
        write_ref(both.store, "tiny", "dataset", iteration, commit(both.store, "dataset", digest_of(iteration)).ref)

    assert asked() == [("tiny_sample", "0000")] and asked() == []
    end_runs()
    sampled("0000")
    assert asked() == [("tiny_learn", "0000"), ("tiny_sample", "0001")] and asked() == []
    both.instance.delete_run(running.pop().run_id)
    sampled("0001")
    assert asked() == []  # 0000 trains
    end_runs()
    decide(both.store, both.experiment, "0000")
    assert asked() == [("tiny_learn", "0001")]
    end_runs()
    decide(both.store, both.experiment, "0001")
    assert asked() == [] and unfinished_target(both.store, both.experiment) is None


def test_a_deployment_runs_the_two_halves_side_by_side_and_nothing_else(tiny: Experiment) -> None:
    limits = yaml.safe_load(PRODUCTION.read_text())["concurrency"]["runs"]["tag_concurrency_limits"]
    jobs = definitions_for([tiny.model_copy(update={"off_policy": OffPolicyConfig(overlap=True)})])

    def run(job: str) -> dg.DagsterRun:
        return dg.DagsterRun(job_name=job, tags=jobs.resolve_job_def(job).run_tags)

    def waits(job: str, running: str) -> bool:
        return TagConcurrencyLimitsCounter(limits, [run(running)]).is_blocked(run(job))

    assert not waits("tiny_sample", "tiny_learn") and not waits("tiny_learn", "tiny_sample")
    alone = ("tiny_base", "tiny_iteration", "tiny_rollback", "tiny_train")
    assert all(waits(job, other) for job in alone for other in alone)


def test_a_request_is_the_same_at_every_tick_until_its_run_exists(desk: Desk) -> None:
    asked = desk.train(iterations=2)
    first, again = desk.tick(), desk.tick()
    assert isinstance(first, dg.RunRequest) and isinstance(again, dg.RunRequest)
    assert first.run_key == again.run_key == f"{asked}/0000"
    assert desk.serve() == "0000"
    second = desk.tick()
    assert isinstance(second, dg.RunRequest) and second.run_key == f"{asked}/0001"


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.STARTING, dg.DagsterRunStatus.STARTED])
def test_nothing_is_requested_while_a_run_of_the_experiment_is_unfinished(
    desk: Desk, status: dg.DagsterRunStatus
) -> None:
    desk.train(iterations=2)
    assert desk.serve() == "0000"
    other = desk.instance.create_run_for_job(
        desk.definitions.resolve_job_def(base_job_name(desk.experiment)), status=status, tags={}
    )
    assert other.run_id in str(desk.tick())
    desk.instance.delete_run(other.run_id)
    assert desk.serve() == "0001"


def test_an_iteration_made_by_hand_in_between_counts_and_loses_none(desk: Desk) -> None:
    desk.train(iterations=3)
    assert desk.serve() == "0000"
    decide(desk.store, desk.experiment, "0001")
    assert [desk.serve(), desk.serve()] == ["0002", None]


@pytest.mark.parametrize("status", [dg.DagsterRunStatus.FAILURE, dg.DagsterRunStatus.CANCELED])
def test_a_failed_run_stops_the_sequence_until_its_iteration_is_made(desk: Desk, status: dg.DagsterRunStatus) -> None:
    desk.train(iterations=3)
    assert desk.serve() == "0000"
    request = desk.tick()
    assert isinstance(request, dg.RunRequest)
    failed = desk.launch(request, status)
    for _ in range(2):
        said = str(desk.tick())
        assert failed.run_id in said and "once 0001 has decision and report, the sequence continues" in said
        assert desk.instance.get_dynamic_partitions("tiny") == ["0001"], "whoever deleted it"
    decide(desk.store, desk.experiment, "0001")
    assert [desk.serve(), desk.serve()] == ["0002", None]


def test_no_run_is_requested_while_the_experiments_file_cannot_be_loaded(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a run would read the broken file and fail, as would each retry."""
    monkeypatch.setenv("TRIPLANE_EXPERIMENTS", str(tmp_path))
    desk.train(iterations=1)
    sensor = desk.definitions.get_repository_def().get_sensor_def("tiny_sequence")

    def tick() -> Any:
        return sensor(dg.build_sensor_context(instance=desk.instance))

    file = tmp_path / "tiny.yaml"
    for text, said in (
        ("name: tiny\nseed: many\n", f"tiny can't be loaded: experiment {file}: seed = 'many'"),
        ("name: other\n", f"tiny can't be loaded: no file in {tmp_path} holds it"),
    ):
        file.write_text(text)
        answer = tick()
        assert isinstance(answer, dg.SkipReason) and (answer.skip_message or "").startswith(said)
    file.write_text(TINY.read_text())
    assert [each.partition_key for each in tick().run_requests] == ["0000"]


def test_a_refusal_ends_the_sequence_if_the_experiment_says_stop(desk: Desk) -> None:
    stopping = desk.stopping()
    stopping.train(iterations=3)
    assert stopping.serve("refused") == "0000"
    assert "iteration 0000 is refused and promotion.on_refusal is stop" in str(stopping.tick())
    assert unfinished_target(desk.store, desk.experiment) is None
    stopping.train(iterations=2)
    assert [stopping.serve(), stopping.serve(), stopping.serve()] == ["0001", "0002", None]
    desk.train(iterations=2)
    assert [desk.serve("refused"), desk.serve(), desk.serve()] == ["0003", "0004", None]


def test_no_iteration_begins_after_the_deadline(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.train(iterations=3, max_hours=2)
    assert desk.serve() == "0000"
    began = time.time()
    monkeypatch.setattr("triplane_dagster.sensors.time.time", lambda: began + 2 * 3600 + 60)
    assert "its time is over, 0001 and later ones were not begun" in str(desk.tick())
    assert unfinished_target(desk.store, desk.experiment) is None


def test_with_overlap_an_iteration_that_was_sampled_is_finished_after_the_deadline(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = desk.with_(off_policy=OffPolicyConfig(overlap=True))
    both.train(iterations=3, max_hours=2)
    sampling = both.tick()
    assert isinstance(sampling, dg.RunRequest) and sampling.job_name == "tiny_sample"
    running = both.launch(sampling, dg.DagsterRunStatus.STARTED)
    began = time.time()
    monkeypatch.setattr("triplane_dagster.sensors.time.time", lambda: began + 2 * 3600 + 60)
    assert isinstance(both.tick(), str) and unfinished_target(desk.store, desk.experiment), "it waits for the run"
    desk.instance.delete_run(running.run_id)
    sample(desk.store, desk.experiment, "0000")
    learning = both.tick()
    assert isinstance(learning, dg.RunRequest), "only its second half, no further sampling"
    assert (learning.job_name, learning.partition_key) == ("tiny_learn", "0000")
    failed = both.launch(learning, dg.DagsterRunStatus.FAILURE)
    assert f"its time is over, run {failed.run_id} of 0000 ended as failure" in str(both.tick()), (
        "the next night may ask"
    )
    assert unfinished_target(desk.store, desk.experiment) is None


def test_a_request_whose_time_is_over_waits_until_dagster_launches_a_killed_run_again(
    desk: Desk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retries = {"enabled": True, "max_retries": 1, "retry_on_asset_or_op_failure": False}
    (tmp_path / "retries").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "retries"), overrides={"run_retries": retries}) as instance:
        both = Desk(desk.experiment, desk.store, instance).with_(off_policy=OffPolicyConfig(overlap=True))
        both.train(iterations=3, max_hours=2)
        sampling = both.tick()
        assert isinstance(sampling, dg.RunRequest)
        killed = both.launch(sampling, dg.DagsterRunStatus.STARTED)
        write_ref(both.store, "tiny", "iteration_inputs", "0000", commit(both.store, "iteration_inputs", "a" * 64).ref)
        began = time.time()
        monkeypatch.setattr("triplane_dagster.sensors.time.time", lambda: began + 2 * 3600 + 60)
        instance.report_run_failed(killed)
        assert both.tick() == "its time is over, and Dagster is about to launch a failed run again"
        again = both.launch(sampling, dg.DagsterRunStatus.STARTED, killed)
        assert str(again.run_id) in str(both.tick())
        instance.report_run_failed(again)  # the last attempt
        assert f"ended: its time is over, run {again.run_id} of 0000 ended as failure" in str(both.tick())
        assert unfinished_target(both.store, both.experiment) is None


def test_an_iteration_whose_report_is_missing_is_finished_first(desk: Desk) -> None:
    desk.train(iterations=2)
    request = desk.tick()
    assert isinstance(request, dg.RunRequest)
    decide(desk.store, desk.experiment, "0000")
    remove_ref(desk.store, desk.experiment.name, "report", "0000")
    again = desk.tick()
    assert isinstance(again, dg.RunRequest) and again.partition_key == "0000"


def test_a_missing_base_is_made_first(tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        desk = Desk(tiny, open_store(), instance)
        desk.train(iterations=1)
        request = desk.tick()
        assert isinstance(request, dg.RunRequest) and request.job_name == base_job_name(tiny)
        failed = desk.launch(request, dg.DagsterRunStatus.FAILURE)
        assert failed.run_id in str(desk.tick())
        make_base(desk.store, tiny)
        assert desk.serve() == "0000"


def test_with_overlap_the_sequence_waits_for_a_running_base(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        desk = Desk(tiny, open_store(), instance).with_(off_policy=OffPolicyConfig(overlap=True))
        desk.train(iterations=1)
        request = desk.tick()
        assert isinstance(request, dg.RunRequest) and request.job_name == base_job_name(tiny)
        running = desk.launch(request, dg.DagsterRunStatus.STARTED)
        assert desk.tick() == f"run {running.run_id} has not ended (started)"


def test_only_the_first_iteration_starts_from_the_named_policy(desk: Desk) -> None:
    desk.train(iterations=2, from_policy="base")
    first = desk.tick()
    assert isinstance(first, dg.RunRequest) and first.job_name == iteration_job_name(desk.experiment)
    assert first.run_config == {"ops": {"tiny__iteration_inputs": {"config": {"policy": "base"}}}}
    assert desk.serve() == "0000"
    second = desk.tick()
    assert isinstance(second, dg.RunRequest) and second.run_config == {}


def test_a_second_request_is_refused_and_zero_iterations_end_the_first(desk: Desk) -> None:
    desk.train(iterations=3, reason="the first")
    with pytest.raises(TargetRefused, match=r"0000 to 0002 are under way \(the first\).*tiny_sequence.*iterations: 0"):
        desk.train(iterations=1)
    desk.train(iterations=0, reason="enough")
    assert "ended: ended by hand (enough)" in str(desk.tick())
    desk.train(iterations=1)
    assert [desk.serve(), desk.serve()] == ["0000", None]


def test_a_request_that_a_person_repeats_after_its_end_is_refused(desk: Desk) -> None:
    """It requests nothing. A retry by Dagster after a kill succeeds, and requests nothing either."""
    asked = desk.train(iterations=1)
    assert desk.serve() == "0000"
    job, tags = desk.definitions.resolve_job_def("tiny_train"), {ROOT_RUN_ID_TAG: asked, PARENT_RUN_ID_TAG: asked}
    assert job.execute_in_process(instance=desk.instance, tags=tags).success, "it has not ended"
    desk.tick()
    with pytest.raises(TargetRefused, match=r"0000 was asked .* ended \(all of them were made\): launch tiny_train"):
        job.execute_in_process(instance=desk.instance, tags=tags)
    assert job.execute_in_process(instance=desk.instance, tags={**tags, RETRY_TAG: "1"}).success
    assert desk.serve() is None


def test_a_request_that_waited_in_the_queue_while_another_ended_is_refused(desk: Desk) -> None:
    """Two clicks do not train twice, whether or not the sensor has recorded the end of the first request."""
    desk.train(iterations=1, reason="the first")
    clicked = time.time()
    desk.serve()
    for _ in range(2):
        with pytest.raises(TargetRefused, match=r"iteration 0000 was under way \(the first\) when this was launched"):
            request_target(desk.store, desk.experiment, 1, request="queued", asked_unix=clicked)
        desk.tick()
    assert request_target(desk.store, desk.experiment, 1, request="later", asked_unix=time.time()).first == 1


def test_a_request_is_refused_while_its_sensor_is_stopped(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    (tmp_path / "dagster").mkdir()
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        desk = Desk(tiny, open_store(), instance)
        repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "__repository__")
        origin = RemoteInstigatorOrigin(repository, "tiny_sequence")
        state = InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.STOPPED)
        instance.add_instigator_state(state)
        with pytest.raises(TargetRefused, match=r"tiny_sequence.* is stopped: start it .* launch tiny_train again"):
            desk.train(iterations=2)
        assert desk.train(iterations=0) and last_target(desk.store, tiny) is None
        instance.update_instigator_state(state.with_status(InstigatorStatus.RUNNING))
        desk.train(iterations=2)
        assert unfinished_target(desk.store, tiny) is not None


def test_sensors_go_on_after_the_clock_was_set_back(blank_dagster: Path, tmp_path: Path) -> None:
    """Dagster evaluates no sensor before its last tick is past, and neither stopping nor resetting it helps."""
    shutil.copytree(blank_dagster, tmp_path / "dagster")
    with dg.DagsterInstance.local_temp(str(tmp_path / "dagster")) as instance:
        repository = RemoteRepositoryOrigin(RegisteredCodeLocationOrigin("here"), "__repository__")
        for name, tick in (("ahead", time.time() + 86400), ("usual", time.time() - 5)):
            data = SensorInstigatorData(tick, cursor="kept", last_tick_start_timestamp=tick)
            origin = RemoteInstigatorOrigin(repository, name)
            instance.add_instigator_state(
                InstigatorState(origin, InstigatorType.SENSOR, InstigatorStatus.RUNNING, data)
            )
        assert forget_future_ticks(instance) == ["ahead"] and forget_future_ticks(instance) == []
        found = [state.sensor_instigator_data for state in instance.all_instigator_state()]
        ticks = [(data.last_tick_timestamp or 0, data.last_tick_start_timestamp or 0) for data in found if data]
        assert len(ticks) == 2 and all(0 < each <= time.time() for tick in ticks for each in tick)
        assert all(data.cursor == "kept" for data in found if data)


def test_the_command_line_and_the_job_know_of_one_another(desk: Desk) -> None:
    mine = begin_target(desk.store, desk.experiment, 2)
    assert "`triplane iterate` was asked for iterations 0000 to 0001" in str(desk.tick())
    with pytest.raises(TargetRefused, match="run `triplane iterate -e tiny -n 2` to finish them"):
        desk.train(iterations=1)
    desk.train(iterations=0)
    desk.train(iterations=2)
    replaced = begin_target(desk.store, desk.experiment, 2)
    assert replaced == mine and last_target(desk.store, desk.experiment) == mine


def test_an_unknown_policy_or_a_begun_iteration_is_refused(desk: Desk) -> None:
    with pytest.raises(RegistryError, match="policy 'ffff' matches no checkpoint"):
        desk.train(iterations=1, from_policy="ffff")
    pin(desk.experiment, desk.instance, "0000")
    with pytest.raises(TargetRefused, match="take them back by `triplane unpin tiny/0000`"):
        desk.train(iterations=1, from_policy="base")
    desk.train(iterations=1)


def test_the_launchpad_is_filled_in_and_rejects_other_values(desk: Desk) -> None:
    job = desk.definitions.resolve_job_def(train_job_name(desk.experiment))
    (filled,) = (dict(job.run_config or {})["ops"]["tiny_request"]["config"],)
    assert filled == {"iterations": 2, "from_policy": "live", "reason": "by hand"}
    with pytest.raises(dg.DagsterInvalidConfigError):
        job.execute_in_process(run_config={"ops": {"tiny_request": {"config": {"iteration": 3}}}})


def test_a_tick_after_2000_iterations_takes_few_requests(tiny: Experiment, tmp_path: Path) -> None:
    store = counting_store(tmp_path / "store", tiny, 2000)
    make_base(store, tiny)
    begin_target(store, tiny, 1)
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        desk = Desk(tiny, store, instance)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
            desk.train(iterations=0)
            desk.train(iterations=1)
        assert isinstance(desk.tick(), dg.RunRequest)
        store.requests = 0
        request = desk.tick()
        assert isinstance(request, dg.RunRequest) and request.partition_key == "2000"
        assert store.requests < 15


def test_runs_of_the_command_line_occupy_the_pool_of_their_experiment(desk: Desk) -> None:
    pin(desk.experiment, desk.instance, "0000")
    (run,) = desk.instance.get_runs()
    assert run.run_op_concurrency is not None and run.run_op_concurrency.all_pools == {"tiny"}
    for asset in desk.definitions.resolve_assets_def(key_of(desk.experiment, "rollouts")).node_def.iterate_op_defs():
        assert asset.pool == "tiny"


def test_a_command_is_refused_while_a_run_of_its_experiment_is_unfinished(desk: Desk) -> None:
    job = desk.definitions.resolve_job_def(iteration_job_name(desk.experiment))
    tags = {"dagster/partition": "0000"}
    running = desk.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=tags)
    with pytest.raises(ExperimentBusy, match=rf"run {running.run_id} of 0000 of tiny has not ended \(started\)"):
        run_iterations(desk.experiment, 1, desk.instance)
    assert desk.instance.get_runs_count() == 1
    require_idle(desk.instance, desk.experiment.model_copy(update={"name": "another"}))


def test_the_pool_of_an_experiment_has_one_place_unless_an_operator_sets_more(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dagster.yaml").write_text((Path(__file__).parents[2] / "dagster.yaml").read_text())
    monkeypatch.chdir(tmp_path)  # its paths are relative
    with dg.DagsterInstance.from_config(str(tmp_path)) as instance:
        two = [tiny.model_copy(update={"name": name}) for name in ("one", "two")]
        limit_pools(instance, two)
        limits = lambda: {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}  # noqa: E731
        assert limits() == {"one": 1, "two": 1}
        instance.event_log_storage.set_concurrency_slots("two", 3)
        limit_pools(instance, two)
        assert limits() == {"one": 1, "two": 3}


def test_pools_that_limit_steps_are_left_alone(desk: Desk) -> None:
    limit_pools(desk.instance, [desk.experiment])
    assert not desk.instance.event_log_storage.get_pool_limits()


def test_a_night_asks_for_what_the_experiment_says(desk: Desk) -> None:
    plan = ScheduleConfig(cron="30 1 * * mon-fri", timezone="Europe/Berlin", iterations=4, max_hours=5)
    planned = desk.with_(schedule=plan)
    schedule = nightly(planned.experiment, train_job(planned.experiment))
    assert (schedule.cron_schedule, schedule.execution_timezone) == ("30 1 * * mon-fri", "Europe/Berlin")
    request = night_request(planned.instance, planned.store, planned.experiment, NIGHT)
    assert isinstance(request, dg.RunRequest) and request.tags[NIGHT_TAG] == "2030-01-02"
    asked = request.run_config["ops"]["tiny_request"]["config"]
    assert asked == {"iterations": 4, "from_policy": "live", "reason": "night of 2030-01-02", "max_hours": 5}
    job = planned.definitions.resolve_job_def(train_job_name(planned.experiment))
    assert job.execute_in_process(
        instance=desk.instance, run_config=dict(request.run_config), tags=dict(request.tags)
    ).success
    target = unfinished_target(desk.store, desk.experiment)
    assert target is not None and (target.count, target.night) == (4, "2030-01-02")
    assert target.deadline_unix == NIGHT.timestamp() + 5 * 3600


def test_the_time_that_a_request_waits_in_a_queue_counts(desk: Desk) -> None:
    job = desk.definitions.resolve_job_def(train_job_name(desk.experiment))
    config = train_config(desk.experiment, Training(iterations=1, max_hours=2))
    queued = desk.instance.create_run_for_job(job, run_config=config.to_config_dict())
    record = desk.instance.get_run_record_by_id(queued.run_id)
    assert record is not None
    executed = {"dagster/root_run_id": queued.run_id, "dagster/parent_run_id": queued.run_id}
    assert job.execute_in_process(instance=desk.instance, run_config=config, tags=executed).success
    target = unfinished_target(desk.store, desk.experiment)
    assert target is not None and target.deadline_unix == record.create_timestamp.timestamp() + 2 * 3600


def test_a_night_whose_time_is_over_is_skipped(desk: Desk) -> None:
    planned = desk.with_(schedule=ScheduleConfig(max_hours=5))
    answer = night_request(planned.instance, planned.store, planned.experiment, datetime(2020, 1, 2, 2, tzinfo=UTC))
    assert isinstance(answer, dg.SkipReason)
    assert answer.skip_message == "the night of 2020-01-02T02:00:00+00:00 is over (schedule.max_hours=5)"


def test_the_time_of_a_night_does_not_end_an_hour_early_when_the_clocks_change(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = desk.with_(schedule=ScheduleConfig(max_hours=2))
    at = datetime(2027, 3, 28, 1, tzinfo=ZoneInfo("Europe/Berlin"))
    for hours, asks in ((1.9, True), (2.0, False)):
        monkeypatch.setattr("triplane_dagster.schedules.time.time", lambda hours=hours: at.timestamp() + 3600 * hours)
        answer = night_request(planned.instance, planned.store, planned.experiment, at)
        assert isinstance(answer, dg.RunRequest) is asks


def test_a_night_is_skipped_while_anything_is_under_way_and_after_a_refusal(desk: Desk) -> None:
    def tonight(at: Desk) -> str:
        answer = night_request(at.instance, at.store, at.experiment, NIGHT)
        return (answer.skip_message or "") if isinstance(answer, dg.SkipReason) else "asks"

    assert tonight(desk) == "asks"
    stopping = desk.stopping()
    stopping.train(iterations=1, reason="by day")
    assert "iteration 0000 is under way (by day)" in tonight(desk)
    assert stopping.serve("refused") == "0000" and stopping.serve() is None
    assert "0000 is refused and promotion.on_refusal is stop: launch tiny_train by hand" in tonight(stopping)
    assert tonight(desk) == "asks"
    stopping.train(iterations=1)
    assert stopping.serve() == "0001" and stopping.serve() is None
    assert tonight(stopping) == "asks"
    tags = {EXPERIMENT_TAG: desk.experiment.name}
    job = desk.definitions.resolve_job_def(iteration_job_name(desk.experiment))
    running = desk.instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED, tags=tags)
    assert running.run_id in tonight(stopping)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("schedule={cron: '0 2 * *'}", "schedule.cron = '0 2 * *': '0 2 * *' is not a cron expression (4 fields)"),
        ("schedule={cron: '0 25 * * *'}", "hour '25' is not within 0 to 23"),
        ("schedule={cron: '0 2 30 2 *'}", "no month has this day"),
        ("schedule={cron: '*/0 2 * * *'}", "minute '*/0'"),
        ("schedule={cron: '0 2 * * x'}", "day of week 'x'"),
        ("schedule={timezone: Europe/Berlim}", "'Europe/Berlim' is no time zone"),
        ("schedule={iterations: 0}", "schedule.iterations = 0"),
    ],
)
def test_a_bad_schedule_is_refused_when_the_file_is_read(override: str, said: str) -> None:
    with pytest.raises(ExperimentError) as caught:
        load_experiment(TINY, [override])
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "cron", ["0 2 * * *", "*/15 1-5/2 * * 1,3,5", "0 0 29 2 *", "5 4 1 jan-mar sun", "0 2 31 * *", "0 2 * * 0-7"]
)
def test_dagster_accepts_the_cron_expressions_that_are_accepted(cron: str, tiny: Experiment) -> None:
    planned = tiny.model_copy(update={"schedule": ScheduleConfig(cron=cron)})
    ticks = nightly(planned, train_job(planned))
    assert ticks.execution_timezone == "UTC" and ticks.cron_schedule == cron


def test_two_stores_of_one_instance_do_not_share_run_keys(desk: Desk, tmp_path: Path) -> None:
    asked = desk.train(iterations=1)
    other = Desk(desk.experiment, open_store(str(tmp_path / "other")), desk.instance)
    make_base(other.store, desk.experiment)
    commit(other.store, "trainer_state", digest_of("unused"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRIPLANE_STORE", other.store.url)
        assert other.train(iterations=1) != asked
    first, second = desk.tick(), other.tick()
    assert isinstance(first, dg.RunRequest) and isinstance(second, dg.RunRequest)
    assert first.run_key != second.run_key


def test_a_command_says_that_it_replaces_a_request_and_nothing_while_a_run_is_at_work(
    desk: Desk, capsys: pytest.CaptureFixture[str]
) -> None:
    warn_of_other_request(desk.experiment, desk.instance)
    assert capsys.readouterr().err == ""
    desk.train(iterations=2, reason="by day")
    warn_of_other_request(desk.experiment, desk.instance)
    said = "warning: this command replaces the request of tiny_train for iterations 0000 to 0001 (by day)"
    assert said in capsys.readouterr().err
    request = desk.tick()
    assert isinstance(request, dg.RunRequest)
    run = desk.launch(request, dg.DagsterRunStatus.STARTED)
    with pytest.raises(ExperimentBusy, match=f"run {run.run_id} of 0000 of tiny has not ended"):
        warn_of_other_request(desk.experiment, desk.instance)
    assert capsys.readouterr().err == ""
