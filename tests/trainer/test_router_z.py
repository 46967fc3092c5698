"""The z loss of the routers: the same gradient however a batch is cut, and that of a float64 reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_trainer_balance import CONFIG, EXPERIENCE, OLD, RL, ROWS, Cut, float64_model, start_of
from torch import Tensor
from trainer_world import World, backend_of

from contracts.artifacts import open_artifact
from trainer.config import RlConfig, SftConfig
from trainer.losses import z_loss
from trainer.parameters import Parameters, draw_masters
from trainer.rl import accumulate
from trainer.rl_metrics import Totals
from trainer.run import run_job

WEIGHT = 0.1
WHOLE = [list(range(ROWS))]


@pytest.fixture(scope="module")
def parameters() -> Parameters:
    return Parameters.from_masters(CONFIG, draw_masters(CONFIG, 0))


def gradients(parameters: Parameters, parts: Cut, weight: float) -> tuple[Totals, dict[str, Tensor]]:
    parameters.clear_gradients()
    config = RL.model_copy(update={"router_balance": 0.0, "router_z": weight})
    totals = accumulate(config, backend_of(parameters), EXPERIENCE, start_of(EXPERIENCE, OLD), parts)
    return totals, {name: leaf.grad.clone() for name, leaf in parameters.leaves.items()}


@pytest.mark.parametrize("parts", [[[row] for row in range(ROWS)], [[3, 1, 2], [0, 11, 4], [10, 9, 8, 7, 6, 5]]])
def test_cuts_of_a_batch_do_not_change_loss_and_gradient(parameters: Parameters, parts: Cut) -> None:
    whole, expected = gradients(parameters, WHOLE, WEIGHT)
    totals, found = gradients(parameters, parts, WEIGHT)
    assert totals.router_z == pytest.approx(whole.router_z, rel=1e-6)
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, atol=1e-6, rtol=0, msg=name)


def test_its_gradient_is_that_of_a_float64_reference(parameters: Parameters, tmp_path: Path) -> None:
    totals, found = gradients(parameters, WHOLE, WEIGHT)
    _, without = gradients(parameters, WHOLE, 0.0)
    model = float64_model(parameters, tmp_path)
    layers: list[list[Tensor]] = [[] for _ in range(CONFIG["num_hidden_layers"])]
    for sequence in EXPERIENCE.sequences:
        out: Any = model(torch.from_numpy(sequence.token_ids)[None], output_router_logits=True)
        for index, logits in enumerate(out.router_logits):
            layers[index].append(logits[sequence.scored - 1] if index == len(layers) - 1 else logits)
    loss = torch.stack([torch.cat(parts).logsumexp(-1).square().mean() for parts in layers]).mean()
    (WEIGHT * loss).backward()
    assert totals.router_z == pytest.approx(float(loss.detach()), rel=1e-6)
    for name, parameter in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            assert parameter.grad.norm() > 1e-3
            torch.testing.assert_close((found[name] - without[name]).double(), parameter.grad, atol=1e-6, rtol=0)


def test_value_of_equal_logits_is_the_squared_logarithm_of_their_number() -> None:
    squares = torch.tensor([6 * torch.tensor(4.0).log() ** 2])
    assert float(z_loss(squares, torch.full((1, 4), 3.0), 2)) == pytest.approx(float(torch.tensor(4.0).log() ** 2))


def test_unset_weights_do_not_enter_action_keys() -> None:
    assert "router_z" not in RlConfig().model_dump() and "router_z" not in SftConfig().model_dump()
    assert SftConfig(router_z=0.1).model_dump()["router_z"] == 0.1


def test_a_warm_start_takes_its_gradient_too(world: World) -> None:
    plain, weighed = (run_job(world.sft_job(name, max_steps=2, router_z=z)) for name, z in (("a", 0.0), ("b", 1.0)))
    assert plain is not None and weighed is not None
    assert open_artifact(world.store, plain.checkpoint).ref.digest != weighed.checkpoint.digest
