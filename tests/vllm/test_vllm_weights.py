"""What a server is given, and how what it holds is compared: the parts that need no server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from contracts.filecache import CACHE_FOLDER
from inference.engines.probes import make_probes
from inference.engines.vllm_plain import is_quantized_checkpoint, plain_checkpoint
from inference.engines.vllm_side.triplane_vllm.checkpoint import Checkpoint
from inference.engines.vllm_side.triplane_vllm.contents import fingerprint, same_numbers
from inference.engines.vllm_side.triplane_vllm.probes import expert_errors, linear_error
from inference.engines.weights import PlainTensors
from tests.inference.conftest import write_checkpoint


def plain_tensors(directory: Path) -> dict[str, torch.Tensor]:
    checkpoint = PlainTensors(directory)
    return {name: checkpoint.tensor(name) for name in checkpoint.shapes}


def test_a_plain_copy_is_the_dequantized_checkpoint_and_made_once(policies: tuple[Path, Path], cache: Path) -> None:
    copy = plain_checkpoint(policies[0], "c" * 64)
    made = (copy / "model.safetensors").stat().st_mtime_ns
    assert not is_quantized_checkpoint(copy) and is_quantized_checkpoint(policies[0])
    wanted = plain_tensors(policies[0])
    found = load_file(str(copy / "model.safetensors"))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert json.loads((copy / "config.json").read_text())["dtype"] == "float32"
    assert plain_checkpoint(policies[0], "c" * 64) == copy
    assert (copy / "model.safetensors").stat().st_mtime_ns == made
    assert not list((cache / CACHE_FOLDER / "tmp").iterdir())
    (copy / "model.safetensors").unlink()
    assert (plain_checkpoint(policies[0], "c" * 64) / "model.safetensors").is_file(), "what was swept is made again"


def test_shapes_that_end_within_a_block_are_copied_too(tmp_path: Path) -> None:
    odd = write_checkpoint(tmp_path / "odd", 4, hidden_size=64, moe_intermediate_size=96)
    copy, theirs = plain_checkpoint(odd, "d" * 64), Checkpoint(str(odd))
    found = load_file(str(copy / "model.safetensors"))
    assert all(torch.equal(found[name], theirs.weight(name)) for name in found)


def test_the_workers_reading_of_a_checkpoint_is_ours(policies: tuple[Path, Path]) -> None:
    theirs = Checkpoint(str(policies[0]))
    ours = plain_tensors(policies[0])
    for name, tensor in ours.items():
        assert torch.equal(theirs.weight(name), tensor), name


def test_probes_reach_every_expert(tmp_path: Path) -> None:
    few = write_checkpoint(tmp_path / "many", 3, num_experts=32, num_experts_per_tok=1)
    probes = make_probes(few)
    assert probes == make_probes(few)
    assert all(len(probe.token_ids) == len(probe.logprobs) and probe.logprobs[0] == 0.0 for probe in probes)


@given(st.lists(st.floats(width=32, allow_nan=False), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_a_fingerprint_sees_numbers_not_their_order(values: list[float]) -> None:
    tensor = torch.tensor(values)
    order = torch.randperm(len(values))
    padded = torch.cat([tensor[order], torch.zeros(5)])
    assert fingerprint(padded) == fingerprint(tensor)
    place = int(tensor.abs().argmax())
    changed = tensor.clone()
    changed[place] = torch.nextafter(changed[place], torch.tensor(7.0)) if changed[place] != 7.0 else 6.0
    if not torch.equal(changed, tensor):
        assert not same_numbers(changed, tensor)


def test_one_bit_of_one_code_is_another_fingerprint(policies: tuple[Path, Path]) -> None:
    codes = Checkpoint(str(policies[0])).raw("model.layers.0.mlp.experts.3.up_proj.weight")
    other = codes.view(torch.uint8).clone()
    other[5, 7] ^= 1
    assert same_numbers(codes.T.contiguous(), codes)
    assert not same_numbers(other.view(torch.float8_e4m3fn), codes)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_layer_that_gives_no_numbers_is_as_wrong_as_can_be(bad: float) -> None:
    matrix = torch.randn(6, 5)

    def layer_of(served: torch.Tensor) -> SimpleNamespace:
        method = SimpleNamespace(apply=lambda layer, x, bias: x @ served.T)
        return SimpleNamespace(weight=served, quant_method=method)

    assert linear_error(layer_of(matrix), matrix) < 1e-6
    assert linear_error(layer_of(torch.full_like(matrix, bad)), matrix) == math.inf
    broken = matrix.clone()
    broken[2, 3] = bad
    assert linear_error(layer_of(broken), matrix) == math.inf


def test_an_expert_that_gives_no_numbers_is_as_wrong_as_can_be() -> None:
    weights = [(torch.randn(4, 6), torch.randn(4, 6), torch.randn(6, 4)) for _ in range(3)]

    class Method:
        """Experts as a kernel computes them, the second one with NaN."""

        is_monolithic, topk_indices_dtype = False, None

        def apply(self, x: torch.Tensor, topk_ids: torch.Tensor, **_: object) -> torch.Tensor:
            found = []
            for row, expert in zip(x, topk_ids[:, 0].tolist(), strict=True):
                gate, up, down = weights[expert]
                found.append(
                    down @ (torch.nn.functional.silu(gate @ row) * (up @ row)) * (math.nan if expert == 1 else 1)
                )
            return torch.stack(found)

    layer = SimpleNamespace(w13_weight=torch.zeros(1), quant_method=Method(), global_num_experts=3, top_k=1)
    first, second, third = expert_errors(layer, [0, 1, 2], weights, torch.float32)
    assert max(first, third) < 1e-5 and second == math.inf
