"""Losses and gradients equal those of TRL on the same batch. Runs in an environment of its own: `make test-peers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor

from trainer.algorithms import Algorithm
from trainer.algorithms.base import Tokens
from trainer.algorithms.corrections import Corrections
from trainer.losses import policy_loss

pytestmark = pytest.mark.peers

LENGTHS, LONGEST = (5, 1, 7, 3), 7
ROWS = len(LENGTHS)
MASK = (torch.arange(LONGEST)[None] < torch.tensor(LENGTHS)[:, None]).int()
GRPO: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({"kind": "grpo"}, {"loss_type": "grpo"}),
    "grpo with KL": (
        {"kind": "grpo", "kl_coefficient": 0.04},
        {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": False},
    ),
    "grpo with dual clip": ({"kind": "grpo", "dual_clip": 1.5}, {"loss_type": "grpo", "delta": 1.5}),
    "dr_grpo": (
        {"kind": "dr_grpo", "aggregation_length": LONGEST},
        {"loss_type": "dr_grpo", "max_completion_length": LONGEST},
    ),
    "dapo": ({"kind": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
    "gspo": (
        {"kind": "gspo", "clip_low": 0.1, "clip_high": 0.2},
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.1, "epsilon_high": 0.2},
    ),
    "cispo": ({"kind": "cispo", "clip_high": 0.3}, {"loss_type": "cispo", "epsilon_high": 1.3}),
}


def numbers() -> tuple[Tensor, Tensor, Tensor]:
    """Log probabilities now and before, float64 [rows, LONGEST], and advantages [rows]."""
    draw = torch.Generator().manual_seed(0)
    old = -torch.rand(ROWS, LONGEST, generator=draw, dtype=torch.float64) - 0.2
    new = old + 0.4 * torch.randn(ROWS, LONGEST, generator=draw, dtype=torch.float64)
    return new, old, torch.tensor([1.0, -0.7, -1.3, 0.6], dtype=torch.float64)


def ours(settings: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Loss of one optimizer step, and its gradient by each log probability."""
    algorithm: Any = TypeAdapter(Algorithm).validate_python(settings)
    new, old, advantages = numbers()
    new.requires_grad_()
    kept, owners = MASK.bool(), torch.arange(ROWS)[:, None].expand(ROWS, LONGEST)[MASK.bool()]
    lengths = torch.tensor(LENGTHS, dtype=torch.float64)
    tokens = Tokens(new[kept], old[kept], old[kept], advantages[owners], owners, lengths)
    loss = policy_loss(algorithm, Corrections(importance_cap=None), tokens).loss
    loss = loss / algorithm.divisor(sum(LENGTHS), ROWS, LONGEST)
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad


def parts(folder: Path) -> dict[str, Any]:
    """A tiny model, tokenizer and data for a trainer of TRL, whose own forward pass is not used."""
    from datasets import Dataset
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    words = {"<pad>": 0, "<eos>": 1, "a": 2}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="a")), pad_token="<pad>", eos_token="<eos>"
    )
    shape = {"num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=3, hidden_size=8, **shape))
    return {
        "model": model,
        "processing_class": tokenizer,
        "train_dataset": Dataset.from_list([{"prompt": "a"}] * ROWS),
        "reward_funcs": lambda completions, **_: [0.0] * len(completions),
    }


def theirs(trainer: Any, inputs: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """TRL's `_compute_loss` for log probabilities that stand in for those of its forward pass."""
    new, _, advantages = numbers()
    new.requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (new, torch.zeros_like(new), None)
    trainer.model.train()
    trainer.current_gradient_accumulation_steps = 1
    ids = torch.full((ROWS, LONGEST), 2)
    shared = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": torch.ones(ROWS, 1, dtype=torch.int),
        "completion_ids": ids,
        "completion_mask": MASK,
        "advantages": advantages,
        "num_items_in_batch": MASK.sum(),
    }
    loss = trainer._compute_loss(trainer.model, shared | inputs)
    loss.backward()
    assert new.grad is not None
    return loss.detach(), new.grad


def common(folder: Path) -> dict[str, Any]:
    """Settings of every trainer: one process on the CPU, one microbatch a step."""
    return {
        "output_dir": str(folder),
        "use_cpu": True,
        "bf16": False,
        "report_to": [],
        "per_device_train_batch_size": ROWS,
        "gradient_accumulation_steps": 1,
        "num_generations": ROWS,
    }


@pytest.mark.parametrize("name", GRPO)
def test_losses_of_the_group_equal_those_of_grpo_trainer(name: str, tmp_path: Path) -> None:
    from trl import GRPOConfig, GRPOTrainer

    settings, options = GRPO[name]
    options, beta = {name: value for name, value in options.items() if name != "beta"}, options.get("beta", 0.0)
    trainer = GRPOTrainer(args=GRPOConfig(**common(tmp_path), **options), **parts(tmp_path))
    trainer.beta = beta  # given to the constructor, it would load a reference model by name
    old = numbers()[1]
    loss, gradient = theirs(trainer, {"old_per_token_logps": old, "ref_per_token_logps": old})
    own_loss, own_gradient = ours(settings)
    torch.testing.assert_close(own_loss, loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(own_gradient, gradient, rtol=0, atol=1e-6)
    assert bool(own_gradient.any())


def test_the_loss_of_rloo_equals_that_of_rloo_trainer(tmp_path: Path) -> None:
    from trl import RLOOConfig, RLOOTrainer

    trainer = RLOOTrainer(args=RLOOConfig(**common(tmp_path), epsilon=0.5, beta=0.0), **parts(tmp_path))
    old = (numbers()[1] * MASK).sum(1)
    loss, gradient = theirs(trainer, {"old_logps": old})
    own_loss, own_gradient = ours({"kind": "rloo", "clip_low": 0.5, "clip_high": 0.5})
    torch.testing.assert_close(own_loss, loss, rtol=0, atol=1e-6)
    torch.testing.assert_close(own_gradient, gradient, rtol=0, atol=1e-6)
    assert bool(own_gradient.any())
