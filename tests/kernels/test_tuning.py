"""Launch configurations: the packaged one nearby, else the user's, else a search that is remembered."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triplane_kernels import tune, tuning
from triplane_kernels.errors import KernelError
from triplane_kernels.machine import Machine

H200 = Machine("NVIDIA H200", "3.7.1", False, (9, 0), 132, gluon=True)
SMALL, FIRST, SECOND = ({"BLOCK_M": rows, "num_warps": 4} for rows in (16, 64, 128))


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A machine with a GPU, an empty cache and no packaged table; the list tells each search. The last candidate always wins."""
    found: list[str] = []

    def search(op: str, candidates: list[tuning.Config], run: object) -> tuning.Config:
        found.append(op)
        return dict(candidates[-1])

    monkeypatch.setattr(tuning, "machine", lambda: H200)
    monkeypatch.setattr(tuning, "search", search)
    monkeypatch.setattr(tuning, "TUNED", tmp_path / "tuned")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setenv(tuning.CACHE, str(tmp_path / "cache"))
    tuning._remembered.clear()
    tuning._packaged.cache_clear()
    yield found
    tuning._remembered.clear()
    tuning._packaged.cache_clear()


def look(shape: tuple[int, ...]) -> tuning.Config:
    return tuning.lookup("gemm", shape, [FIRST, SECOND], lambda config: None, small=SMALL)


def test_a_search_is_remembered_here_and_in_the_next_process(searched: list[str], tmp_path: Path) -> None:
    assert look((4096, 7168)) == SECOND and look((4000, 7000)) == SECOND
    assert searched == ["gemm"]
    tuning._remembered.clear()
    assert look((4096, 8192)) == SECOND and searched == ["gemm"]
    (kept,) = (tmp_path / "cache").iterdir()
    assert "nvidia-h200-triton-3.7.1" in kept.name and tuning.source_digest() in kept.name
    assert json.loads(kept.read_text()) == {"gemm": {"4096x8192": SECOND}}
    assert look((64, 64)) == SECOND and searched == ["gemm", "gemm"]


def test_a_packaged_table_answers_by_the_nearest_shape(searched: list[str]) -> None:
    tuning.write_table(tuning.device_file(H200.device), {"gemm": {"64x64": FIRST, "8192x8192": SECOND}})
    assert tuning.device_file(H200.device).name == "nvidia-h200.json"
    assert look((100, 90)) == FIRST and look((5000, 3000)) == SECOND and not searched


def test_tuning_searches_whatever_is_kept(searched: list[str]) -> None:
    tuning.write_table(tuning.device_file(H200.device), {"gemm": {"64x64": FIRST}})
    with tuning.searching() as table:
        look((64, 64))
        look((64, 64))
    assert table == {"gemm": {"64x64": SECOND}} and searched == ["gemm"]


def test_nothing_is_searched_under_the_interpreter_or_while_a_graph_is_captured(
    searched: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert look((64, 64)) == FIRST
    monkeypatch.setattr(tuning, "machine", lambda: Machine("Triton interpreter", "3.7.1", True, None, 1, gluon=False))
    assert look((64, 64)) == SMALL and not searched


def test_a_broken_table_is_said_and_made_anew(
    searched: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    look((64, 64))
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text('{"gemm": {"64x')
    tuning._remembered.clear()
    with caplog.at_level(logging.WARNING):
        assert look((64, 64)) == SECOND
    assert "searched anew" in caplog.text and json.loads(kept.read_text()) == {"gemm": {"64x64": SECOND}}


def test_a_cache_that_cannot_be_written_costs_the_memory_only(
    searched: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tuning.CACHE, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert look((64, 64)) == SECOND
    assert tuning.CACHE in caplog.text and "writable folder" in caplog.text


def test_a_search_passes_over_what_the_device_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    testing = pytest.importorskip("triton.testing")
    times = {16: 3.0, 64: 2.0}
    monkeypatch.setattr(testing, "do_bench", lambda run, **options: run())

    def run(config: tuning.Config) -> float:
        if config["BLOCK_M"] not in times:
            raise RuntimeError("out of resource: shared memory")
        return times[config["BLOCK_M"]]

    assert tuning.search("gemm", [SECOND, SMALL, FIRST], run) == FIRST
    with pytest.raises(KernelError, match=r"none of 1 configurations runs.*shared memory"):
        tuning.search("gemm", [SECOND], run)


@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=4))
def test_a_bucket_is_its_own_bucket(shape: list[int]) -> None:
    name = tuning.bucket(shape)
    sizes = [int(part) for part in name.split("x")]
    assert tuning.bucket(sizes) == name
    assert all(size == at == 0 or 2**-0.51 <= size / at <= 2**0.51 for size, at in zip(shape, sizes, strict=True))
    assert tuning.nearest({name: FIRST, "x".join("1048576" for _ in shape): SECOND} | {name: FIRST}, sizes) == FIRST


def test_tuning_without_a_gpu_says_what_it_takes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tune, "machine", lambda: Machine("CPU", "3.7.1", False, None, 1, gluon=False))
    assert tune.main([]) == 2
    assert "CUDA GPU of compute capability 8.9" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        tune.main(["no_such_op"])


def test_every_op_of_this_package_has_workloads() -> None:
    with pytest.raises(SystemExit):
        tune.main(["--help"])
    ops = {"quantize_activations", "quantize_both", "quantize_weights", "quantize_mx", "gemm", "grouped_gemm"}
    assert ops <= set(tuning.WORKLOADS)
    assert all(workload.shapes for workload in tuning.WORKLOADS.values())
