"""Which implementation an op's tensors get, and what is said where a kernel can't run."""

from __future__ import annotations

import logging

import pytest
import torch
from triplane_kernels import machine as machine_module
from triplane_kernels.errors import KernelInputError, KernelUnavailable
from triplane_kernels.machine import Machine, choose, machine

CPU = Machine("CPU", "3.7.1", False, None, 1, gluon=False)
INTERPRETER = Machine("Triton interpreter", "3.7.1", True, None, 1, gluon=False)
H200 = Machine("NVIDIA H200", "3.7.1", False, (9, 0), 132, gluon=True)
A100 = Machine("NVIDIA A100", "3.7.1", False, (8, 0), 108, gluon=False)
B200 = Machine("NVIDIA B200", "3.7.1", False, (10, 0), 148, gluon=False)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIPLANE_KERNELS", raising=False)
    machine_module._say_once.cache_clear()


def on(monkeypatch: pytest.MonkeyPatch, here: Machine, *, cuda: bool) -> torch.Tensor:
    """Pretend that this process runs on `here`; the tensor stands for one of its operands."""
    monkeypatch.setattr(machine_module, "machine", lambda: here)

    class Operand:
        device = torch.device("cuda", 0) if cuda else torch.device("cpu")
        dtype = torch.bfloat16

    return Operand()  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("here", "cuda", "way"),
    [
        (CPU, False, "reference"),
        (INTERPRETER, False, "triton"),
        (H200, True, "triton"),
        (H200, False, "reference"),
        (B200, True, "triton"),
        (A100, True, "reference"),
        (Machine("NVIDIA H200", None, False, (9, 0), 132, gluon=False), True, "reference"),
    ],
)
def test_left_alone_the_best_that_runs_is_chosen(
    monkeypatch: pytest.MonkeyPatch, here: Machine, cuda: bool, way: str
) -> None:
    assert choose("quantize", on(monkeypatch, here, cuda=cuda)) == way


def test_a_gpu_without_fp8_units_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    operand = on(monkeypatch, A100, cuda=True)
    with caplog.at_level(logging.WARNING):
        assert [choose("quantize", operand), choose("gemm", operand)] == ["reference"] * 2
    assert len(caplog.records) == 1
    assert "NVIDIA A100 has no FP8 units" in caplog.text and "reference runs instead" in caplog.text


@pytest.mark.parametrize(
    ("here", "cuda", "forced", "reason"),
    [
        (CPU, False, "triton", "not on a CUDA device"),
        (A100, True, "triton", "no FP8 units"),
        (INTERPRETER, False, "gluon", "does not run in Triton's interpreter"),
        (B200, True, "gluon", "Hopper GPU"),
    ],
)
def test_what_is_forced_and_cannot_run_is_an_error(
    monkeypatch: pytest.MonkeyPatch, here: Machine, cuda: bool, forced: str, reason: str
) -> None:
    operand = on(monkeypatch, here, cuda=cuda)
    monkeypatch.setenv("TRIPLANE_KERNELS", forced)
    with pytest.raises(KernelUnavailable, match=reason) as caught:
        choose("grouped_gemm", operand)
    assert here.device in str(caught.value) and "TRIPLANE_KERNELS=reference" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_gluon_forced_leaves_other_ops_to_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    operand = on(monkeypatch, H200, cuda=True)
    monkeypatch.setenv("TRIPLANE_KERNELS", "gluon")
    assert choose("grouped_gemm", operand) == "gluon"
    assert choose("permute", operand) == "triton"
    assert choose("grouped_gemm", operand, wanted="reference") == "reference"
    with pytest.raises(KernelUnavailable, match="no Gluon version"):
        choose("permute", operand, wanted="gluon")


def test_float64_is_the_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "machine", lambda: INTERPRETER)
    assert choose("gemm", torch.zeros(1, dtype=torch.float64)) == "reference"


def test_an_unknown_name_and_two_devices_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_KERNELS", "cuda")
    with pytest.raises(KernelInputError, match="no implementation 'cuda'"):
        choose("gemm", torch.zeros(1))
    monkeypatch.delenv("TRIPLANE_KERNELS")
    with pytest.raises(KernelInputError, match="tensors lie on cpu, meta"):
        choose("gemm", torch.zeros(1), torch.zeros(1, device="meta"))


def test_this_process_is_described_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    here = machine()
    assert (here.capability is not None) == torch.cuda.is_available()
    assert not here.interpreter and (here.fp8 or not here.tma)
