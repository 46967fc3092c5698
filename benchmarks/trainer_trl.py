"""TRL's side of the `trainer` benchmark: GRPOTrainer on the same weights and sequences, one iteration for each line.

`python -P trainer_trl.py FOLDER THREADS ROWS`, in the environment of `make test-peers`; ROWS is the number of sequences
of a forward pass. Imports nothing of Triplane. `rollout_func`, TRL's own hook for generation, hands out the recorded
completions and holds the clock, so that generation takes no time:

    rollout_func returns -> old log probabilities -> (loss, backward, clipping, AdamW) x steps -> rollout_func is called
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch


class Turns:
    """The clock, and TRL's `rollout_func`."""

    def __init__(self, case: dict[str, Any]) -> None:
        self._case, self._since, self._cpu = case, 0.0, 0.0
        self.seconds: dict[str, float] = {}
        self.logprob_error = 0.0

    def rollout(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        """Answer the line that ended, wait for the next one, and hand out the completions."""
        if self._since:
            answer = {
                "seconds": time.perf_counter() - self._since,
                "cpu_seconds": time.process_time() - self._cpu,
                "parts": self.seconds,
                "logprob_error": self.logprob_error,
            }
        else:
            answer = {"ready": True}
        print(json.dumps(answer), file=sys.__stdout__, flush=True)
        if not sys.stdin.readline():
            raise SystemExit(0)
        self.seconds = {}
        case = self._case
        assert len(prompts) == len(case["prompts"]), f"TRL asks for {len(prompts)} completions"
        copied = {name: [list(row) for row in case[name]] for name in ("prompts", "completions", "masks")}
        logprobs = [[0.0] * len(row) for row in case["completions"]]
        self._since, self._cpu = time.perf_counter(), time.process_time()
        return {
            "prompt_ids": copied["prompts"],
            "completion_ids": copied["completions"],
            "env_mask": copied["masks"],
            "logprobs": logprobs,
        }

    def measure(self, owner: Any, name: str, part: str) -> None:
        """Add the seconds of a method to a part."""
        function = getattr(owner, name)

        @functools.wraps(function)
        def measured(*arguments: Any, **named: Any) -> Any:
            begin = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin

        setattr(owner, name, measured)

    def measure_scoring(self, owner: Any) -> None:
        """Measure the pass without gradient that scores the iteration, and compare its result with the case's."""
        function = owner._get_per_token_logps_and_entropies

        @functools.wraps(function)
        def scored(*arguments: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                return function(*arguments, **named)
            begin = time.perf_counter()
            found = function(*arguments, **named)
            self.seconds["scoring"] = self.seconds.get("scoring", 0.0) + time.perf_counter() - begin
            if not self.logprob_error:
                self.logprob_error = self._difference(found[0])
            return found

        owner._get_per_token_logps_and_entropies = scored

    def _difference(self, logprobs: torch.Tensor) -> float:
        """Largest difference of a policy token's log probability. logprobs: [rows, longest completion]."""
        found = 0.0
        for row, mask, own in zip(logprobs, self._case["masks"], self._case["logprobs"], strict=True):
            kept = row[: len(mask)][torch.tensor(mask, dtype=torch.bool)]
            found = max(found, float((kept.cpu() - torch.tensor(own)).abs().max()))
        return found


def main() -> None:
    """Train until the input ends."""
    folder, threads, rows = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(threads)
    keep_freed_memory()
    turns = Turns(json.loads((folder / "case.json").read_text()))
    with contextlib.redirect_stdout(sys.stderr):
        make_trainer(turns, folder, rows).train()


def keep_freed_memory() -> None:
    """Let glibc reuse large blocks, as Triplane's trainer does: it helps both."""
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for option in (-1, -3):
            library.mallopt(option, 1 << 30)


def make_trainer(turns: Turns, folder: Path, rows: int) -> Any:
    """A GRPOTrainer with the case's settings: the same loss, steps, clipping and optimizer."""
    # by name, since type checking runs where they are not installed
    names = ("accelerate", "accelerate.optimizer", "datasets", "transformers", "trl")
    accelerate, optimizer, datasets, transformers, trl = (cast(Any, importlib.import_module(name)) for name in names)
    case = turns._case
    count, steps = len(case["prompts"]), case["optimizer_steps"]
    micro = count // steps // rows
    if micro * rows * steps != count:
        raise SystemExit(f"{rows} rows a forward pass do not divide {count} rows in {steps} steps: choose a divisor")
    config = trl.GRPOConfig(
        output_dir=str(folder / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=rows,
        gradient_accumulation_steps=micro,
        steps_per_generation=micro * steps,
        num_generations=case["group_size"],
        max_completion_length=max(map(len, case["completions"])),
        learning_rate=case["learning_rate"],
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        weight_decay=0.0,
        max_grad_norm=1.0,
        loss_type="dapo",
        scale_rewards="none",
        epsilon=0.2,
        epsilon_high=0.28,
        delta=3.0,
        beta=0.0,
        router_aux_loss_coef=0.0,
        shuffle_dataset=False,
        max_steps=1_000_000,
        logging_strategy="no",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    trainer = trl.GRPOTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.float32),
        args=config,
        processing_class=tokenizer(),
        train_dataset=datasets.Dataset.from_list([{"prompt": "a"}] * (count // case["group_size"])),
        reward_funcs=rewards_of(case["rewards"]),
        rollout_func=turns.rollout,
    )
    turns.measure_scoring(trainer)
    turns.measure(trainer, "compute_loss", "forward and loss")
    turns.measure(accelerate.Accelerator, "backward", "backward")
    turns.measure(accelerate.Accelerator, "clip_grad_norm_", "optimizer")
    turns.measure(optimizer.AcceleratedOptimizer, "step", "optimizer")
    return trainer


def rewards_of(rewards: list[float]) -> Callable[..., list[float]]:
    """A reward function with the case's rewards."""

    def recorded(completions: list[str], **_: Any) -> list[float]:
        return list(rewards)

    return recorded


def tokenizer() -> Any:
    """A tokenizer that TRL asks for; no text matters."""
    from tokenizers import Tokenizer, models

    make: Any = importlib.import_module("transformers").PreTrainedTokenizerFast

    found = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2}, unk_token="a"))
    return make(tokenizer_object=found, pad_token="<pad>", eos_token="<eos>")


if __name__ == "__main__":
    main()
