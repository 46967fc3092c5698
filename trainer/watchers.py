"""Watchers of a run that write its metrics elsewhere: a JSONL file, TensorBoard, Weights & Biases, MLflow.

The last three need packages of their own: `pip install 'triplane[tensorboard]'`, `[wandb]` or `[mlflow]`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from pydantic import Field

from contracts.errors import describe
from trainer.errors import TrainingConfigError
from trainer.metrics import Record, Watcher
from trainer.settings import Settings


class WandbConfig(Settings):
    """A run at Weights & Biases; `WANDB_MODE=offline` keeps it on this machine."""

    project: str = Field(min_length=1)
    """Project that the run belongs to."""
    entity: str | None = None
    """User or team; None: the account's default."""


class MlflowConfig(Settings):
    """A run of MLflow."""

    tracking_uri: str | None = None
    """Server or `file:` folder; None: MLFLOW_TRACKING_URI, else a folder of the output."""
    experiment: str = "triplane"
    """Experiment that the run belongs to."""


class WatchConfig(Settings):
    """Where metrics go, beside `metrics.jsonl`."""

    tensorboard: bool = False
    """Whether to write event files to the output's folder `tensorboard`."""
    wandb: WandbConfig | None = None
    """None: no run at Weights & Biases."""
    mlflow: MlflowConfig | None = None
    """None: no run of MLflow."""


class WatchedRun(Settings):
    """A run whose metrics go elsewhere, too."""

    watch: WatchConfig
    output: Path
    """Folder of the files."""
    name: str
    """Name of the run."""

    @contextmanager
    def watchers(self, key: str) -> Iterator[list[Watcher]]:
        """The run's watchers. key: the job's, which a resumed run keeps. Raises TrainingConfigError."""
        with open_watchers(self.watch, self.output, self.name, key) as found:
            yield found


@contextmanager
def open_watchers(config: WatchConfig, output: Path, name: str, key: str) -> Iterator[list[Watcher]]:
    """The watchers that `config` names, closed at the end. name: of the run. key: the job's, which a resumed run keeps.

    Raises TrainingConfigError if a package is not installed or `output` can't be made.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise TrainingConfigError(f"the folder of metrics can't be made: {describe(error)}") from None
    with ExitStack() as stack:
        watchers = [stack.enter_context(jsonl_watcher(output / "metrics.jsonl"))]
        if config.tensorboard:
            watchers.append(stack.enter_context(tensorboard_watcher(output / "tensorboard")))
        if config.wandb is not None:
            watchers.append(stack.enter_context(wandb_watcher(config.wandb, output, name, key)))
        if config.mlflow is not None:
            watchers.append(stack.enter_context(mlflow_watcher(config.mlflow, output, name, key)))
        yield watchers


@contextmanager
def jsonl_watcher(path: Path) -> Iterator[Watcher]:
    """Append each record to `path`. Records of steps that a resumed run repeats are removed first."""
    file: TextIO | None = None

    def watch(record: Record) -> None:
        nonlocal file
        if file is None:
            lines = path.read_text().splitlines(keepends=True) if path.is_file() else []
            path.write_text("".join(line for line in lines if _step_of(line) < record["step"]))
            file = path.open("a")
        file.write(json.dumps(record) + "\n")
        file.flush()

    try:
        yield watch
    finally:
        if file is not None:
            file.close()


@contextmanager
def tensorboard_watcher(folder: Path) -> Iterator[Watcher]:
    """Write event files to `folder`. Values of steps that a resumed run repeats are replaced."""
    with _needs("tensorboard"):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    folder.mkdir(parents=True, exist_ok=True)
    writer, begun = EventFileWriter(str(folder)), False

    def watch(record: Record) -> None:
        nonlocal begun
        if not begun:
            session = SessionLog(status=SessionLog.START)
            writer.add_event(Event(wall_time=time.time(), step=record["step"], session_log=session))
            begun = True
        values = [Summary.Value(tag=f"train/{tag}", simple_value=value) for tag, value in _numbers(record).items()]
        writer.add_event(Event(wall_time=time.time(), step=record["step"], summary=Summary(value=values)))

    try:
        yield watch
    finally:
        writer.close()


@contextmanager
def wandb_watcher(config: WandbConfig, output: Path, name: str, key: str) -> Iterator[Watcher]:
    """Log to a run of Weights & Biases, which a resumed job continues."""
    with _needs("wandb"):
        import wandb
    run = wandb.init(
        project=config.project, entity=config.entity, name=name, id=key[:32], resume="allow", dir=str(output)
    )
    try:
        yield lambda record: run.log(_numbers(record), step=record["step"])
    finally:
        run.finish()


@contextmanager
def mlflow_watcher(config: MlflowConfig, output: Path, name: str, key: str) -> Iterator[Watcher]:
    """Log to a run of MLflow, which a resumed job continues."""
    with _needs("mlflow"):
        from mlflow.tracking import MlflowClient
    uri = config.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI") or (output / "mlruns").absolute().as_uri()
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(config.experiment)
    experiment = client.create_experiment(config.experiment) if found is None else found.experiment_id
    same = client.search_runs([experiment], filter_string=f"tags.triplane_job = '{key}'", max_results=1)
    run = same[0].info.run_id if same else _new_run(client, experiment, name, key)

    def watch(record: Record) -> None:
        for tag, value in _numbers(record).items():
            client.log_metric(run, tag, value, step=record["step"])

    try:
        yield watch
    finally:
        client.set_terminated(run)


def _new_run(client: Any, experiment: str, name: str, key: str) -> str:
    return str(client.create_run(experiment, tags={"triplane_job": key}, run_name=name).info.run_id)


@contextmanager
def _needs(package: str) -> Iterator[None]:
    try:
        yield
    except ImportError as error:
        raise TrainingConfigError(
            f"watch.{package}: the package is not installed ({error}): pip install 'triplane[{package}]', or leave the"
            " setting out"
        ) from None


def _numbers(record: Record) -> dict[str, float]:
    """Numeric metrics of a record, without its step."""
    numeric = {tag: value for tag, value in record.items() if isinstance(value, int | float) and tag != "step"}
    return {tag: float(value) for tag, value in numeric.items()}


def _step_of(line: str) -> int:
    """Step of a JSON line; a line that a kill cut off counts as of a later step."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return 1 << 62
