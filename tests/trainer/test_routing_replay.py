"""Routing replay: with other experts chosen by the sampler, the trainer's numbers are those of the sampler again."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from test_trainer_balance import float64_model
from torch import Tensor
from trainer_world import QUICKSTART, TINY, World, backend_of, recorded_row

import inference.engines.model as sampling_model
from contracts.architectures import Architecture
from contracts.checkpoints import WEIGHTS
from contracts.routing import Routes, encode_routes
from inference.engines.base import Completion, SamplingParams
from inference.engines.builtin import BuiltinEngine
from inference.engines.numerics import Numerics
from inference.engines.weights import LayerWeights
from trainer.config import RlConfig
from trainer.data import ScoredSequence, make_batch
from trainer.errors import TrainingDataError
from trainer.experience import Experience, read_experience
from trainer.export import checkpoint_tensors
from trainer.model import score
from trainer.parameters import Parameters, draw_masters
from trainer.rl import Start, accumulate, expert_counts, score_start
from trainer.rl_metrics import Totals

VOCABULARY, ROWS, PROMPT, SAMPLED = 60, 8, 6, 10
CONFIG: dict[str, Any] = TINY.model_copy(update={"initializer_range": 0.05}).hf_config(VOCABULARY)
SHAPE = (CONFIG["num_hidden_layers"], CONFIG["num_experts_per_tok"])
Sampled = list[tuple[list[int], Completion]]


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    return Parameters.from_masters(CONFIG, draw_masters(CONFIG, 0))


@pytest.fixture(scope="module")
def policy(parameters: Parameters, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parameters as a checkpoint that the engine reads."""
    folder = tmp_path_factory.mktemp("policy")
    save_file({name: each.contiguous() for name, each in checkpoint_tensors(parameters).items()}, folder / WEIGHTS)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def sample(policy: Path) -> Sampled:
    """Completions of random prompts, with their routing."""
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, VOCABULARY, PROMPT + row).tolist() for row in range(ROWS)]

    async def run() -> list[Completion]:
        engine = BuiltinEngine(policy, "v1", threads=1)
        try:
            params = [SamplingParams(1.0, SAMPLED, seed, routing_from=0) for seed in range(ROWS)]
            return await asyncio.gather(*map(engine.generate, prompts, params))
        finally:
            await engine.close()

    return list(zip(prompts, asyncio.run(run()), strict=True))


@pytest.fixture(scope="module")
def plain(policy: Path) -> Sampled:
    return sample(policy)


@pytest.fixture(scope="module")
def perturbed(policy: Path) -> Sampled:
    """Sampled by an engine that chooses experts by a gate with noise, and weighs them by its own gate."""

    def choose(shape: Architecture, numerics: Numerics, layer: LayerWeights, x: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.randn(layer.router.shape, generator=torch.Generator().manual_seed(1))
        chosen = (x @ (layer.router + 0.2 * noise).T).topk(shape.experts_per_token, -1).indices
        shares = (x @ layer.router.T).softmax(-1).gather(1, chosen)
        return shares / shares.sum(-1, keepdim=True), chosen

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling_model, "choose_experts", choose)
        return sample(policy)


def experience(sampled: Sampled, *, replay: bool = True) -> Experience:
    sequences = [
        ScoredSequence(
            np.array([*prompt, *completion.token_ids], np.int64),
            np.arange(len(prompt), len(prompt) + len(completion.token_ids)),
            completion.routed_experts if replay else None,
        )
        for prompt, completion in sampled
    ]
    return Experience(
        episodes=[f"e{row}" for row in range(ROWS)],
        group_names=["g"] * ROWS,
        sequences=sequences,
        sampler_logprobs=[torch.tensor(completion.logprobs) for _, completion in sampled],
        groups=[0] * ROWS,
        rewards=torch.zeros(ROWS, dtype=torch.float64),
        advantages=torch.linspace(-1, 1, ROWS),
        reward_mean=0.5,
        members=ROWS,
    )


def mismatch(parameters: Parameters, rows: Experience) -> float:
    found = score_start(backend_of(parameters), rows, RlConfig()).logprobs
    return max(float((a - b).abs().max()) for a, b in zip(found, rows.sampler_logprobs, strict=True))


def gradients(parameters: Parameters, rows: Experience, **config: Any) -> tuple[Totals, dict[str, Tensor]]:
    parameters.clear_gradients()
    parts = [list(range(3)), list(range(3, ROWS))]
    assert rows.advantages is not None
    advantages = [own.expand(SAMPLED) for own in rows.advantages]
    start = Start(rows.sampler_logprobs, advantages)
    totals = accumulate(RlConfig(algorithm=QUICKSTART, **config), backend_of(parameters), rows, start, parts)
    return totals, {name: leaf.grad.clone() for name, leaf in parameters.leaves.items() if leaf.grad is not None}


def test_replay_removes_the_mismatch_of_a_sampler_that_chooses_other_experts(
    parameters: Parameters, perturbed: Sampled
) -> None:
    assert mismatch(parameters, experience(perturbed, replay=False)) > 1e-3
    assert mismatch(parameters, experience(perturbed)) < 1e-6


def test_replaying_the_routers_own_choice_changes_no_bit(parameters: Parameters, plain: Sampled) -> None:
    rows, bare = experience(plain), experience(plain, replay=False)
    pairs = zip(*(score_start(backend_of(parameters), each, RlConfig()).logprobs for each in (rows, bare)), strict=True)
    assert all(torch.equal(with_replay, without) for with_replay, without in pairs)
    totals, found = gradients(parameters, rows, router_balance=0.1)
    _, expected = gradients(parameters, bare, router_balance=0.1)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert totals.metrics()["rerouted_fraction"] == 0


def test_the_gradient_with_replay_is_that_of_a_float64_reference(
    parameters: Parameters, perturbed: Sampled, tmp_path: Path
) -> None:
    rows = experience(perturbed)
    _, found = gradients(parameters, rows)
    model = float64_model(parameters, tmp_path)
    reference_loss(model, rows).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for index in range(CONFIG["num_hidden_layers"]):
        for short in ("mlp.gate.weight", "self_attn.q_proj.weight", "mlp.experts.down_proj"):
            name = f"model.layers.{index}.{short}"
            ours = found.get(name, found.get(f"{name}.weight"))
            assert float(ours.norm()) > 1e-3, f"{name} gets a gradient"
            torch.testing.assert_close(ours.double(), expected[name], atol=1e-6, rtol=0, msg=name)


def reference_loss(model: Any, rows: Experience) -> Tensor:
    """Mean of -A log p over all tokens (the ratio is 1): one sequence at a time, its experts forced by hooks."""
    losses = []
    for sequence, advantage in zip(rows.sequences, rows.advantages.double(), strict=True):
        ids = torch.from_numpy(sequence.token_ids)
        assert sequence.routes is not None
        hooks = [force(layer.mlp.gate, sequence.routes[:, index]) for index, layer in enumerate(model.model.layers)]
        every = model(ids[None]).logits[0].log_softmax(-1)
        for hook in hooks:
            hook.remove()
        before = torch.from_numpy(sequence.scored) - 1
        losses.append(-advantage * every[before, ids[before + 1]])
    own = torch.cat(losses)
    # the gradient of the ratio r at r = 1 is that of log p
    return own.mean()


def force(gate: Any, recorded: np.ndarray) -> Any:
    """Let a gate of transformers choose the recorded experts; the last position keeps its own."""

    def replace(module: Any, inputs: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, _, chosen = output
        forced = torch.cat([torch.from_numpy(recorded.astype(np.int64)), chosen[len(recorded) :]])
        logits = torch.nn.functional.linear(inputs[0].reshape(-1, module.weight.shape[1]), module.weight)
        shares = logits.softmax(-1).gather(1, forced)
        return logits, shares / shares.sum(-1, keepdim=True), forced

    return gate.register_forward_hook(replace)


def test_unrecorded_positions_use_the_models_own_choice_and_are_counted(
    parameters: Parameters, perturbed: Sampled
) -> None:
    rows = experience(perturbed)
    totals, _ = gradients(parameters, rows)
    counted, tokens = totals.metrics(), sum(sequence.length for sequence in rows.sequences)
    assert counted["replayed_tokens"] == tokens - ROWS and counted["unrecorded_tokens"] == ROWS
    assert 0 < counted["rerouted_fraction"] <= 1
    first, last = rows.sequences[0], rows.sequences[-1]
    alone, mixed = (
        [dataclasses.replace(each, routes=None) for each in (first, last)],
        [dataclasses.replace(first, routes=None), last],
    )
    with torch.no_grad():
        bare, half = (score(parameters.leaves, CONFIG, make_batch(each)) for each in (alone, mixed))
    count = len(first.scored)
    torch.testing.assert_close(bare.logprobs[:count], half.logprobs[:count], atol=1e-6, rtol=0)
    assert float((bare.logprobs[count:] - half.logprobs[count:]).abs().max()) > 1e-3
    assert bare.replay is None and half.replay is not None and half.replay.unrecorded == first.length + 1


def test_the_balance_loss_counts_the_experts_in_use(parameters: Parameters) -> None:
    routes: Routes = np.tile(np.array([1, 3], np.uint8), (9, CONFIG["num_hidden_layers"], 1))
    sequence = ScoredSequence(np.arange(10), np.array([5, 9]), routes)
    counts = expert_counts(backend_of(parameters), [[sequence]])
    assert counts[1].tolist() == [0, 2, 0, 2]  # only rows that predict a token reach the last layer's experts
    assert counts[0, 1] >= 9 and counts[0, 3] >= 9 and counts[0].sum() == 20


def routed(recorded: int, layers: int = SHAPE[0], picks: int = SHAPE[1], *, first: int = 0) -> bytes:
    routes = np.zeros((recorded, layers, picks), np.uint8)
    routes[:] = np.arange(first, first + picks)
    return encode_routes(routes)


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (None, r"row 1 has no routed_experts: set rollouts.record_routing: true"),
        (b"words", r"row 1: routed experts are not a NumPy array"),
        (routed(9, layers=3), r"row 1: routed_experts has 3 layers, the model 2"),
        (routed(9, picks=1), r"row 1: routed_experts has 1 experts per token, the model 2"),
        (routed(9, first=3), r"row 1: routed_experts names expert 4, the model has 4"),
        (routed(8), r"row 1: routed_experts covers 8 positions of 10 tokens, .* at 9"),
        (routed(11), r"row 1: routed_experts covers 11 positions of 10 tokens"),
        (encode_routes(np.zeros((9, *SHAPE), np.uint8)), r"row 1: routed_experts names an expert twice"),
    ],
)
def test_a_record_of_another_model_or_sequence_is_refused(column: bytes | None, message: str, world: World) -> None:
    members = [
        {"episode_id": f"e{sample}", "group_id": "g", "reward": float(sample), "kept": True} for sample in (0, 1)
    ]
    dataset = world.dataset(
        [recorded_row(0, "routed_experts", routed(9)), recorded_row(1, "routed_experts", column)], members
    )
    with pytest.raises(TrainingDataError, match=message):
        read_experience(dataset, CONFIG, RlConfig(routing_replay=True), 0)
    found = read_experience(dataset, CONFIG, RlConfig(), 0)
    assert found is not None and found.sequences[0].routes is None


def test_rows_without_the_column_are_refused_only_where_replay_is_asked_for(world: World) -> None:
    row = {
        "episode_id": "e",
        "group_id": "g",
        "group_index": 0,
        "token_ids": [1, 2],
        "token_role": [0, 1],
        "logprobs": [None, -1.0],
        "policy_versions": ["v"],
        "reward": 1.0,
    }
    dataset = world.dataset([row], [{"episode_id": "e", "group_id": "g", "reward": 1.0, "kept": True}])
    assert read_experience(dataset, CONFIG, RlConfig(), 0) is not None
    with pytest.raises(TrainingDataError, match=r"row 0 has no routed_experts"):
        read_experience(dataset, CONFIG, RlConfig(routing_replay=True), 0)
