"""`python -m trainer`: run one training job. Progress goes to stderr; the last line of stdout is the result as JSON."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

from pydantic import ValidationError

from contracts import tracing
from contracts.errors import TriplaneError, describe
from trainer.agent import run_ranks, sign_in, tell_agent
from trainer.alone import Plan, prepare
from trainer.config import RlJob, SftJob, read_job
from trainer.errors import LAST_WORDS, RanksFailed, RanksLost, TrainingConfigError, TrainingDiverged, TrainingStopped
from trainer.lifetime import end_with_parent
from trainer.metrics import Watcher
from trainer.nodes import this_node
from trainer.starters import run_started
from trainer.watchers import WatchedRun

EXAMPLE = """\
example of a job (JSON or YAML; references are those of committed artifacts):
  kind: sft
  store: .triplane/store
  key: "<64 hex digits: the action key under which the results are committed>"
  seed: 0
  threads: 2
  ranks: 1
  tokenizer: {kind: tokenizer, key: ..., digest: ...}
  demonstrations: {kind: demonstrations, key: ..., digest: ...}
  model: {hidden_size: 128, layers: 3}
  config: {max_steps: 4000, expected_solve: 0.4}

kind rl takes dataset, checkpoint and trainer_state instead of tokenizer and demonstrations. With ranks above 1, that
many processes share each batch; `torchrun -m trainer --job JOB` starts them on several machines, and so does this
command, once on each machine, with the variables of trainer/nodes.py. A job that is done prints its result again; one
that was killed continues from its last snapshot. exit status: 0 done, 1 failed, 2 malformed job, 3 another rank ended
or did not answer, 4 diverged, 128+N stopped or killed by signal N.
"""


def main(arguments: list[str] | None = None) -> int:
    """Entry point. Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description=__doc__,
        epilog=EXAMPLE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--job", metavar="JOB", help="file with the job, or the job itself as JSON")
    source.add_argument("--config", metavar="FILE", help="YAML file with the job")
    source.add_argument("--train", metavar="FILE", help="YAML file of a run on Parquet files; see docs/training.md")
    parser.add_argument(
        "--watch",
        metavar="JSON",
        help="where metrics of a job go, too: watch, as in the file of --train; output, a folder; name, of the run",
    )
    options = parser.parse_args(arguments)
    if options.watch and options.train:
        parser.error("--watch is for --job and --config: a file of --train has its own")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _stop)
    try:
        end_with_parent()
        source = options.job or options.config
        plan = None if source else prepare(Path(options.train))
        job = plan.job if plan else read_job(source)
        if "WORLD_SIZE" not in os.environ and (job.ranks > 1 or job.starter != "agent"):
            own = ["--job", source] if source else ["--train", options.train]
            own += ["--watch", options.watch] if options.watch else []
            _check_starter(job)
            if job.starter == "agent":
                run_ranks(job.ranks, own)
            else:
                print(run_started(job.starter, job.ranks, own), flush=True)
            return 0
        sign_in()
        with tracing.service("trainer"), tracing.span("train", {"triplane.rank": int(os.environ.get("RANK", "0"))}):
            result = _run(job, plan, plan.watched if plan else _watched(options.watch))
    except TriplaneError as error:
        return _failed(error)
    except OSError as error:
        _tell(describe(error))
        return 1
    if result is not None:
        print(json.dumps(result), flush=True)
    return 0


def _watched(text: str | None) -> WatchedRun | None:
    """The run that --watch describes. Raises TrainingConfigError."""
    try:
        return WatchedRun.model_validate_json(text) if text else None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise TrainingConfigError(f"--watch: {where or 'JSON'}: {first['msg']}") from None


def _check_starter(job: SftJob | RlJob) -> None:
    """Raise TrainingConfigError for a starter that knows no other machines."""
    node = this_node()
    if node is not None and node.several and job.starter != "agent":
        raise TrainingConfigError(
            f"starter {job.starter} starts ranks on one machine only, this job has {node.count}: set"
            " trainer.launcher.starter to agent"
        )


def _failed(error: TriplaneError) -> int:
    """Report `error`. Returns the exit status."""
    _tell(str(error))
    if isinstance(error, TrainingStopped | RanksFailed | RanksLost | TrainingDiverged):
        return error.exit_status
    return 2 if isinstance(error, TrainingConfigError) else 1


def _tell(reason: str) -> None:
    if not tell_agent(reason):
        print(f"{LAST_WORDS}{reason}", file=sys.stderr)


def _run(job: SftJob | RlJob, plan: Plan | None, watched: WatchedRun | None) -> dict[str, Any] | None:
    # OpenMP reads this when torch loads it: under other load, threads that busy-wait for each other make a step ten
    # times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Imported late, so that a malformed job fails before torch loads.
    from trainer.console import console_watcher
    from trainer.metrics import pipes_watcher
    from trainer.pipes import open_pipes
    from trainer.run import run_job
    from trainer.runtime import keep_freed_memory

    keep_freed_memory()
    if int(os.environ.get("RANK", "0")):
        run_job(job)
        return None
    own: AbstractContextManager[list[Watcher]] = watched.watchers(job.key) if watched else nullcontext([])
    with open_pipes() as context, console_watcher(job) as console, own as others:
        watchers = [console, *others]
        if context is not None:
            watchers.append(pipes_watcher(context, every=10 if isinstance(job, SftJob) else 1))
        found = run_job(job, watchers)
        assert found is not None, "rank 0 publishes"
        result = found.as_json()
        if context is not None:
            context.report_custom_message({"result": result})
    if plan is not None:
        plan.finish(result)
    return result


def _stop(number: int, frame: FrameType | None) -> None:
    for each in (
        signal.SIGTERM,
        signal.SIGINT,
    ):  # the launcher repeats the signal of Ctrl-C, which reached both: don't interrupt the clean-up
        signal.signal(each, signal.SIG_IGN)
    raise TrainingStopped(number)


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # shutting down the interpreter with torch takes a needless second
