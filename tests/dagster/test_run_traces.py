"""Steps are in the trace of their run, and what they launch is in theirs."""

import signal
import subprocess
import sys
from collections.abc import Iterator

import dagster as dg
import pytest

from contracts import tracing
from contracts.errors import InfraFault
from ops import retries
from ops.retries import bounded
from ops.spans import run_span, trace_tag
from resources.launcher import LocalLauncher
from tests.dagster.launching import launch_in_an_op
from tests.otlp import collecting, forget
from triplane_dagster.executors import step_executor

CHILD = "from contracts import tracing\nwith tracing.service('trainer'), tracing.span('train'): pass"


ENDED = """
import asyncio, dagster as dg
from contracts import tracing
from ops.retries import bounded
from resources.loops import run_async

async def work():
    with tracing.span("group"):
        print("begun", flush=True)
        await asyncio.sleep(600)

@dg.op
@bounded
def sampling(context: dg.OpExecutionContext) -> None:
    run_async(work())

@dg.job
def job():
    sampling()

job.execute_in_process()
"""


@dg.op
@bounded
def failing_once(context: dg.OpExecutionContext) -> int:
    if context.retry_number == 0:
        raise InfraFault("the secret prompt")
    return 1


@dg.op
@bounded
def yielding(context: dg.OpExecutionContext, number: int) -> Iterator[dg.Output[int]]:
    with tracing.span("group"):
        pass
    yield dg.Output(number)


@dg.job
def job() -> None:
    yielding(failing_once())


@dg.job(executor_def=step_executor())
def repeated() -> None:
    failing_once()


def test_steps_and_their_retries_are_in_the_trace_of_their_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "FAULT_DELAY_S", 0.0)
    with collecting(monkeypatch) as found:
        run = job.execute_in_process()  # as in a process of its own: without the run's span
        assert run.success
        first, again = found.named("step failing_once")
        (second,) = found.named("step yielding")
        assert [found.attributes(each)["triplane.attempt"] for each in (first, again)] == [0, 1]
        assert found.attributes(first)["error.type"] == "InfraFault" and first.status.code == 2
        assert again.status.code == second.status.code == 0
        with run_span(run.run_id, "job"):
            pass
        assert found.path(found.named("group")[0]) == ["run job", "step yielding", "group"] and not found.orphans()
        assert trace_tag(run.run_id) == {"triplane/trace": first.trace_id.hex()}
        assert found.attributes(first)["dagster.run_id"] == run.run_id
        assert b"secret" not in b"".join(span.SerializeToString() for span in found.spans)
    assert not [record for record in caplog.records if record.name.startswith("opentelemetry")]
    forget(monkeypatch)
    assert trace_tag(run.run_id) == {}


@dg.op
@bounded
def failing(context: dg.OpExecutionContext) -> None:
    raise ValueError("the secret prompt")


@dg.job(executor_def=step_executor())
def refused() -> None:
    failing()


@pytest.mark.parametrize(("executed", "error"), [(refused, "StepFailed"), (repeated, None)])
def test_the_span_of_a_run_is_marked_failed_if_a_step_failed_for_good(
    executed: dg.JobDefinition, error: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FAULT_DELAY_S", 0.0)
    with collecting(monkeypatch) as found, dg.instance_for_test() as instance:
        run = dg.execute_job(dg.reconstructable(executed), instance=instance)
        (span,) = found.named(f"run {executed.name}")
        assert run.success == (error is None) == (span.status.code == 0)
        assert found.attributes(span).get("error.type") == error


def test_what_a_step_launches_is_in_its_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(monkeypatch) as found:
        with tracing.span("step"):
            launch_in_an_op(LocalLauncher(grace_s=5), [sys.executable, "-c", CHILD], [])
        tracing.flush()
        assert [found.path(span) for span in found.named("train")] == [["step", "train"]]


@pytest.mark.slow
def test_a_step_that_is_told_to_end_sends_its_spans_first(monkeypatch: pytest.MonkeyPatch) -> None:
    with collecting(monkeypatch, OTEL_BSP_SCHEDULE_DELAY="600000") as found:
        process = subprocess.Popen([sys.executable, "-c", ENDED], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) != 0
        process.stdout.close()
        assert found.names() == {"group": 1, "step sampling": 1}
        assert found.named("group")[0].status.code == 0, "to be told to end is no error"
