"""Failed runs and overdue experiments are posted to a webhook and mailed."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from datetime import timedelta
from email.message import EmailMessage
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import dagster as dg
import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.handlers import Message
from alert_receiver import Hook, listening

from assets.naming import key_of
from contracts.errors import ConfigError
from contracts.store import open_store
from resources.experiment import Experiment, ScheduleConfig
from triplane_dagster.alerts import (
    EMAIL_VARIABLE,
    NO_RECEIVER,
    SMTP_VARIABLE,
    VARIABLE,
    alert_on_failure,
    send_email,
)
from triplane_dagster.assembly import definitions_for
from triplane_dagster.executors import step_executor
from triplane_dagster.freshness import longest_pause
from triplane_dagster.jobs import EXPERIMENT_TAG
from triplane_dagster.lost_retries import WILL_RETRY_TAG
from triplane_dagster.overdue import overdue_messages, overdue_sensors
from triplane_dagster.targets import begin_target


@pytest.fixture
def hook() -> Iterator[Hook]:
    with listening() as made:
        yield made


@pytest.fixture
def failed(tmp_path: Path) -> Iterator[dg.RunFailureSensorContext]:
    """What the sensor gets of a run that failed."""

    @dg.op
    def burst() -> None:
        raise ValueError("no sandboxes\nleft")

    @dg.job(name="tiny_iteration")
    def job() -> None:
        burst()

    tags = {EXPERIMENT_TAG: "tiny", "dagster/partition": "0006"}
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        done = job.execute_in_process(instance=instance, raise_on_error=False, tags=tags)
        yield dg.build_run_status_sensor_context(
            alert_on_failure.name, done.get_run_failure_event(), instance, done.dagster_run
        ).for_run_failure()


def test_a_failed_run_is_posted_with_its_error(
    hook: Hook, failed: dg.RunFailureSensorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(alert_on_failure(failed), dg.SkipReason) and hook.posted == []
    monkeypatch.setenv(VARIABLE, hook.url)
    alert_on_failure(failed)
    (posted,) = hook.posted
    assert posted["text"] == "tiny_iteration 0006 failed: ValueError: no sandboxes left"
    assert (posted["experiment"], posted["partition"]) == ("tiny", "0006")
    assert posted["run_id"] == failed.dagster_run.run_id


def test_a_run_from_an_assets_page_is_posted_with_its_experiment(
    hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dg.asset(key=["tiny", "rewards"])
    def rewards() -> None:
        raise ValueError("no sandboxes")

    monkeypatch.setenv(VARIABLE, hook.url)
    job = dg.Definitions(assets=[rewards]).resolve_implicit_global_asset_job_def()
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        done = job.execute_in_process(
            instance=instance, raise_on_error=False, asset_selection=[rewards.key], tags={"dagster/partition": "0003"}
        )
        alert_on_failure(
            dg.build_run_status_sensor_context(
                alert_on_failure.name, done.get_run_failure_event(), instance, done.dagster_run
            ).for_run_failure()
        )
    (posted,) = hook.posted
    assert posted["text"] == "assets of tiny 0003 failed: ValueError: no sandboxes"
    assert posted["experiment"] == "tiny"


def test_a_run_that_is_launched_again_alerts_nobody(
    hook: Hook, failed: dg.RunFailureSensorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, hook.url)
    tags = cast("dict[str, str]", failed.dagster_run.tags)
    tags[WILL_RETRY_TAG] = "true"
    assert isinstance(alert_on_failure(failed), dg.SkipReason) and hook.posted == []
    tags[WILL_RETRY_TAG] = "false"
    assert alert_on_failure(failed) is None and len(hook.posted) == 1


@pytest.mark.parametrize("why", [None, "No heartbeat."])
def test_a_run_whose_process_died_is_posted_with_the_cause(
    why: str | None, hook: Hook, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @dg.job(name="tiny_iteration")
    def job() -> None:
        pass

    monkeypatch.setenv(VARIABLE, hook.url)
    with dg.DagsterInstance.ephemeral(str(tmp_path)) as instance:
        run = instance.create_run_for_job(job, status=dg.DagsterRunStatus.STARTED)
        for said in ("Executing steps in process", "Run execution process was terminated by signal 9 (SIGKILL)."):
            instance.report_engine_event(said, run)
        event = instance.report_run_failed(run, why)
        instance.report_engine_event("a sensor acted", run)
        context = dg.build_run_status_sensor_context(alert_on_failure.name, event, instance, run)
        alert_on_failure(context.for_run_failure())
    expected = why or "Run execution process was terminated by signal 9 (SIGKILL)."
    assert hook.posted[0]["text"] == f"tiny_iteration failed: {expected}"


class Mails(Message):
    """What a mail server was given."""

    def __init__(self) -> None:
        super().__init__(EmailMessage)
        self.received: list[Any] = []

    def handle_message(self, message: Any) -> None:
        self.received.append(message)


@pytest.fixture
def mails(monkeypatch: pytest.MonkeyPatch) -> Iterator[Mails]:
    """A mail server without TLS, to which failed runs are told."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    mails = Mails()
    server = Controller(mails, hostname="127.0.0.1", port=port)
    server.start()
    monkeypatch.setenv(SMTP_VARIABLE, f"smtp://127.0.0.1:{port}")
    monkeypatch.setenv(EMAIL_VARIABLE, "night@example.com, boss@example.com")
    yield mails
    server.stop()


def test_a_failed_run_is_mailed_with_its_error(mails: Mails, failed: dg.RunFailureSensorContext) -> None:
    assert alert_on_failure(failed) is None
    (mail,) = mails.received
    assert mail["Subject"] == "tiny_iteration 0006 failed: ValueError: no sandboxes left"
    assert mail["To"] == mail["X-RcptTo"] == "night@example.com, boss@example.com"
    assert mail["From"] == "night@example.com"
    assert f"run_id: {failed.dagster_run.run_id}" in mail.get_payload()


def test_a_message_with_a_line_break_is_mailed(mails: Mails) -> None:
    send_email("night@example.com", {"text": "tiny is overdue: iteration 0003 is under way (larger\nbatch)"})
    (mail,) = mails.received
    assert mail["Subject"] == "tiny is overdue: iteration 0003 is under way (larger batch)"


def test_a_password_is_not_sent_without_tls(
    mails: Mails, failed: dg.RunFailureSensorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = os.environ[SMTP_VARIABLE]
    monkeypatch.setenv(SMTP_VARIABLE, server.replace("//", "//me:secret@"))
    with pytest.raises(ValueError, match="offers no TLS"):
        send_email("night@example.com", {"text": "hello"})
    assert alert_on_failure(failed) is None
    assert mails.received == []


@pytest.mark.parametrize("url", ["smtp://127.0.0.1:9", "mailto:me", "smtp://127.0.0.1:port"])
def test_an_error_of_the_mail_server_is_not_raised(
    url: str, mails: Mails, failed: dg.RunFailureSensorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SMTP_VARIABLE, url)
    assert alert_on_failure(failed) is None
    assert mails.received == []


@pytest.mark.parametrize("receiver", ["refuses", "is gone", "is no URL"])
def test_an_error_of_the_receiver_is_not_raised(
    receiver: str, hook: Hook, failed: dg.RunFailureSensorContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    hook.status = 500
    urls = {"refuses": hook.url, "is gone": "http://127.0.0.1:9/secret", "is no URL": "http://[secret"}
    monkeypatch.setenv(VARIABLE, urls[receiver])
    assert alert_on_failure(failed) is None
    assert len(hook.posted) == (receiver == "refuses"), "one attempt"


PLAN = ScheduleConfig(cron="0 2 * * mon-fri", max_hours=6)
ALLOWED = timedelta(days=3, hours=6)


def test_dataset_and_sampler_of_a_scheduled_experiment_become_overdue(tiny: Experiment) -> None:
    def policies(experiment: Experiment) -> dict[str, Any]:
        assets = definitions_for([experiment]).resolve_all_asset_specs()
        return {each.key.path[1]: each.freshness_policy for each in assets if each.freshness_policy}

    assert policies(tiny) == {}
    expected = dg.FreshnessPolicy.time_window(fail_window=ALLOWED)
    assert policies(tiny.model_copy(update={"schedule": PLAN})) == {"dataset": expected, "sampler": expected}


@pytest.mark.parametrize(
    ("cron", "timezone", "hours"),
    [
        ("0 2 * * *", "UTC", 24),
        ("0 2 * * *", "Europe/Berlin", 25),
        ("30 2 * * *", "America/New_York", 25),
        ("0 3 * * mon", "Europe/Berlin", 7 * 24 + 1),
        ("0 1,22 * * *", "Europe/Berlin", 22),
        ("0 0 1 1 *", "Europe/Berlin", 366 * 24),
    ],
)
def test_the_longest_pause_includes_the_hour_that_autumn_adds_and_leap_days(
    cron: str, timezone: str, hours: int
) -> None:
    assert longest_pause(ScheduleConfig(cron=cron, timezone=timezone)) == timedelta(hours=hours)


def test_an_overdue_experiment_is_told_once_until_it_recovers(
    hook: Hook, mails: Mails, tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = tiny.model_copy(update={"schedule": PLAN})
    assert overdue_sensors([tiny]) == []
    (sensor,) = overdue_sensors([tiny, planned])
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv(VARIABLE, hook.url)
    now, cursor = time.time(), "typed in the UI"
    monkeypatch.setattr("triplane_dagster.overdue.time", SimpleNamespace(time=lambda: now))
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:

        def tick() -> str:
            nonlocal cursor
            context = dg.build_sensor_context(instance, cursor=cursor, definitions=dg.Definitions())
            done = sensor.evaluate_tick(context)
            cursor = done.cursor or cursor
            return done.skip_message or ""

        assert tick() == "nothing is overdue", "nothing was ever made"
        for asset in ("dataset", "sampler"):
            instance.report_runless_asset_event(dg.AssetMaterialization(key_of(tiny, asset)))
        now = time.time() + ALLOWED.total_seconds() - 60
        assert tick() == "nothing is overdue" and hook.posted == mails.received == []
        now += 120
        for _ in range(2):
            assert tick().startswith("tiny is overdue: no dataset since ")
        (posted,), (mail,) = hook.posted, mails.received
        assert posted["text"] == mail["Subject"].replace("\r\n", "") + posted["text"][150:]
        assert posted["error"].startswith("nothing is under way; see whether tiny_nightly is on")
        assert (posted["experiment"], posted["asset"], posted["limit_hours"]) == ("tiny", "dataset", 78.0)
        now = time.time()
        assert tick() == "nothing is overdue"
        begin_target(open_store(), planned, 2)
        now += ALLOWED.total_seconds()
        tick()
        assert "a command asked for iterations 0000 to 0001" in hook.posted[1]["error"]
        monkeypatch.delenv(VARIABLE)
        monkeypatch.delenv(EMAIL_VARIABLE)
        assert tick() == NO_RECEIVER.skip_message
    assert len(hook.posted) == len(mails.received) == 2


def test_an_overdue_experiment_is_told_where_its_store_can_not_be_read(
    tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", "ftp://nowhere")
    planned = tiny.model_copy(update={"schedule": PLAN})
    with dg.DagsterInstance.local_temp(str(tmp_path)) as instance:
        instance.report_runless_asset_event(dg.AssetMaterialization(key_of(tiny, "sampler")))
        told = overdue_messages(instance, [planned], time.time() + ALLOWED.total_seconds())
    assert "no sampler since" in told["tiny"]["text"] and "ftp://nowhere" in told["tiny"]["error"]


def test_the_executor_is_named_by_one_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("", "in_process", "multiprocess", "k8s"):
        monkeypatch.setenv("TRIPLANE_EXECUTOR", name)
        found.append(step_executor().name)
    assert found == ["in_process", "in_process", "multiprocess", "k8s"]
    monkeypatch.setenv("TRIPLANE_EXECUTOR", "dask")
    with pytest.raises(ConfigError, match="TRIPLANE_EXECUTOR=dask: no such executor; use in_process, multiprocess or"):
        step_executor()
