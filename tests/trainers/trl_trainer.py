"""TRL's GRPOTrainer on episodes over the bridge: `python -m tests.trainers.trl_trainer FOLDER PYTHON STEPS SEED`.

In the environment of `make test-peers`; of Triplane it has the bridge's client alone. FOLDER/start is the first policy,
PYTHON that of the policy server. Prints a line of JSON with held-out solving before and after.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM
from trl import GRPOConfig, GRPOTrainer

from inference.bridge.client import Bridge
from tests.trainers import guessing
from tests.trainers.guessing import Played, Task
from tests.trainers.publishing import PolicyServer

GROUP = 16
_PROMPTS = 32
"""Prompts of one step."""


class Rollouts:
    """TRL's `rollout_func`: episodes of the weights that TRL has now."""

    def __init__(self, server: PolicyServer, bridge: Bridge, seed: int) -> None:
        self._server, self._bridge, self._seed = server, bridge, seed
        self._step = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        if self._step != trainer.state.global_step:
            self._server.publish(trainer.model)
            self._step = trainer.state.global_step
        # TRL repeats each prompt for its group
        wanted = [task_of(prompt) for prompt in prompts]
        seed = self._seed + 1 + self._step
        played = self._bridge.run(lambda client: guessing.play(client, wanted, seed))
        rows = [_row(each) for each in played]
        return {name: [row[name] for row in rows] for name in rows[0]}


def task_of(prompt: str) -> Task:
    """The task that a prompt of the data set names."""
    return Task(*map(int, prompt.split()))


def _row(played: Played) -> dict[str, Any]:
    """An episode as TRL takes it: the environment's tokens are in the completion, masked."""
    ids: list[int] = []
    logprobs: list[float] = []
    mask: list[int] = []
    for turn in played.turns:
        seen, made = turn.observation_ids.tolist(), turn.token_ids.tolist()
        ids += seen + made
        logprobs += [0.0] * len(seen) + turn.logprobs.tolist()
        mask += [0] * len(seen) + [1] * len(made)
    return {
        "prompt_ids": played.task.prompt,
        "completion_ids": ids,
        "logprobs": logprobs,
        "env_mask": mask,
        "solved": float(played.solved),
    }


def solved(completions: list[str], solved: list[float], **_: Any) -> list[float]:
    """Reward: what the environment said."""
    return solved


def main(folder: Path, python: str, steps: int, seed: int) -> None:
    torch.set_num_threads(1)
    model = Qwen3ForCausalLM.from_pretrained(folder / "start", dtype=torch.float32)
    words = {str(token): token for token in range(guessing.VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="0")), pad_token="0", eos_token="1"
    )
    training = guessing.tasks(_PROMPTS * steps, seed)
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=_PROMPTS * GROUP,
        num_generations=GROUP,
        max_completion_length=2 * guessing.GUESSES,
        num_iterations=4,
        learning_rate=2e-3,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        beta=0.0,
        shuffle_dataset=False,
        max_steps=steps,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=seed,
    )
    held_out = guessing.tasks(100, seed, held_out=True)
    with PolicyServer(python, folder) as server:
        server.publish(model)
        with Bridge(server.address) as bridge:

            def solving() -> float:
                played = bridge.run(lambda client: guessing.play(client, held_out, seed, group=4))
                return 100 * sum(each.solved for each in played) / len(played)

            before = solving()
            rows = [{"prompt": f"{task.low} {task.salt} {task.number}"} for task in training]
            trainer = GRPOTrainer(
                model=model,
                args=config,
                processing_class=tokenizer,
                train_dataset=Dataset.from_list(rows),
                reward_funcs=solved,
                rollout_func=Rollouts(server, bridge, seed),
            )
            trainer.train()
            server.publish(trainer.model)
            print(json.dumps({"before": before, "after": solving()}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
