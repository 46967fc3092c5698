"""Run the ranks of one job through torchrun or DeepSpeed's launcher, and report one error as `trainer.agent` does."""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from contracts.owned import owned_name
from trainer.agent import GRACE_S, POLL_S, kill_ranks, words_of
from trainer.config import Starter
from trainer.errors import RanksFailed, TrainingConfigError
from trainer.lifetime import ANCESTOR_VARIABLE, MEETING_VARIABLE, PARENT_VARIABLE

LOST_S = 3.0
"""Seconds that a launcher has to end its ranks after one of them left its last words."""
_FOLLOWING = (" lost another rank ", "stopped by ")
"""In the last words of ranks that end since another one did."""


def run_started(starter: Starter, count: int, arguments: Sequence[str]) -> str:
    """Run `python -m trainer` with `arguments` in `count` processes of `starter`. Returns rank 0's last line.

    Raises RanksFailed with the words of the rank that failed first.
    """
    with tempfile.TemporaryDirectory(prefix="triplane-ranks-") as name:
        folder = Path(name)
        with (folder / "out").open("wb") as out, _launched(starter, count, arguments, folder, out.fileno()) as child:
            since: float | None = None
            while child.poll() is None:
                if since is None and words_of(folder, count):
                    since = time.monotonic()
                if since is not None and time.monotonic() > since + LOST_S:
                    break
                time.sleep(POLL_S)
        if child.returncode == 0:
            return (folder / "out").read_text(errors="replace").rstrip().splitlines()[-1]
        raise _failure(starter, count, folder, child.returncode)


def _failure(starter: Starter, count: int, folder: Path, status: int) -> RanksFailed:
    """Error of the rank that failed for a reason of its own, else of one that lost it."""
    words = words_of(folder, count)
    for rank, text in words.items():
        if not any(each in text for each in _FOLLOWING):
            return RanksFailed(rank, count, text, status)
    silent = next((rank for rank in range(count) if rank not in words), 0)
    reason = f"was killed or did not answer; {starter} ended with code {status}, see its output"
    return RanksFailed(silent, count, reason, None)


@contextmanager
def _launched(
    starter: Starter, count: int, arguments: Sequence[str], folder: Path, out: int
) -> Iterator[subprocess.Popen[bytes]]:
    environment = {
        **os.environ,
        "GLOO_SOCKET_IFNAME": "lo",
        MEETING_VARIABLE: str(folder / "meeting"),
        ANCESTOR_VARIABLE: owned_name(),
    }
    environment.pop(PARENT_VARIABLE, None)
    child = subprocess.Popen(
        [sys.executable, "-m", *_command(starter, count), *arguments],
        stdin=subprocess.DEVNULL,
        stdout=out,
        env=environment,
    )
    try:
        yield child
    finally:
        if child.poll() is None:
            child.send_signal(signal.SIGTERM)
            try:
                child.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        kill_ranks(folder, count)


def _command(starter: Starter, count: int) -> list[str]:
    """Arguments of python before those of the trainer."""
    if starter == "torchrun":
        return ["torch.distributed.run", "--standalone", f"--nproc-per-node={count}", "-m", "trainer"]
    if importlib.util.find_spec("deepspeed") is None:
        raise TrainingConfigError(
            "starter deepspeed: the package deepspeed is not installed: run `pip install 'triplane[deepspeed]'`, or set"
            " trainer.launcher.starter to torchrun"
        )
    world = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(count))}).encode()).decode()
    launch = ["deepspeed.launcher.launch", f"--world_info={world}", "--quiet", "--no_local_rank"]
    return [*launch, "--module", "trainer"]
