"""Ranks as processes that a server forks, so that dozens of launches take seconds. Each has a disk of its own; they
share the store, and rank 0 holds a pipe to every other one.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from contracts import failpoints, tensor_parts
from contracts.artifacts import ArtifactWriter
from contracts.errors import InfraFault
from contracts.rank_parts import put_parts, stage_parts
from contracts.store import open_store, scratch_directory
from contracts.tensor_files import Form

KEY, RANKS, NAME = "0" * 64, 3, "model.safetensors"
FORMS: dict[str, Form] = {f"t{number:02}": ("U8", (100_000 + number,)) for number in range(18)}
PART = 350_000


def content(name: str) -> memoryview:
    """Bytes of a tensor of FORMS."""
    return memoryview(name.encode()[-1:] * FORMS[name][1][0])


def share(rank: int, ranks: int) -> dict[str, Form]:
    """Tensors of one rank."""
    return {name: FORMS[name] for name in list(FORMS)[rank::ranks]}


class Pipes:
    """An `Exchange` of processes. others: on rank 0 a pipe to each other rank, else one to rank 0."""

    def __init__(self, rank: int, others: Sequence[Connection], timeout_s: float) -> None:
        self._rank, self._others, self._timeout_s = rank, others, timeout_s

    def __call__(self, words: str) -> list[str]:
        """What every rank passed."""
        try:
            if self._rank:
                self._others[0].send(words)
                return self._receive(self._others[0])
            found = [words, *(self._receive(pipe) for pipe in self._others)]
            for pipe in self._others:
                pipe.send(found)
            return found
        except (EOFError, OSError):
            raise InfraFault(f"rank {self._rank} lost another rank") from None

    def _receive(self, pipe: Connection) -> list[str]:
        if not pipe.poll(self._timeout_s):
            raise InfraFault(f"rank {self._rank} waits for another rank")
        return pipe.recv()  # type: ignore[no-any-return]


def run_rank(
    store: str,
    variables: Mapping[str, str],
    rank: int,
    ranks: int,
    pipes: Sequence[Connection],
    kill_at: str,
    timeout_s: float,
) -> None:
    """What one rank does; rank 0 commits. variables: of a remote store."""
    if kill_at:
        os.environ[failpoints.KILL_VARIABLE], failpoints._ORDERED = kill_at, True
    os.environ.update(variables)
    tensor_parts.PART_BYTES = PART
    opened, exchange = open_store(store), Pipes(rank, pipes, timeout_s)

    def read(name: str) -> memoryview:
        time.sleep(0.003)
        return content(name)

    with scratch_directory(opened) as folder, ExitStack() as stack:
        staged = stage_parts(Path(folder), rank, ranks, share(rank, ranks), read)
        out = None
        if not rank:
            out = stack.enter_context(ArtifactWriter(opened, "thing", KEY, parents={}, config={}, code_version="1"))
        put_parts(out, opened, NAME, staged, FORMS, exchange)
        if out is not None:
            out.commit()


def start(store: str, caches: Path, ranks: int, kill: Mapping[int, str], timeout_s: float) -> list[BaseProcess]:
    """Start all ranks. caches: folder for one cache each. kill: failpoint by rank."""
    # the server that forks has the environment of its own start
    common = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    variables = [{**common, "TRIPLANE_CACHE": str(caches / f"rank-{rank}")} for rank in range(ranks)]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["contracts.rank_parts", "contracts.s3store"])
    pairs = [context.Pipe() for _ in range(ranks - 1)]
    ends = [[here for here, _ in pairs], *([there] for _, there in pairs)]
    found: list[BaseProcess] = [
        context.Process(
            target=run_rank,
            args=(store, variables[rank], rank, ranks, ends[rank], kill.get(rank, ""), timeout_s),
        )
        for rank in range(ranks)
    ]
    for each in found:
        each.start()
    for here, there in pairs:
        here.close()
        there.close()
    return found
