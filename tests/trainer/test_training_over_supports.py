"""Recorded supports from the dataset to the log probability: read, packed, normalized over, trained on."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from test_backends import BACKENDS, STILL, difference, losses, moments, run_in_ranks, with_backend
from test_trainer_head import PATHS, choose, drawn
from test_trainer_rl import own_dataset
from torch import Tensor
from trainer_world import TINY, World, recorded_row

import trainer.head
from contracts.artifacts import Artifact, open_artifact
from contracts.episodes import TokenRole
from contracts.precision import Forward
from contracts.supports import WHOLE, Supports, encode_supports, supports_of
from inference.engines.sampling import scaled_logprobs
from trainer.config import RlConfig
from trainer.data import ScoredSequence, make_batch
from trainer.errors import TrainingDataError
from trainer.experience import read_experience
from trainer.export import load_checkpoint
from trainer.head import Head, SupportSets, scores_over_supports, target_scores
from trainer.model import score
from trainer.parameters import Parameters, draw_masters
from trainer.recipes.fp8_block import Fp8BlockRecipe
from trainer.result import TrainResult
from trainer.run import run_job

CONFIG = TINY.hf_config(60)


def masks_around(targets: Tensor, vocabulary: int, *, whole: bool = True) -> list[np.ndarray | None]:
    """Sets with the target, in turn: alone, with few others, with half of all, without one token; None: all. whole:
    whether there are some of those.
    """
    draw, found = np.random.default_rng(len(targets)), list[np.ndarray | None]()
    for place, target in enumerate(targets.tolist()):
        share = (0.0, 0.05, 0.5, 1.0, None)[place % (5 if whole else 4)]
        if share is None:
            found.append(None)
            continue
        mask = draw.random(vocabulary) < share
        mask[(target + 1) % vocabulary] = False
        mask[target] = True
        found.append(mask)
    return found


def dense(masks: list[np.ndarray | None], vocabulary: int) -> Tensor:
    return torch.from_numpy(np.array([np.ones(vocabulary, np.bool_) if each is None else each for each in masks]))


def defined(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float, allowed: Tensor) -> Any:
    """By definition, in the operands' dtype: logsumexp and the expectation of -log p over the allowed tokens."""
    logits = (hidden @ weight.mT / temperature).where(allowed, -torch.inf)
    every = logits - logits.logsumexp(-1, keepdim=True)
    return every[torch.arange(len(targets)), targets], torch.special.entr(every.exp()).sum(-1).detach()


def gradients(found: tuple[Tensor, Tensor], leaves: list[Tensor]) -> list[Tensor]:
    """Of a weighted sum of the log probabilities."""
    outer = torch.linspace(-1, 2, len(found[0]), dtype=found[0].dtype)
    return list(torch.autograd.grad((found[0] * outer).sum(), leaves))


def check(temperature: float, *, whole: bool = True, dtype: torch.dtype = torch.float32, bound: float = 3e-6) -> None:
    """Compare log probabilities, entropies and gradients with the definition in float64."""
    *leaves, targets = drawn(71, 1000)
    masks = masks_around(targets, 1000, whole=whole)
    ours = [leaf.to(dtype, copy=True).requires_grad_() for leaf in leaves]
    exact = [leaf.double().requires_grad_() for leaf in leaves]
    supports = SupportSets.of(supports_of(masks))
    found = scores_over_supports(target_scores, ours[0], ours[1], targets, temperature, supports)
    wanted = defined(exact[0], exact[1], targets, temperature, dense(masks, 1000))
    assert not found[1].requires_grad
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=bound, atol=bound)
    assert torch.equal(found[0][0], torch.zeros((), dtype=dtype)), "the only token of its set"
    for one, other in zip(gradients(found, ours), gradients(wanted, exact), strict=True):
        assert float((one.double() - other).norm()) <= bound * float(other.norm())


@PATHS
@pytest.mark.parametrize("whole", [True, False], ids=["some-whole", "none-whole"])
@pytest.mark.parametrize("temperature", [0.1, 1.0])
def test_scores_and_gradients_equal_the_definition_over_the_support(
    tiled: bool, whole: bool, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose(monkeypatch, tiled)
    check(temperature, whole=whole)
    check(temperature, whole=whole, dtype=torch.float64, bound=1e-12)


HEADS: dict[str, Head] = {
    "float32": target_scores,
    "bfloat16": functools.partial(target_scores, dtype=torch.bfloat16),
    "fp8-block": Fp8BlockRecipe(Forward(recipe="w8a8-1x128"), wgrad=False).head,
}


@pytest.mark.parametrize("name", HEADS)
def test_parts_of_the_tokens_give_what_all_at_once_give(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    *leaves, targets = drawn(71, 1000)
    supports = SupportSets.of(supports_of(masks_around(targets, 1000, whole=False)))
    outcomes = []
    for rows in (7, 71):
        monkeypatch.setattr(trainer.head, "LARGEST_LOGITS", rows * 1000 * 4)
        ours = [leaf.clone().requires_grad_() for leaf in leaves]
        found = scores_over_supports(HEADS[name], *ours, targets, 0.7, supports)
        outcomes.append((*found, *gradients(found, ours)))
    for one, other in zip(*outcomes, strict=True):
        bound = 1e-2 if name == "bfloat16" and one.dim() > 1 else 1e-6  # of a gradient: it is rounded in each part
        assert float((one - other).detach().norm()) <= bound * float(other.detach().norm())


@pytest.mark.parametrize("head", HEADS.values(), ids=HEADS)
def test_tokens_without_a_support_keep_their_bits(head: Head) -> None:
    hidden, weight, targets = drawn(71, 1000)
    supports = SupportSets.of(supports_of(masks_around(targets, 1000)))
    mixed, plain = (scores_over_supports(head, hidden, weight, targets, 0.7, each) for each in (supports, None))
    bare = supports.numbers == WHOLE
    assert 0 < int(bare.sum()) < len(bare)
    for one, other in zip(mixed, plain, strict=True):
        assert torch.equal(one[bare], other[bare])
        assert not (one[~bare] == other[~bare]).any()


def test_a_bfloat16_head_normalizes_the_rounded_logits() -> None:
    hidden, weight, targets = drawn(71, 1000)
    masks = masks_around(targets, 1000)
    supports = SupportSets.of(supports_of(masks))
    found = scores_over_supports(HEADS["bfloat16"], hidden, weight, targets, 0.7, supports)
    logits = (hidden.bfloat16().double() @ weight.bfloat16().double().mT).bfloat16().double()
    wanted = defined(logits, torch.eye(1000, dtype=torch.float64), targets, 0.7, dense(masks, 1000))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_scores_are_those_of_an_engine_that_masks_its_logits(temperature: float) -> None:
    hidden, weight, targets = drawn(71, 1000)
    masks = masks_around(targets, 1000)
    logits = F.linear(hidden, weight).where(dense(masks, 1000), -torch.inf)
    engine = scaled_logprobs(logits, np.full(71, temperature, np.float32))
    supports = SupportSets.of(supports_of(masks))
    found, _ = scores_over_supports(target_scores, hidden, weight, targets, temperature, supports)
    torch.testing.assert_close(found, engine[torch.arange(71), targets], rtol=0, atol=1e-6)


SETS = st.none() | st.sets(st.integers(0, 59), min_size=1, max_size=60).map(
    lambda members: np.isin(np.arange(60), list(members))
)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.none() | st.lists(SETS, min_size=6, max_size=6), min_size=1, max_size=4))
def test_a_batch_has_the_sets_of_its_scored_tokens(rows: list[list[np.ndarray | None] | None]) -> None:
    scored = np.array([2, 3, 5])
    sequences = [
        ScoredSequence(np.arange(6), scored, supports=None if masks is None else supports_of(masks)) for masks in rows
    ]
    found = make_batch(sequences).supports
    wanted = [mask for masks in rows for mask in ([None] * 3 if masks is None else [masks[at] for at in scored])]
    wanted = [None if mask is None or mask.all() else mask for mask in wanted]
    if found is None:
        assert not any(mask is not None for mask in wanted)
        return
    assert (found.numbers != WHOLE).tolist() == [mask is not None for mask in wanted]
    assert len(found.sizes) == len({mask.tobytes() for mask in wanted if mask is not None})
    masked = found.masks(found.numbers[found.numbers != WHOLE], 60)
    assert torch.equal(masked, dense([mask for mask in wanted if mask is not None], 60))


def test_a_sequence_without_supports_keeps_its_bits_beside_one_with_them() -> None:
    parameters = Parameters.from_masters(CONFIG, draw_masters(CONFIG, 0))
    bare, other = (ScoredSequence(np.arange(start, start + 12), np.arange(4, 12)) for start in (0, 20))
    masks = masks_around(torch.from_numpy(other.token_ids), 60, whole=False)
    supported = replace(other, supports=supports_of(masks))
    mixed, plain = (score(parameters.leaves, CONFIG, make_batch([bare, each]), 0.7) for each in (supported, other))
    assert torch.equal(mixed.logprobs[:8], plain.logprobs[:8]) and torch.equal(mixed.entropy[:8], plain.entropy[:8])
    assert (mixed.logprobs[8:] > plain.logprobs[8:]).all() and (mixed.entropy[8:] < plain.entropy[8:]).all()


def row(sample: int, record: bytes | None) -> dict[str, Any]:
    return recorded_row(sample, "supports", record)


def record(change: Callable[[list[np.ndarray | None]], object] = lambda masks: None, size: int = 60) -> bytes:
    """Supports of the five policy tokens of `row`, two of them the same set. change: alters their list of ten."""
    masks: list[np.ndarray | None] = (
        [None] * 6 + [np.arange(size) == 6, np.arange(size) < 10] + [np.arange(size) > 7] * 2
    )
    change(masks)
    return encode_supports(supports_of(masks))


def dataset(world: World, *records: bytes | None) -> Artifact:
    members = [{"episode_id": f"e{at}", "group_id": "g", "reward": float(at), "kept": True} for at in range(2)]
    return world.dataset([row(at, each) for at, each in enumerate(records)], members)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            record(lambda masks: masks.__setitem__(8, np.arange(60) < 8)),
            "leaves out the token at 8, 8, which was drawn",
        ),
        (record(lambda masks: masks.pop()), "covers 9 of 10 tokens"),
        (record(lambda masks: masks.__setitem__(9, np.arange(70) % 60 == 9), 70), r"names a token outside 0\.\.59"),
        (record()[:-1], "not four NumPy arrays"),
        (b"", "not four NumPy arrays"),
    ],
    ids=["drawn", "short", "foreign", "truncated", "empty"],
)
def test_a_record_of_other_tokens_is_refused(column: bytes, message: str, world: World) -> None:
    refused = dataset(world, record(), column)
    with pytest.raises(TrainingDataError, match=rf"{refused.ref.uri}/train\.parquet row 1: .*{message}.* again"):
        read_experience(refused, CONFIG, RlConfig(), 0)


def test_a_null_row_was_drawn_from_the_whole_vocabulary(world: World) -> None:
    found = read_experience(dataset(world, None, record()), CONFIG, RlConfig(), 0)
    assert found is not None
    first, second = (sequence.supports for sequence in found.sequences)
    assert first is None and second is not None and second.numbers.tolist() == [WHOLE] * 6 + [0, 1, 2, 2]
    batch = make_batch(found.sequences)
    assert batch.supports is not None and batch.supports.numbers.tolist() == [WHOLE] * 6 + [0, 1, 2, 2]
    bare = read_experience(dataset(world, None, None), CONFIG, RlConfig(), 0)
    assert bare is not None and make_batch(bare.sequences).supports is None


def supported_dataset(world: World, base: TrainResult) -> Artifact:
    """Rows of `own_dataset` whose tokens were drawn from sets: every third row from the whole vocabulary, a token in
    each other one forced.
    """
    plain = own_dataset(world, base)
    rows, members = (plain.table(f"{name}.parquet").to_pylist() for name in ("train", "members"))
    for at, own in enumerate(rows):
        if at % 3 == 0:
            continue
        ids, roles = torch.tensor(own["token_ids"]), own["token_role"]
        masks = masks_around(ids, world.vocabulary)
        masks = [mask if role == TokenRole.POLICY else None for mask, role in zip(masks, roles, strict=True)]
        last = len(ids) - 1
        roles[last], masks[last] = int(TokenRole.FORCED), np.arange(world.vocabulary) == int(ids[last])
        supports = supports_of(masks)
        own["supports"] = encode_supports(supports)
        own["logprobs"] = logprobs_over(base, world, ids, roles, supports)
    return world.dataset(rows, members)


@torch.no_grad()
def logprobs_over(
    base: TrainResult, world: World, ids: Tensor, roles: list[int], supports: Supports
) -> list[float | None]:
    """Log probabilities of the policy tokens over their supports, from the model's log probability of every token."""
    parameters = load_checkpoint(open_artifact(world.store, base.checkpoint).directory())
    found: list[float | None] = [None] * len(ids)
    for place in np.flatnonzero(np.array(roles) == TokenRole.POLICY):
        others = [np.append(ids[:place].numpy(), token) for token in range(world.vocabulary)]
        every = score(
            parameters.leaves, parameters.config, make_batch([ScoredSequence(own, np.array([place])) for own in others])
        ).logprobs.double()
        mask = torch.from_numpy(supports.masks(np.array([place]), world.vocabulary)[0])
        found[place] = float(every[ids[place]] - every[mask].logsumexp(0))
    return found


def test_a_dataset_with_supports_trains_on_what_the_sampler_drew_from(world: World) -> None:
    base = run_job(world.sft_job("base"))
    assert base is not None
    rows = supported_dataset(world, base)
    results = []
    for name, each in (("with", rows), ("without", without_supports(world, rows))):
        result = run_job(world.rl_job(name, each, base.checkpoint, base.trainer_state))
        assert result is not None
        results.append((result, result.metrics))
    (found, numbers), (_, blind) = results
    assert numbers["sampler_mismatch_max"] < 1e-5 and numbers["effective_sample_size"] > 1 - 1e-6
    assert blind["sampler_mismatch_max"] > 0.1
    assert len(losses(world, found.checkpoint)) == 2


def without_supports(world: World, dataset: Artifact) -> Artifact:
    rows, members = (dataset.table(f"{name}.parquet").to_pylist() for name in ("train", "members"))
    return world.dataset([{name: each[name] for name in each if name != "supports"} for each in rows], members)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["fsdp2", "zero3"])
def test_two_ranks_have_the_gradient_of_one_over_supports(world: World, backend: str) -> None:
    base = run_job(world.sft_job("base"))
    assert base is not None
    rows = supported_dataset(world, base)
    jobs = [
        world.rl_job(name, each, base.checkpoint, base.trainer_state, **STILL)
        for name, each in (("whole", rows), ("blind", without_supports(world, rows)), ("shared", rows))
    ]
    whole, blind = map(run_job, jobs[:2])
    assert whole is not None and blind is not None
    expected = moments(world, whole.trainer_state)
    found = run_in_ranks(with_backend(jobs[2], 2, **BACKENDS[backend]))["trainer_state"]
    assert difference(moments(world, found), expected) < 1e-5
    assert difference(moments(world, blind.trainer_state), expected) > 0.02
