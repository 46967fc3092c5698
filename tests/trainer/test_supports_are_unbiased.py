"""Policy gradient over recorded supports, against the exact gradient of expected reward, in float64.

    policy, process --> supports of every prefix --> probability of every sequence --> expected reward J, its gradient
                                |                                |
                                +--> recorded rows --> trainer --+--> expectation of the trainer's gradient

A policy over 5 tokens writes 4 of them, so that all 625 sequences are enumerated. Its process masks tokens by a grammar
that depends on the prefix, inserts those without an alternative, and takes the nucleus (top-p) of the others, which
depends on the weights: J is differentiable where no small change of the weights changes a nucleus, and the statement
holds there. A verified draft is sampled with the same random numbers, so its process is this one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa
import pytest
import torch
from torch import Tensor

from contracts.episodes import TokenRole
from contracts.supports import SupportsWriter, encode_supports
from trainer.algorithms.base import Tokens
from trainer.algorithms.corrections import Corrections
from trainer.algorithms.reinforce_pp import ReinforcePlusPlus
from trainer.data import Rows, make_batch, read_sequences
from trainer.head import scores_over_supports, target_scores
from trainer.losses import policy_loss
from trainer.supports import read_supports

VOCABULARY, LENGTH, WIDTH, TEMPERATURE = 5, 4, 6, 0.8
STARTS = [(VOCABULARY**t - 1) // (VOCABULARY - 1) for t in range(LENGTH + 1)]
"""Number of the first prefix of each length; prefixes count in base 5."""
SEQUENCES = torch.cartesian_prod(*[torch.arange(VOCABULARY)] * LENGTH)
"""int64 [625, 4]."""


@dataclass(frozen=True)
class Policy:
    """Logits hidden[prefix] @ weight.T."""

    hidden: Tensor
    """float64 [prefixes, width]."""
    weight: Tensor
    """float64 [vocabulary, width]."""

    @property
    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden, self.weight

    def moved(self, directions: list[Tensor], step: float) -> Policy:
        pairs = zip(self.leaves, directions, strict=True)
        return Policy(*(leaf.detach() + step * direction for leaf, direction in pairs))


@dataclass(frozen=True)
class Process:
    """How the sampler draws."""

    grammar: bool
    top_p: float

    def supports(self, policy: Policy) -> Tensor:
        """bool [prefixes, vocabulary]: tokens that may follow; the nucleus is of the policy's own probabilities."""
        masks = grammar() if self.grammar else torch.ones(STARTS[-1], VOCABULARY, dtype=torch.bool)
        falling, order = probabilities(policy, masks).detach().sort(-1, descending=True)
        kept = torch.zeros_like(masks).scatter(1, order, falling.cumsum(-1) - falling < self.top_p)
        return masks & kept


PROCESSES = {"grammar": Process(True, 1.0), "top-p": Process(False, 0.7), "both": Process(True, 0.7)}
each_process = pytest.mark.parametrize("name", PROCESSES)


def grammar() -> Tensor:
    """bool [prefixes, vocabulary]: one to five tokens may follow a prefix; four may begin."""
    scores = torch.rand(STARTS[-1], VOCABULARY, generator=torch.Generator().manual_seed(0))
    sizes = torch.arange(3, STARTS[-1] + 3) % VOCABULARY + 1
    return scores.argsort(-1).argsort(-1) < sizes[:, None]


def drawn_policy(seed: int = 1) -> Policy:
    draw = torch.Generator().manual_seed(seed)
    shapes = (STARTS[-1], WIDTH), (VOCABULARY, WIDTH)
    leaves = (0.7 * torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes)
    return Policy(*(leaf.requires_grad_() for leaf in leaves))


def drawn_rewards() -> Tensor:
    return torch.randn(len(SEQUENCES), generator=torch.Generator().manual_seed(2), dtype=torch.float64)


def probabilities(policy: Policy, masks: Tensor) -> Tensor:
    logits = policy.hidden @ policy.weight.T / TEMPERATURE
    return logits.masked_fill(~masks, -torch.inf).softmax(-1)


def prefixes(sequences: Tensor) -> Tensor:
    """int64 [sequences, length]: number of the prefix that each token follows."""
    columns, number = [], torch.zeros(len(sequences), dtype=torch.int64)
    for place in range(LENGTH):
        columns.append(STARTS[place] + number)
        number = number * VOCABULARY + sequences[:, place]
    return torch.stack(columns, 1)


def sequence_probabilities(policy: Policy, masks: Tensor) -> Tensor:
    """float64 [625]: product of the probabilities of the tokens."""
    return probabilities(policy, masks)[prefixes(SEQUENCES), SEQUENCES].prod(-1)


def expected_reward(policy: Policy, process: Process) -> Tensor:
    return (sequence_probabilities(policy, process.supports(policy)) * drawn_rewards()).sum()


def exact_gradient(policy: Policy, process: Process) -> Tensor:
    return flat(torch.autograd.grad(expected_reward(policy, process), policy.leaves))


def flat(parts: tuple[Tensor, ...] | list[Tensor]) -> Tensor:
    return torch.cat([part.reshape(-1) for part in parts])


def recorded(sequences: Tensor, masks: Tensor, *, forced: bool = True) -> Rows:
    """Rows as the trainer reads them: a prompt of one token, then the sequence. forced: whether tokens without an
    alternative have the role FORCED instead of POLICY.
    """
    rows, records = [], []
    for ids, states in zip(sequences.tolist(), prefixes(sequences).tolist(), strict=True):
        alone = masks[states].sum(-1) == 1
        roles = torch.where(alone & forced, int(TokenRole.FORCED), int(TokenRole.POLICY)).tolist()
        rows.append({"token_ids": [0, *ids], "token_role": [int(TokenRole.PROMPT), *roles]})
        writer = SupportsWriter()
        writer.add(None)
        for state in states:
            writer.add(masks[state].numpy())
        records.append(encode_supports(writer.supports()))
    found = read_sequences(pa.Table.from_pylist(rows), "rows", VOCABULARY, LENGTH + 1)
    found.supports = read_supports(found, lambda: [pa.array(records, pa.large_binary())], "rows", VOCABULARY, None)
    return found


def expected_update(policy: Policy, process: Process, *, supports: bool = True, forced: bool = True) -> Tensor:
    """Expectation of minus the gradient of the trainer's loss, over all sequences of the process.

    supports: whether the trainer has the record of them. forced: see `recorded`.
    """
    masks = process.supports(policy)
    chances = sequence_probabilities(policy, masks).detach()
    possible = chances > 0
    rows = list(recorded(SEQUENCES[possible], masks, forced=forced))
    batch = make_batch(rows if supports else [replace(row, supports=None) for row in rows])
    following = torch.nn.functional.pad(prefixes(SEQUENCES[possible]), (0, 1)).reshape(-1)  # nothing follows the last
    logprobs, _ = scores_over_supports(
        target_scores, policy.hidden[following[batch.rows]], policy.weight, batch.targets, TEMPERATURE, batch.supports
    )
    lengths = torch.bincount(batch.owners).double()
    gains = (chances * drawn_rewards())[possible][batch.owners]
    tokens = Tokens(logprobs, logprobs.detach(), logprobs.detach(), gains, batch.owners, lengths)
    loss = policy_loss(ReinforcePlusPlus(), Corrections(), tokens).loss
    return -flat(torch.autograd.grad(loss, policy.leaves))


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@each_process
def test_expected_gradient_over_supports_is_that_of_the_expected_reward(name: str) -> None:
    policy, process = drawn_policy(), PROCESSES[name]
    exact = exact_gradient(policy, process)
    assert relative_error(expected_update(policy, process), exact) < 1e-12
    # a token without an alternative has probability 1 over its support, whoever counts it
    assert relative_error(expected_update(policy, process, forced=False), exact) < 1e-12


@each_process
def test_exact_gradient_is_the_slope_of_the_process_that_takes_its_nucleus_anew(name: str) -> None:
    policy, process = drawn_policy(), PROCESSES[name]
    draw = torch.Generator().manual_seed(3)
    exact = exact_gradient(policy, process)
    for _ in range(5):
        along = [torch.randn(leaf.shape, generator=draw, dtype=torch.float64) for leaf in policy.leaves]
        ends = [expected_reward(policy.moved(along, step), process) for step in (1e-6, -1e-6)]
        assert float(ends[0] - ends[1]) / 2e-6 == pytest.approx(float(exact @ flat(along)), rel=1e-6)


LEAST_BIAS = 0.1
"""Relative error of the gradient without supports, for each of eight policies; the test prints the measured ones."""


@each_process
@pytest.mark.parametrize("forced", [True, False], ids=["forced-left-out", "forced-as-policy"])
def test_gradient_over_the_whole_vocabulary_is_biased(name: str, forced: bool) -> None:
    errors, cosines = [], []
    for seed in range(1, 9):
        policy, process = drawn_policy(seed), PROCESSES[name]
        exact = exact_gradient(policy, process)
        found = expected_update(policy, process, supports=False, forced=forced)
        errors.append(relative_error(found, exact))
        cosines.append(float(torch.cosine_similarity(found, exact, 0)))
    for what, values in (("relative error", errors), ("cosine", cosines)):
        print(f"{name}, {forced=}: {what} {min(values):.2f} to {max(values):.2f}, median {np.median(values):.2f}")
    assert min(errors) > LEAST_BIAS


@dataclass(frozen=True)
class Sampler:
    """Draws tokens by inverting the distribution function over the support."""

    chances: np.ndarray
    """float64 [prefixes, vocabulary]."""
    masks: np.ndarray
    """bool [prefixes, vocabulary]."""

    def draw(self, state: int, number: float) -> int:
        """number: uniform in [0, 1)."""
        total = self.chances[state].cumsum()
        return int(np.searchsorted(total, number * total[-1], side="right"))

    def singly(self, numbers: np.ndarray) -> list[int]:
        """A token at a time. numbers: one for each place."""
        tokens: list[int] = []
        for number in numbers:
            tokens.append(self.draw(state_of(tokens), number))
        return tokens

    def drafted(self, numbers: np.ndarray, draft: np.random.Generator) -> tuple[list[int], int]:
        """Drafts of three tokens at a time, verified with the number of each place: the tokens up to the first that
        differs from the draft stay. Returns them, and the number of drafted tokens among them.
        """
        tokens: list[int] = []
        agreed = 0
        while len(tokens) < LENGTH:
            begin, proposal = list(tokens), draft.integers(0, VOCABULARY, 3).tolist()
            for ahead, proposed in enumerate([*proposal, None]):
                if len(tokens) == LENGTH:
                    break
                tokens.append(self.draw(state_of([*begin, *proposal[:ahead]]), numbers[len(tokens)]))
                if tokens[-1] != proposed:
                    break
                agreed += 1
        return tokens, agreed


def state_of(tokens: list[int]) -> int:
    return STARTS[len(tokens)] + sum(token * VOCABULARY**at for at, token in enumerate(reversed(tokens)))


@each_process
def test_verified_drafts_change_no_token(name: str) -> None:
    policy, process = drawn_policy(), PROCESSES[name]
    masks = process.supports(policy)
    sampler = Sampler(probabilities(policy, masks).detach().numpy(), masks.numpy())
    draft, numbers = np.random.default_rng(4), np.random.default_rng(5).random((4000, LENGTH))
    singly = [sampler.singly(own) for own in numbers]
    drafted, agreed = zip(*(sampler.drafted(own, draft) for own in numbers), strict=True)
    assert singly == list(drafted)
    assert 0.05 < sum(agreed) / numbers.size < 0.95
    # and this is the process of the expectation above
    places = [sum(token * VOCABULARY**at for at, token in enumerate(reversed(own))) for own in singly]
    rewards = drawn_rewards()[places]
    deviation = float(rewards.std()) / len(places) ** 0.5
    assert abs(float(rewards.mean()) - expected_reward(policy, process).item()) < 4 * deviation
