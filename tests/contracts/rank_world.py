"""Ranks as processes that a server forks, so that dozens of launches take seconds."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path

from contracts import failpoints, tensor_parts
from contracts.artifacts import ArtifactWriter
from contracts.rank_parts import gather_parts, stage_parts
from contracts.store import LocalStore
from contracts.tensor_files import Form
from contracts.tensor_parts import add_parts

KEY, RANKS, NAME = "0" * 64, 3, "model.safetensors"
FORMS: dict[str, Form] = {f"t{number:02}": ("U8", (100_000 + number,)) for number in range(18)}
PART = 350_000


def content(name: str) -> memoryview:
    """Bytes of a tensor of FORMS."""
    return memoryview(name.encode()[-1:] * FORMS[name][1][0])


def share(rank: int, ranks: int) -> dict[str, Form]:
    """Tensors of one rank."""
    return {name: FORMS[name] for name in list(FORMS)[rank::ranks]}


def run_rank(store: str, folder: str, rank: int, ranks: int, kill_at: str, timeout_s: float) -> None:
    """What one rank does; rank 0 commits."""
    if kill_at:
        os.environ[failpoints.KILL_VARIABLE], failpoints._ORDERED = kill_at, True
    tensor_parts.PART_BYTES = PART

    def read(name: str) -> memoryview:
        time.sleep(0.003)
        return content(name)

    stage_parts(Path(folder), rank, ranks, share(rank, ranks), read)
    if rank:
        return
    with ArtifactWriter(LocalStore(Path(store)), "thing", KEY, parents={}, config={}, code_version="1") as out:
        add_parts(out, NAME, gather_parts(Path(folder), ranks, FORMS, timeout_s), Path(folder))
        out.commit()


def start(store: str, folder: str, ranks: int, kill: Mapping[int, str], timeout_s: float) -> list[BaseProcess]:
    """Start all ranks. kill: failpoint by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["contracts.rank_parts"])
    found: list[BaseProcess] = [
        context.Process(target=run_rank, args=(store, folder, rank, ranks, kill.get(rank, ""), timeout_s))
        for rank in range(ranks)
    ]
    for each in found:
        each.start()
    return found
