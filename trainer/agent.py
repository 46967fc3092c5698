"""Run the ranks of one job on this machine: start a process for each, and end all of them when one fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from signal import Signals

from contracts.owned import fate_of_owner, owned_name
from trainer.errors import RANKS_LOST_STATUS, RanksFailed
from trainer.lifetime import MEETING_VARIABLE, PARENT_VARIABLE
from trainer.nodes import Node, await_address, local_ranks, this_node
from trainer.pipes import PIPES_VARIABLE

GRACE_S = 5.0
"""Seconds between SIGTERM and SIGKILL. A rank that waits for another one in native code does not see SIGTERM."""
POLL_S = 0.05


@dataclass(frozen=True)
class _Child:
    rank: int
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def failed(self) -> bool:
        return self.process.poll() not in (None, 0)

    @property
    def reason(self) -> str:
        status = self.process.returncode
        if status is None:
            return "did not answer"
        words = _words(self.folder, self.rank)
        if words.exists():
            return words.read_text(encoding="utf-8")
        if status < 0:
            return f"was killed by {Signals(-status).name}"
        log = _log(self.folder, self.rank)
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        return " | ".join(lines[-5:])[-1000:] or f"ended with code {status}"


def run_ranks(count: int, arguments: Sequence[str]) -> None:
    """Run `python -m trainer` with `arguments` in `count` processes to their end; on several machines, in those of
    this one.

    Rank 0 keeps this process's stdout and stderr. Raises RanksFailed with the words of the rank that failed first, and
    RanksLost.
    """
    node = this_node()
    ranks, place = local_ranks(node, count), _place(node, count)
    with (
        tempfile.TemporaryDirectory(prefix="triplane-ranks-") as folder,
        _children(ranks, {"WORLD_SIZE": str(count), **place}, arguments, Path(folder)) as every,
    ):
        while any(child.process.poll() is None for child in every):
            if any(child.failed for child in every):
                break
            time.sleep(POLL_S)
        if any(child.failed for child in every):
            raise _first_failure(every, count)


def tell_agent(words: str) -> bool:
    """Leave this rank's last words to the agent. Returns False if no agent started this process."""
    meeting = os.environ.get(MEETING_VARIABLE)
    if meeting is None:
        return False
    with suppress(OSError):  # the agent has ended and removed its folder
        _words(Path(meeting).parent, os.environ["RANK"]).write_text(words, encoding="utf-8")
    return True


def sign_in() -> None:
    """Leave this rank's identity to the process that must end it."""
    meeting = os.environ.get(MEETING_VARIABLE)
    if meeting is not None:
        with suppress(OSError):
            _identity(Path(meeting).parent, os.environ["RANK"]).write_text(owned_name())


def kill_ranks(folder: Path, count: int) -> None:
    """Kill the ranks that signed in and still run."""
    for rank in range(count):
        path = _identity(folder, rank)
        name = path.read_text() if path.exists() else ""
        if fate_of_owner(name) == "alive":
            with suppress(ProcessLookupError):
                os.kill(int(name.split(".")[1]), signal.SIGKILL)


def _identity(folder: Path, rank: int | str) -> Path:
    return folder / f"rank-{rank}.owner"


def words_of(folder: Path, count: int) -> dict[int, str]:
    """Last words, by rank, of the ranks that left some."""
    paths = {rank: _words(folder, rank) for rank in range(count)}
    return {rank: path.read_text(encoding="utf-8") for rank, path in paths.items() if path.exists()}


def _words(folder: Path, rank: int | str) -> Path:
    return folder / f"rank-{rank}.words"


def _log(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}.log"


def _first_failure(children: Sequence[_Child], count: int) -> RanksFailed:
    """Error of the rank that failed for a reason of its own; the others lost it."""
    until = time.monotonic() + GRACE_S
    while True:
        own = [c for c in children if c.failed and c.process.returncode != RANKS_LOST_STATUS]
        if own or all(c.process.poll() is not None for c in children) or time.monotonic() > until:
            break
        time.sleep(POLL_S)
    silent = [child for child in children if child.process.poll() is None]
    first = next(iter(own or silent or [child for child in children if child.failed]))
    return RanksFailed(first.rank, count, first.reason, first.process.returncode)


def _place(node: Node | None, count: int) -> dict[str, str]:
    """Variables by which the ranks find each other."""
    if node is None or not node.several:
        return {"GLOO_SOCKET_IFNAME": "lo"}
    name = os.environ.get("GLOO_SOCKET_IFNAME") or await_address(node, count)
    return {"GLOO_SOCKET_IFNAME": name, "LOCAL_WORLD_SIZE": str(count // node.count)}


@contextmanager
def _children(ranks: range, place: Mapping[str, str], arguments: Sequence[str], folder: Path) -> Iterator[list[_Child]]:
    children: list[_Child] = []
    copiers: list[threading.Thread] = []
    try:
        for local, rank in enumerate(ranks):
            environment = {**place, "RANK": str(rank), "LOCAL_RANK": str(local)}
            children.append(_start(rank, environment, arguments, folder))
            copiers += _copier(children[-1])
        yield children
    finally:
        for child in children:
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
        until = time.monotonic() + GRACE_S
        for child in children:
            try:
                child.process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        for thread in copiers:
            thread.join(GRACE_S)


def _copier(child: _Child) -> list[threading.Thread]:
    """Thread that copies what a rank other than 0 writes to this process's stderr, of which a pod's log is made."""
    if child.process.stderr is None:
        return []
    thread = threading.Thread(target=_copy, args=(child,), name=f"rank-{child.rank}", daemon=True)
    thread.start()
    return [thread]


def _copy(child: _Child) -> None:
    assert child.process.stderr is not None
    with child.process.stderr as lines, _log(child.folder, child.rank).open("wb") as file:
        for line in lines:
            file.write(line)
            file.flush()
            sys.stderr.write(f"[rank {child.rank}] {line.decode(errors='replace')}")
            sys.stderr.flush()


def _start(rank: int, place: Mapping[str, str], arguments: Sequence[str], folder: Path) -> _Child:
    environment = {
        **os.environ,
        **place,
        MEETING_VARIABLE: str(folder / "meeting"),
        PARENT_VARIABLE: str(os.getpid()),
    }
    if rank:
        environment.pop(PIPES_VARIABLE, None)
    command = [sys.executable, "-m", "trainer", *arguments]
    if rank == 0:
        return _Child(rank, subprocess.Popen(command, stdin=subprocess.DEVNULL, env=environment), folder)
    if this_node() is not None:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment
        )
        return _Child(rank, process, folder)
    with _log(folder, rank).open("wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=file, env=environment
        )
    return _Child(rank, process, folder)
