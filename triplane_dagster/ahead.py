"""Sample iterations in a process of their own while this one trains; for experiments with overlap.

this process    wait_for(0000)            learn 0000, wait_for(0001)            learn 0001, wait_for(0002)
the other       sample 0000 | sample 0001 as soon as 0000 is taken | sample 0002 as soon as 0001 is taken

0000 is not trained before the inputs of 0001 are pinned, so that a killed and repeated command has the same result.
Dagster redirects a process's output while a step runs, so two runs at once need two processes.
"""

from __future__ import annotations

import functools
import logging
import multiprocessing
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from types import FrameType
from typing import Any, NoReturn

import dagster as dg

from contracts.parents import end_with_parent
from contracts.store import open_store
from ops.graph import ITERATION_INPUTS
from resources.errors import StepFailed
from resources.experiment import Experiment
from resources.progress import Progress, ProgressSink, no_progress
from resources.refs import has_ref
from triplane_dagster.cli.interrupts import is_interrupt
from triplane_dagster.cli.quiet import quiet_dagster
from triplane_dagster.run import Runner

_log = logging.getLogger(__name__)
GRACE_S = 5.0
"""Time for the sampling process to cancel its run, in seconds."""
POLL_S = 0.2


class Ahead:
    """The process that samples, at most one iteration ahead of what is asked for."""

    def __init__(
        self, experiment: Experiment, partitions: Sequence[str], instance: dg.DagsterInstance, sink: ProgressSink
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        arguments = (experiment, instance.get_ref(), theirs)
        self._process = context.Process(target=_sample, args=arguments, name="sampling")
        self._process.start()
        theirs.close()
        self._experiment, self._sink, self._left = experiment, sink, list(partitions)
        self._sampled: dict[str, Exception | None] = {}
        self._changed = threading.Condition()
        self._ended = False
        threading.Thread(target=self._listen, name="sampling-messages", daemon=True).start()
        self._begin_next()

    def wait_for(self, partition: str) -> None:
        """Return once an iteration is sampled and the next one has begun. Raises the error of its run."""
        self._wait_until(lambda: partition in self._sampled, partition)
        error = self._sampled[partition]
        if error is not None:
            raise error
        following = self._begin_next()
        if following is not None:
            pinned = functools.partial(has_ref, open_store(), self._experiment.name, ITERATION_INPUTS.name, following)
            self._wait_until(lambda: following in self._sampled or pinned(), following)

    def _wait_until(self, reached: Callable[[], bool], partition: str) -> None:
        with self._changed:
            while not reached():
                if self._ended:
                    raise StepFailed(
                        f"the process that samples {partition} died (exit status {self._process.exitcode}): the"
                        f" kernel's log may say why; run the same command again"
                    )
                self._changed.wait(POLL_S)  # with a limit, so that signals are handled

    def close(self) -> None:
        """Stop the process; its run is canceled."""
        self._process.terminate()
        self._process.join(GRACE_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        self._ours.close()

    def _begin_next(self) -> str | None:
        if not self._left:
            return None
        self._ours.send(self._left[0])
        return self._left.pop(0)

    def _listen(self) -> None:
        try:
            while True:
                message = self._ours.recv()
                if isinstance(message, Progress):
                    self._show(message)
                    continue
                with self._changed:
                    self._sampled.update(message)
                    self._changed.notify_all()
        except (EOFError, OSError):
            return
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _show(self, update: Progress) -> None:
        try:
            self._sink(update)
        except (Exception, SystemExit) as error:  # noqa: BLE001 (rich raises SystemExit if nobody reads its output)
            self._sink = no_progress
            _log.warning("progress of sampling is no longer shown: %s", type(error).__name__)


@contextmanager
def sampling_ahead(
    experiment: Experiment, partitions: Sequence[str], instance: dg.DagsterInstance, sink: ProgressSink
) -> Iterator[Ahead | None]:
    """The process that samples these iterations, in order; None without overlap."""
    if not experiment.off_policy.overlap or not partitions:
        yield None
        return
    ahead = Ahead(experiment, partitions, instance, sink)
    try:
        yield ahead
    finally:
        ahead.close()


def _sample(experiment: Experiment, ref: Any, theirs: Connection) -> None:
    """Body of the process: sample what is asked for until it is stopped or its parent dies."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent, in the same terminal, decides
    signal.signal(signal.SIGTERM, _stop)
    end_with_parent()
    lock = threading.Lock()

    def send(update: Progress | dict[str, Exception | None]) -> None:
        with lock:
            theirs.send(update)

    with quiet_dagster(), dg.DagsterInstance.from_ref(ref) as instance:
        runner = Runner(experiment, instance, send)
        try:
            while True:
                partition = theirs.recv()
                try:
                    runner.iteration(partition, half="sample")
                    send({partition: None})
                except Exception as error:  # noqa: BLE001 (raised again by the parent)
                    send({partition: _portable(error)})
        except BaseException as error:
            if not (isinstance(error, (EOFError, SystemExit)) or is_interrupt(error)):
                raise
        finally:
            runner.close()


def _portable(error: Exception) -> Exception:
    """The error, if it can be sent to another process; else one with its text."""
    try:
        copy: Exception = pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 (whatever the error's class raises)
        return StepFailed(f"{type(error).__name__}: {error}")
    return copy


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(128 + number)
