"""Forward pass of Qwen3-MoE in plain torch, with the numerics of `transformers.Qwen3MoeForCausalLM`, for training.

Sequences are packed end to end without padding; attention runs within each. Only positions whose next token is scored
reach the last layer's experts and the output head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trainer.head import target_scores


@dataclass(frozen=True)
class Batch:
    """Sequences packed end to end."""

    token_ids: Tensor
    """int64 [tokens]."""
    rows: Tensor
    """int64 [scored]: index of the token from which each scored token is predicted."""
    targets: Tensor
    """int64 [scored]: the scored tokens."""
    owners: Tensor
    """int64 [scored]: sequence of each scored token."""
    lengths: list[int]
    """Tokens of each sequence."""
    routed: Tensor | None = None
    """int32 [tokens, layers, experts per token]: experts to use, -1 where no experts are recorded and the model's own
    choice is used. None: nothing is replayed.
    """


@dataclass(frozen=True)
class Scores:
    """Result of a forward pass for the scored tokens."""

    logprobs: Tensor
    """float32 [scored], natural logarithm, after temperature."""
    entropy: Tensor
    """float32 [scored], nats; carries no gradient."""
    routing: Routing | None
    """None unless requested."""
    hidden: Tensor
    """float32 [scored, hidden_size]: the last hidden state, from which each scored token is predicted."""
    replay: Replay | None
    """Counts of replayed tokens; None if the batch has no recorded experts."""


@dataclass(frozen=True)
class Replay:
    """Use of recorded experts in a batch, in tokens."""

    replayed: int
    """Tokens with recorded experts."""
    unrecorded: int
    """Tokens without, for which the model chose."""
    rerouted: int
    """Replayed tokens for which the model's own choice differs in at least one layer that they reach."""


@dataclass(frozen=True)
class Routing:
    """Assignment of tokens to experts in each layer. Sums over tokens, so those of several batches can be added.

    A layer counts the tokens that reach its experts: all tokens, but in the last layer only those that predict a scored
    token.
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
    """Log probabilities of `batch.targets`. routing: also return the assignment of tokens to experts.

    Recorded experts (`batch.routed`) replace the model's choice, forward and backward; shares come from its own router.
    """
    embedding = leaves["model.embed_tokens.weight"]
    hidden = F.embedding(batch.token_ids, embedding)
    cosine, sine = _rotary(batch.lengths, config)
    routed = []
    rerouted = torch.zeros(len(hidden), dtype=torch.bool)
    for index in range(config["num_hidden_layers"]):
        rows = batch.rows if index == config["num_hidden_layers"] - 1 else None
        weights = _Layer(leaves, f"model.layers.{index}.")
        hidden = _attention(weights, config, hidden, batch.lengths, cosine, sine, rows)
        places = slice(None) if rows is None else rows
        recorded = None if batch.routed is None else batch.routed[places, index]
        choice, hidden = _experts(weights, config, hidden, recorded)
        rerouted[places] |= choice.differs
        if routing:
            used = torch.bincount(choice.experts.reshape(-1), minlength=config["num_experts"])
            routed.append((used.float(), choice.probabilities.sum(0)))
    hidden = F.rms_norm(hidden, hidden.shape[-1:], leaves["model.norm.weight"], config["rms_norm_eps"])
    head = leaves.get("lm_head.weight", embedding)
    logprobs, entropy = target_scores(hidden, head, batch.targets, temperature)
    counts, probabilities = zip(*routed, strict=True) if routed else ((), ())
    assigned = Routing(torch.stack(counts), torch.stack(probabilities)) if routed else None
    return Scores(logprobs, entropy, assigned, hidden, _replay(batch, rerouted))


class _Layer:
    """Parameters of one layer by their short names."""

    def __init__(self, leaves: Mapping[str, Tensor], prefix: str) -> None:
        self._leaves, self._prefix = leaves, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._leaves[f"{self._prefix}{name}.weight"]


def _rotary(lengths: list[int], config: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Cosine and sine [tokens, 1, head_dim] of the rotary position embedding (arXiv:2104.09864), halves layout."""
    half = torch.arange(0, config["head_dim"], 2, dtype=torch.int64).float() / config["head_dim"]
    angles = torch.outer(torch.arange(max(lengths)).float(), 1.0 / (config["rope_theta"] ** half))
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    positions = torch.cat([torch.arange(length) for length in lengths])
    return angles.cos()[positions], angles.sin()[positions]


def _rotate(states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = states.chunk(2, dim=-1)
    return states * cosine + torch.cat([-second, first], dim=-1) * sine


def _attention(
    weights: _Layer,
    config: Mapping[str, Any],
    hidden: Tensor,
    lengths: list[int],
    cosine: Tensor,
    sine: Tensor,
    rows: Tensor | None,
) -> Tensor:
    """Residual attention over flat hidden states [tokens, hidden]; returns only `rows` of the result, if given."""
    eps, head = config["rms_norm_eps"], config["head_dim"]
    normed = F.rms_norm(hidden, hidden.shape[-1:], weights["input_layernorm"], eps)
    query = F.linear(normed, weights["self_attn.q_proj"]).view(len(hidden), -1, head)
    key = F.linear(normed, weights["self_attn.k_proj"]).view(len(hidden), -1, head)
    value = F.linear(normed, weights["self_attn.v_proj"]).view(len(hidden), -1, head)
    query = _rotate(F.rms_norm(query, (head,), weights["self_attn.q_norm"], eps), cosine, sine)
    key = _rotate(F.rms_norm(key, (head,), weights["self_attn.k_norm"], eps), cosine, sine)
    grouped = query.shape[1] != key.shape[1]
    queries, keys, values = (torch.split(each.transpose(0, 1)[None], lengths, dim=2) for each in (query, key, value))
    parts = [
        F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        for q, k, v in zip(queries, keys, values, strict=True)
    ]
    mixed = torch.cat(parts, dim=2)[0].transpose(0, 1).flatten(1)
    if rows is not None:
        hidden, mixed = hidden[rows], mixed[rows]
    return hidden + F.linear(mixed, weights["self_attn.o_proj"])


@dataclass(frozen=True)
class _Choice:
    """Experts of each token in one layer."""

    probabilities: Tensor
    """[tokens, experts]: of the router."""
    shares: Tensor
    """[tokens, picks]: probabilities of the experts in use."""
    experts: Tensor
    """int64 [tokens, picks]."""
    differs: Tensor | bool
    """bool [tokens]: whether the router itself prefers other experts."""


def _choose(probabilities: Tensor, picks: int, recorded: Tensor | None) -> _Choice:
    """The most likely experts, or the `recorded` ones [tokens, picks] where they are known and others.

    Where both name the same experts the router's order stays, so that replaying its own choice changes no bit.
    """
    shares, own = probabilities.topk(picks, dim=-1)
    if recorded is None:
        return _Choice(probabilities, shares, own, False)
    differs = (recorded.sort(-1).values != own.sort(-1).values).any(-1) & (recorded[:, 0] >= 0)
    experts = torch.where(differs[:, None], recorded.long(), own)
    return _Choice(probabilities, probabilities.gather(1, experts), experts, differs)


def _experts(
    weights: _Layer, config: Mapping[str, Any], hidden: Tensor, recorded: Tensor | None
) -> tuple[_Choice, Tensor]:
    """(experts in use, residual mixture of them) over [tokens, hidden]. recorded: see `_choose`."""
    normed = F.rms_norm(hidden, hidden.shape[-1:], weights["post_attention_layernorm"], config["rms_norm_eps"])
    router = F.softmax(F.linear(normed, weights["mlp.gate"]), dim=-1)
    choice = _choose(router, config["num_experts_per_tok"], recorded)
    shares, chosen = choice.shares, choice.experts
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
    return choice, hidden + mixed


def _replay(batch: Batch, rerouted: Tensor) -> Replay | None:
    if batch.routed is None:
        return None
    replayed = int((batch.routed[:, 0, 0] >= 0).sum())
    return Replay(replayed, sum(batch.lengths) - replayed, int(rerouted.sum()))
