"""The load-balance loss of the routers: the same gradient however a batch is cut, and that of a float64 reference."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from trainer_world import QUICKSTART, TINY, backend_of

from trainer.config import RlConfig
from trainer.data import ScoredSequence, make_batch
from trainer.experience import Experience
from trainer.losses import balance_loss
from trainer.model import score
from trainer.parameters import Parameters, draw_masters
from trainer.rl import Start, accumulate, expert_counts
from trainer.rl_metrics import Totals

transformers = pytest.importorskip("transformers")

ROWS, VOCABULARY = 12, 60
WEIGHT = 0.1
CONFIG: dict[str, Any] = TINY.model_copy(update={"initializer_range": 0.2}).hf_config(VOCABULARY)
Cut = list[list[int]]


def make_experience() -> Experience:
    """Rows of 3 to 20 tokens, of which a few are scored."""
    draw = np.random.default_rng(0)
    sequences = []
    for _ in range(ROWS):
        length = int(draw.integers(3, 21))
        scored = np.sort(draw.choice(np.arange(1, length), size=max(1, length // 3), replace=False))
        sequences.append(ScoredSequence(draw.integers(0, VOCABULARY, length), scored))
    noise = [torch.from_numpy(draw.normal(-4, 0.3, len(sequence.scored))).float() for sequence in sequences]
    return Experience(
        episodes=[f"e{row}" for row in range(ROWS)],
        group_names=[f"g{row // 4}" for row in range(ROWS)],
        sequences=sequences,
        sampler_logprobs=noise,
        groups=[row // 4 for row in range(ROWS)],
        rewards=torch.ones(ROWS).double(),
        advantages=torch.from_numpy(draw.normal(size=ROWS)).float(),
        reward_mean=0.5,
        members=ROWS,
    )


EXPERIENCE = make_experience()
OLD = [values + 0.1 for values in EXPERIENCE.sampler_logprobs]
RL = RlConfig(algorithm=QUICKSTART, router_balance=WEIGHT)


def start_of(experience: Experience, old: list[Tensor]) -> Start:
    """`old` as the log probabilities under the starting weights."""
    assert experience.advantages is not None
    return Start(old, [a.expand(len(o)) for a, o in zip(experience.advantages, old, strict=True)])


@st.composite
def cuts(draw: st.DrawFn) -> Cut:
    """Every row once, in any order, in microbatches of any size."""
    order = draw(st.permutations(range(ROWS)))
    ends = sorted(draw(st.sets(st.integers(1, ROWS - 1))))
    return [list(order[a:b]) for a, b in zip([0, *ends], [*ends, ROWS], strict=True)]


def gradients(parameters: Parameters, parts: Cut, balance: float = WEIGHT) -> tuple[Totals, dict[str, Tensor]]:
    parameters.clear_gradients()
    totals = accumulate(
        RL.model_copy(update={"router_balance": balance}),
        backend_of(parameters),
        EXPERIENCE,
        start_of(EXPERIENCE, OLD),
        parts,
    )
    return totals, {name: leaf.grad.clone() for name, leaf in parameters.leaves.items() if leaf.grad is not None}


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    return Parameters.from_masters(CONFIG, draw_masters(CONFIG, 0))


@pytest.fixture(scope="module")
def whole(parameters: Parameters) -> tuple[Totals, dict[str, Tensor]]:
    """Of the batch in one piece."""
    torch.set_num_threads(1)
    return gradients(parameters, [list(range(ROWS))])


@settings(max_examples=25, deadline=None)
@given(parts=cuts())
def test_microbatch_size_does_not_change_the_gradient(
    parameters: Parameters, whole: tuple[Totals, dict[str, Tensor]], parts: Cut
) -> None:
    totals, found = gradients(parameters, parts)
    assert totals.balance == pytest.approx(whole[0].balance, rel=1e-6)
    assert totals.loss == pytest.approx(whole[0].loss, rel=1e-5, abs=1e-6)
    for name, gradient in whole[1].items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=0, msg=name)


def test_balance_loss_reaches_every_router(parameters: Parameters, whole: tuple[Totals, dict[str, Tensor]]) -> None:
    _, plain = gradients(parameters, [list(range(ROWS))], balance=0.0)
    for index in range(CONFIG["num_hidden_layers"]):
        name = f"model.layers.{index}.mlp.gate.weight"
        assert float((whole[1][name] - plain[name]).norm()) > 1e-3, name


def test_the_gradient_is_that_of_a_float64_reference(
    parameters: Parameters, whole: tuple[Totals, dict[str, Tensor]], tmp_path: Path
) -> None:
    model = float64_model(parameters, tmp_path)
    loss = reference_loss(model)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert whole[0].loss + WEIGHT * whole[0].balance == pytest.approx(float(loss.detach()), abs=1e-6)
    for index in range(CONFIG["num_hidden_layers"]):
        for short in ("mlp.gate.weight", "self_attn.q_proj.weight", "mlp.experts.down_proj"):
            name = f"model.layers.{index}.{short}"
            ours = whole[1].get(name, whole[1].get(f"{name}.weight"))
            torch.testing.assert_close(ours.double(), found[name], atol=1e-6, rtol=0, msg=name)


def float64_model(parameters: Parameters, folder: Path) -> Any:
    """The same weights in transformers' own Qwen3-MoE, every operation in float64."""
    from safetensors.torch import save_file

    from contracts.architectures import expert_names

    tensors = {}
    for name, leaf in parameters.leaves.items():
        for single, matrix in zip(
            expert_names(name, tuple(leaf.shape)), leaf if leaf.dim() == 3 else [leaf], strict=True
        ):
            tensors[single] = matrix.detach().clone().contiguous()
    body = {name: value for name, value in CONFIG.items() if name != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(body))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return transformers.Qwen3MoeForCausalLM.from_pretrained(
        folder, dtype=torch.float64, local_files_only=True, experts_implementation="eager"
    )


def reference_loss(model: Any) -> Tensor:
    """Clipped loss per token plus WEIGHT * Switch's loss over all tokens that reach each layer's experts, one sequence
    at a time.
    """
    config, picks, layers = QUICKSTART, CONFIG["num_experts_per_tok"], CONFIG["num_hidden_layers"]
    losses, routers = [], [[] for _ in range(layers)]
    for row, sequence in enumerate(EXPERIENCE.sequences):
        out = model(torch.from_numpy(sequence.token_ids)[None], output_router_logits=True)
        before = torch.from_numpy(sequence.scored) - 1
        every = out.logits[0].log_softmax(-1)
        own = every[before, torch.from_numpy(sequence.token_ids)[before + 1]]
        ratio = (own - OLD[row].double()).exp()
        advantage = EXPERIENCE.advantages[row].double()
        kept = torch.minimum(ratio * advantage, ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantage)
        kept = kept.clamp(min=config.dual_clip * advantage) if advantage < 0 else kept
        weight = (OLD[row] - EXPERIENCE.sampler_logprobs[row]).double().exp().clamp(max=RL.corrections.importance_cap)
        losses.append(-(weight * kept))
        for index, logits in enumerate(out.router_logits):
            routers[index].append(logits[before] if index == layers - 1 else logits)
    balances = []
    for parts in routers:
        shares = torch.cat(parts).softmax(-1)
        chosen = torch.zeros_like(shares).scatter_(1, shares.topk(picks, dim=-1).indices, 1.0 / picks)
        balances.append(shares.shape[1] * (chosen.mean(0) * shares.mean(0)).sum())
    return torch.cat(losses).mean() + WEIGHT * torch.stack(balances).mean()


def test_counts_add_up_over_layers(parameters: Parameters) -> None:
    counts = expert_counts(backend_of(parameters), [EXPERIENCE.sequences[:5], EXPERIENCE.sequences[5:]])
    picks = CONFIG["num_experts_per_tok"]
    tokens = sum(sequence.length for sequence in EXPERIENCE.sequences)
    scored = sum(len(sequence.scored) for sequence in EXPERIENCE.sequences)
    assert counts.sum(-1).tolist() == [tokens * picks, scored * picks]


def test_balanced_routers_have_loss_one() -> None:
    even = torch.full((2, 4), 6.0)
    assert float(balance_loss(even / 2, even, 2)) == pytest.approx(1.0)
    collapsed = torch.tensor([[12.0, 12.0, 0.0, 0.0]])
    assert float(balance_loss(collapsed / 2, collapsed, 2)) == pytest.approx(2.0)


def test_routing_is_computed_only_when_asked(parameters: Parameters) -> None:
    assert score(parameters.leaves, CONFIG, make_batch(EXPERIENCE.sequences[:2])).routing is None
