"""The output head against its definition in float64, whole and in tiles."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from trainer_world import TINY
from triplane_kernels import loss_head_reference

import trainer.head
from trainer.data import ScoredSequence, make_batch
from trainer.head import target_scores
from trainer.model import Scores, score
from trainer.model_config import ModelConfig
from trainer.parameters import Parameters, draw_masters

CLOSE = {torch.float32: 3e-6, torch.float64: 1e-12}
"""Relative to the values; float32's own rounding of the logits is nearly as large."""
PATHS = pytest.mark.parametrize("tiled", [False, True], ids=["whole", "tiled"])


def choose(monkeypatch: pytest.MonkeyPatch, tiled: bool) -> None:
    """Make every head take one path; tiles are of 24 tokens and 96 entries."""
    monkeypatch.setattr(trainer.head, "LARGEST_LOGITS", -1 if tiled else 2**40)
    monkeypatch.setattr(loss_head_reference, "CHUNK", 96)
    monkeypatch.setattr(loss_head_reference, "ROWS", 24)


def drawn(tokens: int, vocabulary: int, width: int = 32, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(tokens + vocabulary)
    hidden, weight = (torch.randn(rows, width, generator=draw) for rows in (tokens, vocabulary))
    return hidden * scale, weight * width**-0.5, torch.randint(vocabulary, (tokens,), generator=draw)


def defined(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """By definition: logsumexp and the expectation of -log p."""
    logits = hidden @ weight.mT / temperature
    every = logits - logits.logsumexp(-1, keepdim=True)
    return every[torch.arange(len(targets)), targets], -(every.exp() * every).sum(-1).detach()


def check(inputs: tuple[Tensor, Tensor, Tensor], temperature: float, *, dtype: torch.dtype = torch.float32) -> None:
    """Compare log probabilities, entropies and both gradients of a weighted sum with the definition in float64."""
    *leaves, targets = inputs
    ours = [leaf.to(dtype, copy=True).requires_grad_() for leaf in leaves]
    exact = [leaf.to(torch.float64, copy=True).requires_grad_() for leaf in leaves]
    outer = torch.linspace(-1, 2, len(targets), dtype=torch.float64)
    bound = CLOSE[dtype]
    found, wanted = target_scores(*ours, targets, temperature), defined(*exact, targets, temperature)
    assert not found[1].requires_grad
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound)
    (found[0] * outer.to(dtype)).sum().backward()
    (wanted[0] * outer).sum().backward()
    for leaf, reference in zip(ours, exact, strict=True):
        size = float(reference.grad.norm())
        assert float((leaf.grad.double() - reference.grad).norm()) <= bound * size


@PATHS
@pytest.mark.parametrize("temperature", [0.1, 0.7, 1.0, 2.0])
def test_results_and_gradients_equal_the_definition(
    tiled: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, tiled)
    check(drawn(70, 1000), temperature)
    check(drawn(70, 1000), temperature, dtype=torch.float64)


@PATHS
@pytest.mark.parametrize(("tokens", "vocabulary"), [(1, 1000), (1, 2), (24, 96), (25, 97), (0, 1000)])
def test_any_number_of_tokens_and_entries(
    tiled: bool, tokens: int, vocabulary: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, tiled)
    check(drawn(tokens, vocabulary), 0.7)


@PATHS
@pytest.mark.parametrize("temperature", [0.125, 1.0, 2.0])
def test_extreme_logits_lose_no_precision(tiled: bool, temperature: float, monkeypatch: pytest.MonkeyPatch) -> None:
    choose(monkeypatch, tiled)
    hidden, weight, targets = drawn(70, 1000)
    # Integers and powers of two: float32 represents every logit exactly, up to 2e5.
    hidden, weight = (hidden * 4).round() * 64, (weight * 64).round() / 4
    targets[::2] = (hidden @ weight.mT).argmax(-1)[::2]
    check((hidden, weight, targets), temperature)


def scored(parameters: Parameters, config: Mapping[str, Any], lengths: tuple[int, ...]) -> Scores:
    draw = torch.Generator().manual_seed(3)
    members = [
        ScoredSequence(torch.randint(0, 90, (length,), generator=draw).numpy(), torch.arange(2, length).numpy())
        for length in lengths
    ]
    return score(parameters.leaves, config, make_batch(members), 0.8)


@pytest.mark.parametrize("tied", [True, False])
def test_the_models_gradients_do_not_depend_on_the_path(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModelConfig(**(TINY.model_dump() | {"tie_word_embeddings": tied})).hf_config(90)
    outcomes = []
    for tiled in (False, True):
        choose(monkeypatch, tiled)
        parameters = Parameters.from_masters(config, draw_masters(config, 0))
        scores = scored(parameters, config, (20, 31, 9))
        scores.logprobs.mean().backward()
        outcomes.append((scores, {name: leaf.grad for name, leaf in parameters.leaves.items()}))
    (whole, gradients), (tiles, others) = outcomes
    torch.testing.assert_close(tiles.logprobs, whole.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(tiles.entropy, whole.entropy, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        assert float((others[name] - gradient).norm()) <= 1e-5 * float(gradient.norm()), name


def test_the_quickstart_takes_the_path_whose_bits_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object, **__: object) -> None:
        raise AssertionError("tiled")

    monkeypatch.setattr("triplane_kernels.loss_head.loss_head", refused)
    target_scores(torch.zeros(8192, 1), torch.zeros(768, 1), torch.zeros(8192, dtype=torch.int64), 1.0)
    with pytest.raises(AssertionError, match="tiled"):
        target_scores(torch.zeros(4096, 1), torch.zeros(151936, 1), torch.zeros(4096, dtype=torch.int64), 1.0)
