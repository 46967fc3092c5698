"""Launch configurations: the packaged one nearby, else the user's, else a search that is remembered."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from triplane_kernels import tuning
from triplane_kernels.errors import KernelError
from triplane_kernels.machine import Machine

H200 = Machine("NVIDIA H200", "3.7.1", False, (9, 0), 132, gluon=True)
SMALL, FIRST, SECOND = ({"BLOCK_M": rows, "num_warps": 4} for rows in (16, 64, 128))


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """A machine with a GPU, an empty cache and no packaged table; the list tells each search.

    The last candidate always wins.
    """
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


def test_a_process_without_a_home_keeps_configurations_in_the_given_folder(
    searched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.getuid", lambda: 2**31 - 7)
    with pytest.raises(RuntimeError):
        Path.home()
    assert look((64, 64)) == SECOND and len(list((tmp_path / "cache").iterdir())) == 1


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
    assert "searching configurations again" in caplog.text
    assert json.loads(kept.read_text()) == {"gemm": {"64x64": SECOND}}


def test_a_cache_that_cannot_be_written_costs_the_memory_only(
    searched: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(tuning.CACHE, str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING):
        assert look((64, 64)) == SECOND
    assert tuning.CACHE in caplog.text and "writable folder" in caplog.text


class Kernel:
    """Writes 1000 numbers in as many milliseconds as `times` gives for BLOCK_M; a device refuses what is not there."""

    def __init__(self, times: dict[int, float], write: Callable[[int, torch.Tensor], object]) -> None:
        self.times, self.write, self.written, self.rows = times, write, torch.empty(1000), 0

    def __call__(self, config: tuning.Config) -> torch.Tensor:
        self.rows = config["BLOCK_M"]
        if self.rows not in self.times:
            raise RuntimeError("out of resource: shared memory")
        self.write(self.rows, self.written)
        return self.written


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Kernel]:
    """Makes a `Kernel` and sets the clock that times it."""
    testing = pytest.importorskip("triton.testing")
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)

    def make(times: dict[int, float], write: Callable[[int, torch.Tensor], object] = right) -> Kernel:
        made = Kernel(times, write)
        monkeypatch.setattr(testing, "do_bench", lambda run, **options: (run(), made.times[made.rows])[1])
        return made

    return make


def right(rows: int, written: torch.Tensor) -> None:
    torch.arange(1000, out=written)


def other_numbers(rows: int, written: torch.Tensor) -> None:
    torch.mul(torch.arange(1000.0), 1.02 if rows == 64 else 1.0, out=written)


def nothing_written(rows: int, written: torch.Tensor) -> None:
    if rows != 64:
        right(rows, written)


def a_part_not_written(rows: int, written: torch.Tensor) -> None:
    torch.arange(999 if rows == 64 else 1000, out=written[: 999 if rows == 64 else 1000])


def test_a_search_takes_the_fastest_of_what_the_device_takes(kernel: Callable[..., Kernel]) -> None:
    run = kernel({16: 3.0, 64: 2.0})
    assert tuning.search("gemm", [SECOND, SMALL, FIRST], run) == FIRST
    with pytest.raises(KernelError, match=r"none of 1 configurations runs.*shared memory"):
        tuning.search("gemm", [SECOND], run)


@pytest.mark.parametrize("write", [other_numbers, nothing_written, a_part_not_written])
@pytest.mark.parametrize("order", [(FIRST, SMALL, SECOND), (SMALL, FIRST, SECOND)])
def test_a_configuration_whose_results_differ_is_passed_over_however_fast(
    kernel: Callable[..., Kernel],
    write: Callable[..., None],
    order: tuple[tuning.Config, ...],
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = kernel({16: 3.0, 64: 1.0, 128: 2.0}, write)
    with caplog.at_level(logging.WARNING):
        assert tuning.search("gemm", order, run) == SECOND
    assert "'BLOCK_M': 64" in caplog.text and "differ from 2 agreeing" in caplog.text


def test_results_agree_up_to_the_order_of_sums() -> None:
    ours = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    ours[7], ours[8] = torch.nan, torch.inf
    assert tuning.agree([ours], [ours * 1.001]) and not tuning.agree([ours], [ours * 1.1])
    for place, value in ((7, 0.0), (8, 0.0), (9, torch.nan), (9, torch.inf)):
        other = ours.clone()
        other[place] = value
        assert not tuning.agree([ours], [other]) and not tuning.agree([other], [ours])


def test_an_error_that_breaks_the_context_ends_the_search(
    kernel: Callable[..., Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    run = kernel({})
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    with pytest.raises(KernelError, match=r"gemm: .*'BLOCK_M': 64.* broke the CUDA context .*illegal memory"):
        tuning.search("gemm", [FIRST, SECOND], run)


def test_without_memory_to_time_the_first_is_taken_and_not_kept(
    searched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(op: str, candidates: object, run: object) -> tuning.Config:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(tuning, "search", full)
        assert look((64, 64)) == FIRST and "not enough memory to time" in caplog.text
    assert look((64, 64)) == SECOND


def test_what_brought_a_process_down_is_not_tried_again(searched: list[str]) -> None:
    tried: list[tuple[str, tuning.Config]] = []
    assert not tuning.tuning_now()
    with tuning.searching([("gemm", SECOND)], lambda op, config: tried.append((op, config))) as table:
        assert tuning.tuning_now() and look((64, 64)) == FIRST
    assert table == {"gemm": {"64x64": FIRST}} and not tuning.tuning_now()


@given(st.lists(st.integers(0, 2**20), min_size=1, max_size=4))
def test_a_bucket_is_its_own_bucket(shape: list[int]) -> None:
    name = tuning.bucket(shape)
    sizes = [int(part) for part in name.split("x")]
    assert tuning.bucket(sizes) == name
    assert all(size == at == 0 or 2**-0.51 <= size / at <= 2**0.51 for size, at in zip(shape, sizes, strict=True))
    assert tuning.nearest({name: FIRST, "x".join("1048576" for _ in shape): SECOND} | {name: FIRST}, sizes) == FIRST
