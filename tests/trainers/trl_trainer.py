"""TRL's GRPOTrainer on hosted episodes over the bridge: `python -m tests.trainers.trl_trainer FOLDER`.

In the environment of `make test-peers`; of Triplane it has the bridge's client alone. FOLDER/quickstart.json says where
the first policy is, which tasks there are, and how the bridge is started. Prints a line of JSON with held-out solving
before and after.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

from inference.bridge.client import Bridge
from tests.trainers import hosted
from tests.trainers.hosted import GROUP, ITERATIONS, PROMPTS, RATE, STEPS, Played
from tests.trainers.publishing import PolicyServer


class Rollouts:
    """TRL's `rollout_func`: episodes of the weights that TRL has now."""

    def __init__(self, server: PolicyServer, bridge: Bridge) -> None:
        self._server, self._bridge = server, bridge
        self._step = 0

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        if self._step != trainer.state.global_step:
            self._server.publish(trainer.model)
            self._step = trainer.state.global_step
        # a prompt of the data set is the name of a task; TRL repeats each for its group
        played = self._bridge.run(partial(hosted.play, task_ids=prompts, seed=1 + self._step))
        rows = [_row(each) for each in played]
        return {name: [row[name] for row in rows] for name in rows[0]}


def _row(played: Played) -> dict[str, Any]:
    """An episode as TRL takes it: the environment's tokens are in the completion, masked."""
    ids, logprobs, own = played.tokens()
    return {
        "prompt_ids": played.prompt.tolist(),
        "completion_ids": ids.tolist(),
        "logprobs": logprobs.tolist(),
        "env_mask": own.astype(int).tolist(),
        "said": played.reward,
    }


def rewarded(completions: list[str], said: list[float], **_: Any) -> list[float]:
    """Reward: what the environment said."""
    return said


def main(folder: Path) -> None:
    given = json.loads((folder / "quickstart.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(given["start"], dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(Path(given["start"], "tokenizer.json")))
    tokenizer.pad_token_id = tokenizer.eos_token_id = 0
    config = GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=PROMPTS * GROUP // STEPS,
        steps_per_generation=STEPS,
        num_generations=GROUP,
        max_completion_length=320,
        learning_rate=RATE,
        adam_beta1=0.0,
        lr_scheduler_type="constant",
        weight_decay=0.0,
        beta=0.0,
        epsilon_high=0.28,
        scale_rewards="none",
        max_steps=STEPS * ITERATIONS,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        seed=1,
    )
    with PolicyServer(given["command"], given["environment"], folder) as server:
        server.publish(model)
        with Bridge(server.address) as bridge:
            before = bridge.run(partial(hosted.solving, task_ids=given["held_out"], seed=0))
            trainer = GRPOTrainer(
                model=model,
                args=config,
                processing_class=tokenizer,
                train_dataset=Dataset.from_list([{"prompt": each} for each in given["train"]]),
                reward_funcs=rewarded,
                rollout_func=Rollouts(server, bridge),
            )
            trainer.train()
            server.publish(trainer.model)
            after = bridge.run(partial(hosted.solving, task_ids=given["held_out"], seed=1_000))
            print(json.dumps({"before": before, "after": after}), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
