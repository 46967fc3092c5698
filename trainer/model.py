"""Forward pass of Qwen3-MoE in plain torch, with the numerics of `transformers.Qwen3MoeForCausalLM`, for training.

Tokens are padded at the right, so causal attention alone excludes padding. Only positions whose next token is scored
reach the last layer's experts and the output head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Batch:
    """Sequences side by side, padded at the right."""

    token_ids: Tensor
    """int64 [sequences, length]; padding may hold any valid id."""
    rows: Tensor
    """int64 [scored]: flat index (sequence * length + position - 1) from which each scored token is predicted."""
    targets: Tensor
    """int64 [scored]: the scored tokens."""
    owners: Tensor
    """int64 [scored]: sequence of each scored token."""
    lengths: Tensor
    """int64 [sequences]."""


@dataclass(frozen=True)
class Scores:
    """Result of a forward pass for the scored tokens."""

    logprobs: Tensor
    """float32 [scored], natural logarithm, after temperature."""
    entropy: Tensor
    """float32 [scored], nats; carries no gradient."""
    routing: Routing | None
    """Routing of the batch's real tokens; None unless requested."""
    hidden: Tensor
    """float32 [scored, hidden_size]: the last hidden state, from which each scored token is predicted."""


@dataclass(frozen=True)
class Routing:
    """Assignment of tokens to experts in each layer. Sums over tokens, so those of several batches can be added.

    Excludes padding. A layer counts the tokens that reach its experts: all tokens, but in the last layer only those
    that predict a scored token.
    """

    counts: Tensor
    """float32 [layers, experts]: tokens routed to each expert; one token counts once for each of its experts. No
    gradient.
    """
    probabilities: Tensor
    """float32 [layers, experts]: sum of the router's probabilities; carries the gradient."""


def score(
    leaves: Mapping[str, Tensor],
    config: Mapping[str, Any],
    batch: Batch,
    temperature: float = 1.0,
    *,
    routing: bool = False,
) -> Scores:
    """Log probabilities of `batch.targets`. routing: also return the assignment of tokens to experts."""
    embedding = leaves["model.embed_tokens.weight"]
    hidden = F.embedding(batch.token_ids.reshape(-1), embedding)
    cosine, sine = _rotary(batch.token_ids.shape[1], config)
    routed = []
    for index in range(config["num_hidden_layers"]):
        rows = batch.rows if index == config["num_hidden_layers"] - 1 else None
        weights = _Layer(leaves, f"model.layers.{index}.")
        hidden = _attention(weights, config, hidden, batch.token_ids.shape, cosine, sine, rows)
        hidden, router = _experts(weights, config, hidden)
        if routing:
            reached = router if rows is not None else router[_real(batch)]
            routed.append((_expert_counts(reached.detach(), config["num_experts_per_tok"]), reached.sum(0)))
    hidden = F.rms_norm(hidden, hidden.shape[-1:], leaves["model.norm.weight"], config["rms_norm_eps"])
    logits = F.linear(hidden, leaves.get("lm_head.weight", embedding))
    if temperature != 1.0:
        logits = logits / temperature
    every = F.log_softmax(logits, dim=-1)
    logprobs = every.gather(1, batch.targets[:, None]).squeeze(1)
    with torch.no_grad():
        entropy = -(every.exp() * every).sum(-1)
    counts, probabilities = zip(*routed, strict=True) if routed else ((), ())
    found = Routing(torch.stack(counts), torch.stack(probabilities)) if routed else None
    return Scores(logprobs, entropy, found, hidden)


class _Layer:
    """Parameters of one layer by their short names."""

    def __init__(self, leaves: Mapping[str, Tensor], prefix: str) -> None:
        self._leaves, self._prefix = leaves, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._leaves[f"{self._prefix}{name}.weight"]


def _rotary(length: int, config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Cosine and sine [length, 1, head_dim] of the rotary position embedding (arXiv:2104.09864), halves layout."""
    half = torch.arange(0, config["head_dim"], 2, dtype=torch.int64).float() / config["head_dim"]
    angles = torch.outer(torch.arange(length).float(), 1.0 / (config["rope_theta"] ** half))
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    return angles.cos(), angles.sin()


def _rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat([-second, first], dim=-1) * sine


def _attention(
    weights: _Layer,
    config: Mapping[str, Any],
    hidden: Tensor,
    shape: torch.Size,
    cosine: Tensor,
    sine: Tensor,
    rows: Tensor | None,
) -> Tensor:
    """Residual attention over flat hidden states [tokens, hidden]; returns only `rows` of the result, if given."""
    eps, head = config["rms_norm_eps"], config["head_dim"]
    normed = F.rms_norm(hidden, hidden.shape[-1:], weights["input_layernorm"], eps)
    query = F.linear(normed, weights["self_attn.q_proj"]).view(*shape, -1, head)
    key = F.linear(normed, weights["self_attn.k_proj"]).view(*shape, -1, head)
    value = F.linear(normed, weights["self_attn.v_proj"]).view(*shape, -1, head)
    query = _rotate(F.rms_norm(query, (head,), weights["self_attn.q_norm"], eps), cosine, sine)
    key = _rotate(F.rms_norm(key, (head,), weights["self_attn.k_norm"], eps), cosine, sine)
    mixed = (
        F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            is_causal=True,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        .transpose(1, 2)
        .reshape(hidden.shape[0], -1)
    )
    if rows is not None:
        hidden, mixed = hidden[rows], mixed[rows]
    return hidden + F.linear(mixed, weights["self_attn.o_proj"])


def _experts(weights: _Layer, config: Mapping[str, Any], hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Residual mixture of experts over [tokens, hidden]; also returns the router's probabilities [tokens, experts]."""
    normed = F.rms_norm(hidden, hidden.shape[-1:], weights["post_attention_layernorm"], config["rms_norm_eps"])
    router = F.softmax(F.linear(normed, weights["mlp.gate"]), dim=-1)
    shares, chosen = router.topk(config["num_experts_per_tok"], dim=-1)
    if config["norm_topk_prob"]:
        shares = shares / shares.sum(-1, keepdim=True)
    slots = chosen.reshape(-1)
    order = slots.argsort(stable=True)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(order.numel()))
    ends = torch.bincount(slots, minlength=config["num_experts"]).cumsum(0).int()
    routed = normed[order // chosen.shape[1]]
    gate = F.grouped_mm(routed, weights["mlp.experts.gate_proj"].mT, offs=ends)
    up = F.grouped_mm(routed, weights["mlp.experts.up_proj"].mT, offs=ends)
    out = F.grouped_mm(F.silu(gate) * up, weights["mlp.experts.down_proj"].mT, offs=ends)
    mixed = (out[back].view(*chosen.shape, -1) * shares[..., None]).sum(1)
    return hidden + mixed, router


def _real(batch: Batch) -> Tensor:
    """bool [sequences * length]: positions that are not padding."""
    return (torch.arange(batch.token_ids.shape[1])[None] < batch.lengths[:, None]).reshape(-1)


def _expert_counts(router: Tensor, picks: int) -> Tensor:
    """float32 [experts]: number of tokens whose `picks` most likely experts include each expert."""
    return torch.bincount(router.topk(picks, dim=-1).indices.reshape(-1), minlength=router.shape[1]).float()
