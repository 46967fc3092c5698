"""The expert layer in the place of the trainer's own, on the trainer's masters, codes and leaves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_inputs import cosine, generator
from torch import Tensor
from triplane_kernels.moe import BF16, Recipe, expert_layer
from triplane_kernels.moe_weights import ExpertWeights, Name

from trainer import model
from trainer.export import checkpoint_tensors
from trainer.losses import balance_loss
from trainer.parameters import Parameters, draw_masters

CONFIG: dict[str, Any] = {
    "hidden_size": 96,
    "moe_intermediate_size": 72,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 160,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "initializer_range": 0.1,
    "max_position_embeddings": 256,
}


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    return Parameters.from_masters(CONFIG, draw_masters(CONFIG, seed=0))


@pytest.fixture(scope="module")
def batch() -> model.Batch:
    token_ids = torch.randint(CONFIG["vocab_size"], (3 * 12,), generator=generator(1))
    rows = torch.cat([torch.arange(4, 11) + 12 * sequence for sequence in range(3)])
    owners = rows // 12
    return model.Batch(token_ids, rows, token_ids[rows + 1], owners, [12, 12, 12])


def layer_weights(parameters: Parameters) -> dict[str, ExpertWeights]:
    """Layer prefix -> weights of its experts, from the very codes and scales that the trainer holds; gradients go to
    its leaves.
    """
    held = {name: (buffer, *buffer.spans[name]) for buffer in parameters.buffers for name in buffer.spans}
    found = {}
    for index in range(CONFIG["num_hidden_layers"]):
        prefix = f"model.layers.{index}."
        codes, leaves = {}, {}
        for short in ("gate", "up", "down"):
            name = f"{prefix}mlp.experts.{short}_proj.weight"
            buffer, start, end, _ = held[name]
            assert buffer.codes is not None and buffer.scales is not None
            codes[short], leaves[short] = (buffer.codes[start:end], buffer.scales[start:end]), parameters.leaves[name]
        found[prefix] = ExpertWeights.from_codes(leaves["gate"], leaves["up"], leaves["down"], codes)
    return found


def use_kernels(monkeypatch: pytest.MonkeyPatch, parameters: Parameters, recipe: Recipe) -> None:
    by_layer = layer_weights(parameters)

    def experts(
        _: Any, weights: Any, config: Mapping[str, Any], hidden: Tensor, recorded: Tensor | None, *others: object
    ) -> tuple[model._Choice, Tensor]:
        normed = F.rms_norm(hidden, hidden.shape[-1:], weights["post_attention_layernorm"], config["rms_norm_eps"])
        logits = F.linear(normed, weights["mlp.gate"])
        mixed = expert_layer(
            normed,
            logits,
            by_layer[weights._prefix],
            config["num_experts_per_tok"],
            normalize=config["norm_topk_prob"],
            recipe=recipe,
        )
        return model._choose(logits, config["num_experts_per_tok"], recorded), hidden + mixed

    monkeypatch.setattr(model, "_experts", experts)


def trained(parameters: Parameters, batch: model.Batch) -> tuple[Tensor, dict[str, Tensor]]:
    """Log probabilities, and a copy of the gradient of every leaf."""
    parameters.clear_gradients()
    scores = model.score(parameters.leaves, parameters.config, batch, routing=True)
    assert scores.routing is not None
    balance = balance_loss(scores.routing.probabilities, scores.routing.counts, CONFIG["num_experts_per_tok"])
    (0.01 * balance - scores.logprobs.mean()).backward()
    gradients = {name: leaf.grad.clone() for name, leaf in parameters.leaves.items() if leaf.grad is not None}
    return scores.logprobs.detach(), gradients


@pytest.mark.slow
def test_recipe_w8_is_what_the_trainer_computes(
    parameters: Parameters, batch: model.Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    logprobs, gradients = trained(parameters, batch)
    use_kernels(monkeypatch, parameters, BF16)
    found, others = trained(parameters, batch)
    torch.testing.assert_close(found, logprobs, rtol=1e-5, atol=1e-5)
    assert set(others) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_fp8_products_leave_the_model_and_its_gradients_close(
    parameters: Parameters, batch: model.Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    logprobs, gradients = trained(parameters, batch)
    use_kernels(monkeypatch, parameters, Recipe())
    found, others = trained(parameters, batch)
    assert 0 < float((found - logprobs).abs().max()) < 0.2
    for name, gradient in gradients.items():
        assert cosine(others[name], gradient) > 0.98, name


def test_the_checkpoint_holds_the_codes_that_the_products_read(parameters: Parameters) -> None:
    exported = checkpoint_tensors(parameters)
    for prefix, weights in layer_weights(parameters).items():
        codes: dict[Name, tuple[Tensor, Tensor]] = weights.codes()
        for short, (all_codes, all_scales) in codes.items():
            for expert in range(CONFIG["num_experts"]):
                name = f"{prefix}mlp.experts.{expert}.{short}_proj.weight"
                assert torch.equal(exported[name].view(torch.uint8), all_codes[expert].contiguous().view(torch.uint8))
                assert torch.equal(exported[f"{name}_scale_inv"], all_scales[expert])


def test_codes_follow_the_masters_once_a_step(
    parameters: Parameters, batch: model.Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = Parameters.from_masters(CONFIG, dict(parameters.masters()))
    use_kernels(monkeypatch, moved, Recipe())
    before, gradients = trained(moved, batch)
    with torch.no_grad():
        for buffer in moved.buffers:
            buffer.master.sub_(buffer.gradient, alpha=0.5)
    unchanged, _ = trained(moved, batch)
    moved.requantize()
    use_kernels(monkeypatch, moved, Recipe())
    after, _ = trained(moved, batch)
    name = "model.layers.0.mlp.experts.gate_proj.weight"
    assert bool(gradients[name].any()) and float(after.mean()) > float(before.mean())
    assert not torch.equal(after, unchanged)
