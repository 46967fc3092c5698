"""Forward pass for training in plain torch, with the numerics of `transformers`, of every family in
`contracts.architectures`.

Sequences are packed end to end without padding; attention runs within each. Only positions whose next token is scored
reach the last layer's MLP and the output head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from triplane_kernels.norm import rms_norm

from contracts.architectures import Architecture, inverse_frequencies
from trainer.head import SupportSets, scores_over_supports
from trainer.recipes import recipe_of
from trainer.recipes.base import Experts, Recipe


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
    supports: SupportSets | None = None
    """Sets that the scored tokens were drawn from; None: the whole vocabulary."""

    def to(self, device: torch.device) -> Batch:
        """The batch on `device`."""
        if device == self.token_ids.device:
            return self
        names = ("token_ids", "rows", "targets", "owners")
        moved = {name: getattr(self, name).to(device) for name in names}
        routed = None if self.routed is None else self.routed.to(device)
        supports = None if self.supports is None else self.supports.to(device)
        return replace(self, **moved, routed=routed, supports=supports)


@dataclass(frozen=True)
class Scores:
    """Result of a forward pass for the scored tokens."""

    logprobs: Tensor
    """float32 [scored], natural logarithm, after temperature, over the support if there is one."""
    entropy: Tensor
    """float32 [scored], nats; carries no gradient."""
    routing: Routing | None
    """None unless requested of a mixture of experts."""
    hidden: Tensor
    """float32 [scored, hidden_size]: the last hidden state, from which each scored token is predicted; on the model's
    device.
    """
    replay: Replay | None
    """Counts of replayed tokens; None if the batch has no recorded experts."""

    def to_cpu(self) -> Scores:
        """The scores for a loss that is computed on the CPU, all but `hidden`. Gradients pass."""
        if self.logprobs.device.type == "cpu":
            return self
        found = self.routing
        routing = None if found is None else Routing(found.counts.cpu(), found.probabilities.cpu(), found.squares.cpu())
        return replace(self, logprobs=self.logprobs.cpu(), entropy=self.entropy.cpu(), routing=routing)


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
    squares: Tensor
    """float32 [layers]: sum of the squared logarithm of the router's partition function; carries the gradient."""


Rotary = tuple[Tensor, Tensor]
"""Cosine and sine [tokens, 1, head_dim] of the position embedding."""
LayerOutput = tuple[Tensor, Tensor | None, Tensor | None, Tensor | None, Tensor | bool]
"""Hidden states; the router's logits and probabilities, both [tokens, experts]; the experts in use, int64 [tokens,
picks]; whether the router itself prefers others, bool [tokens]. A dense layer has no router: None.
"""
RunLayer = Callable[[int, Tensor, Batch, Rotary], LayerOutput]
"""Computes the layer of a number from hidden states."""
Mixture = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`Recipe.mixture` of one layer's experts: from rows, shares and chosen experts."""


def score(
    leaves: Mapping[str, Tensor],
    config: Mapping[str, Any],
    batch: Batch,
    temperature: float = 1.0,
    *,
    routing: bool = False,
    run: RunLayer | None = None,
) -> Scores:
    """Log probabilities of `batch.targets`, by the recipe that `config` names. routing: also return the assignment of
    tokens to experts. run: computes a layer, `decoder_layer` by default; with it `leaves` needs only what lies outside
    the layers.

    Recorded experts (`batch.routed`) replace the model's choice, forward and backward; shares come from its own router.
    """
    embedding = leaves["model.embed_tokens.weight"]
    recipe = recipe_of(config)
    hidden = recipe.narrow(F.embedding(batch.token_ids, embedding))
    rotary = _rotary(batch.lengths, config, hidden.device)
    run = run or functools.partial(decoder_layer, leaves, config)
    routed = []
    rerouted = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
    for index in range(config["num_hidden_layers"]):
        hidden, logits, router, experts, differs = run(index, hidden, batch, rotary)
        if logits is None or router is None or experts is None:
            continue
        rerouted[_places(config, index, batch)] |= differs
        if routing:
            used = torch.bincount(experts.reshape(-1), minlength=config["num_experts"])
            squares = logits.logsumexp(-1).square().sum().float()
            routed.append((used.float(), router.sum(0), squares))
    hidden = _norm(recipe, hidden, leaves["model.norm.weight"], config["rms_norm_eps"])
    head = leaves.get("lm_head.weight", embedding)
    logprobs, entropy = scores_over_supports(recipe.head, hidden, head, batch.targets, temperature, batch.supports)
    assigned = Routing(*(torch.stack(each) for each in zip(*routed, strict=True))) if routed else None
    return Scores(logprobs, entropy, assigned, hidden.float(), _replay(batch, rerouted))


def decoder_layer(
    leaves: Mapping[str, Tensor],
    config: Mapping[str, Any],
    index: int,
    hidden: Tensor,
    batch: Batch,
    rotary: Rotary,
    mixture: Mixture | None = None,
) -> LayerOutput:
    """Layer `index` over flat hidden states [tokens, hidden]. leaves: at least those of this layer; with `mixture`,
    which computes the experts, theirs are not needed.
    """
    places, recipe = _places(config, index, batch), recipe_of(config)
    weights = _Layer(leaves, f"model.layers.{index}.")
    rows = None if isinstance(places, slice) else places
    hidden = _attention(recipe, weights, config, hidden, batch.lengths, rotary, rows)
    if "mlp.gate" not in weights:
        return _mlp(recipe, weights, config, hidden), None, None, None, False
    recorded = None if batch.routed is None else batch.routed[places, index]
    choice, hidden = _experts(recipe, weights, config, hidden, recorded, mixture or _mixture(recipe, weights))
    return hidden, choice.logits, choice.probabilities, choice.experts, choice.differs


def _places(config: Mapping[str, Any], index: int, batch: Batch) -> slice | Tensor:
    """Tokens that reach the experts of layer `index`: all, but in the last layer only those that are scored."""
    return batch.rows if index == config["num_hidden_layers"] - 1 else slice(None)


class _Layer:
    """Parameters of one layer by their short names."""

    def __init__(self, leaves: Mapping[str, Tensor], prefix: str) -> None:
        self._leaves, self._prefix = leaves, prefix

    def __getitem__(self, name: str) -> Tensor:
        return self._leaves[f"{self._prefix}{name}.weight"]

    def __contains__(self, name: str) -> bool:
        return f"{self._prefix}{name}.weight" in self._leaves


def _rotary(lengths: list[int], config: Mapping[str, Any], device: torch.device) -> Rotary:
    """Cosine and sine [tokens, 1, head_dim] of the rotary position embedding (arXiv:2104.09864), halves layout.

    Computed on the CPU for every device: all then rotate by the same numbers.
    """
    frequencies = inverse_frequencies(Architecture.from_config(config))
    angles = torch.outer(torch.arange(max(lengths)).float(), frequencies)
    angles = torch.cat([angles, angles], dim=-1)[:, None]
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    return angles.cos().to(device)[positions], angles.sin().to(device)[positions]


def _norm(recipe: Recipe, hidden: Tensor, weight: Tensor, eps: float) -> Tensor:
    if hidden.is_cuda:
        return rms_norm(hidden, weight, eps)
    normal = recipe.rounded(F.rms_norm(recipe.wide(hidden), hidden.shape[-1:], None, eps))
    return recipe.narrow(normal * recipe.wide(weight))


def _rotate(recipe: Recipe, states: Tensor, weight: Tensor | None, eps: float, rotary: Rotary) -> Tensor:
    """Heads [tokens, heads, head_dim], normalized if there is a weight, then rotated; in one kernel on a GPU."""
    if states.is_cuda:
        return rms_norm(states, weight, eps, rotary)
    if weight is not None:
        states = _norm(recipe, states, weight, eps)
    wide, (cosine, sine) = recipe.wide(states), (recipe.rounded(part) for part in rotary)
    first, second = wide.chunk(2, dim=-1)
    return recipe.narrow(recipe.rounded(wide * cosine) + recipe.rounded(torch.cat([-second, first], dim=-1) * sine))


def _attention(
    recipe: Recipe,
    weights: _Layer,
    config: Mapping[str, Any],
    hidden: Tensor,
    lengths: list[int],
    rotary: Rotary,
    rows: Tensor | None,
) -> Tensor:
    """Residual attention over flat hidden states [tokens, hidden]; returns only `rows` of the result, if given."""
    eps, head = config["rms_norm_eps"], config["head_dim"]
    normed = _norm(recipe, hidden, weights["input_layernorm"], eps)
    query = recipe.linear(normed, weights["self_attn.q_proj"]).view(len(hidden), -1, head)
    key = recipe.linear(normed, weights["self_attn.k_proj"]).view(len(hidden), -1, head)
    value = recipe.linear(normed, weights["self_attn.v_proj"]).view(len(hidden), -1, head)
    normed_heads = "self_attn.q_norm" in weights
    query = _rotate(recipe, query, weights["self_attn.q_norm"] if normed_heads else None, eps, rotary)
    key = _rotate(recipe, key, weights["self_attn.k_norm"] if normed_heads else None, eps, rotary)
    queries, keys, values = (torch.split(each.transpose(0, 1)[None], lengths, dim=2) for each in (query, key, value))
    parts = [recipe.attend(q, k, v) for q, k, v in zip(queries, keys, values, strict=True)]
    mixed = torch.cat(parts, dim=2)[0].transpose(0, 1).flatten(1)
    if rows is not None:
        hidden, mixed = hidden[rows], mixed[rows]
    return hidden + recipe.linear(mixed, weights["self_attn.o_proj"])


def _mlp(recipe: Recipe, weights: _Layer, config: Mapping[str, Any], hidden: Tensor) -> Tensor:
    """Residual SwiGLU (arXiv:2002.05202) over [tokens, hidden]."""
    normed = _norm(recipe, hidden, weights["post_attention_layernorm"], config["rms_norm_eps"])
    gate, up = recipe.linear(normed, weights["mlp.gate_proj"]), recipe.linear(normed, weights["mlp.up_proj"])
    inner = recipe.narrow(F.silu(recipe.wide(gate))) * up
    return hidden + recipe.linear(inner, weights["mlp.down_proj"])


@dataclass(frozen=True)
class _Choice:
    """Experts of each token in one layer."""

    logits: Tensor
    """[tokens, experts]: of the router."""
    probabilities: Tensor
    """[tokens, experts]: their softmax."""
    shares: Tensor
    """[tokens, picks]: probabilities of the experts in use."""
    experts: Tensor
    """int64 [tokens, picks]."""
    differs: Tensor | bool
    """bool [tokens]: whether the router itself prefers other experts."""


def _choose(logits: Tensor, picks: int, recorded: Tensor | None) -> _Choice:
    """The most likely experts, or the `recorded` ones [tokens, picks] where they are known and others.

    Where both name the same experts the router's order stays, so that replaying its own choice changes no bit.
    """
    probabilities = F.softmax(logits, dim=-1)
    shares, own = probabilities.topk(picks, dim=-1)
    if recorded is None:
        return _Choice(logits, probabilities, shares, own, False)
    differs = (recorded.sort(-1).values != own.sort(-1).values).any(-1) & (recorded[:, 0] >= 0)
    experts = torch.where(differs[:, None], recorded.long(), own)
    return _Choice(logits, probabilities, probabilities.gather(1, experts), experts, differs)


def _mixture(recipe: Recipe, weights: _Layer) -> Mixture:
    experts = Experts(*(weights[f"mlp.experts.{name}_proj"] for name in ("gate", "up", "down")))
    return functools.partial(recipe.mixture, experts=experts)


def _experts(
    recipe: Recipe,
    weights: _Layer,
    config: Mapping[str, Any],
    hidden: Tensor,
    recorded: Tensor | None,
    mixture: Mixture,
) -> tuple[_Choice, Tensor]:
    """(experts in use, residual mixture of them) over [tokens, hidden]. recorded: see `_choose`."""
    normed = _norm(recipe, hidden, weights["post_attention_layernorm"], config["rms_norm_eps"])
    choice = _choose(recipe.router(normed, weights["mlp.gate"]), config["num_experts_per_tok"], recorded)
    shares = choice.shares
    if config["norm_topk_prob"]:
        shares = shares / shares.sum(-1, keepdim=True)
    return choice, hidden + mixture(normed, shares, choice.experts)


def _replay(batch: Batch, rerouted: Tensor) -> Replay | None:
    if batch.routed is None:
        return None
    replayed = int((batch.routed[:, 0, 0] >= 0).sum())
    return Replay(replayed, sum(batch.lengths) - replayed, int(rerouted.sum()))
