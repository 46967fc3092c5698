"""The sampler's, the trainer's and transformers' view of one exported checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from contracts.checkpoints import check_checkpoint, is_quantized
from contracts.episodes import TokenRole, read_episodes
from inference.engines.builtin import BuiltinEngine
from tests.acceptance.laboratory import Laboratory
from tests.acceptance.trainer_scores import trainer_scores

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
EXPERT = "model.layers.1.mlp.experts.0.down_proj.weight"


def recorded(laboratory: Laboratory) -> list[tuple[list[int], list[float | None]]]:
    """Tokens and logprobs of the last iteration's first episodes."""
    rollouts = laboratory.artifact("rollouts", "0004")
    episodes = read_episodes(rollouts.table("episodes.parquet"), rollouts.table("sequences.parquet"))[:64]
    return [(sequence.token_ids, sequence.logprobs) for episode in episodes for sequence in episode.sequences]


def acting(laboratory: Laboratory) -> Path:
    """The checkpoint that acted in the last iteration."""
    from contracts.artifacts import open_artifact

    return open_artifact(
        laboratory.store, laboratory.artifact("rollouts", "0004").manifest.parents["policy"]
    ).directory()


def engine_scores(directory: Path, sequences: list[list[int]]) -> list[torch.Tensor]:
    async def score() -> list[list[float]]:
        engine = BuiltinEngine(directory, "v")
        try:
            return await asyncio.gather(*(engine.score(tokens) for tokens in sequences))
        finally:
            await engine.close()

    return [torch.tensor(scores) for scores in asyncio.run(score())]


def test_sampled_logprobs_equal_the_trainers(learned: Laboratory) -> None:
    rows = recorded(learned)
    scores = trainer_scores(acting(learned), [tokens for tokens, _ in rows])
    gaps = [
        abs(logprob - float(score))
        for (_, logprobs), found in zip(rows, scores, strict=True)
        for logprob, score in zip(logprobs, found, strict=True)
        if logprob is not None
    ]
    assert len(gaps) > 500
    assert max(gaps) < 1e-4


def test_one_changed_code_moves_both_sides_equally(learned: Laboratory, tmp_path: Path) -> None:
    before = acting(learned)
    after = Path(shutil.copytree(before, tmp_path / "changed"))
    tensors = load_file(str(after / "model.safetensors"))
    codes = tensors[EXPERT].view(torch.uint8).clone()
    largest = int(tensors[EXPERT].float().abs().argmax())
    codes.view(-1)[largest] ^= 0x80
    (after / "model.safetensors").unlink()
    save_file(
        {**tensors, EXPERT: codes.view(torch.float8_e4m3fn)},
        str(after / "model.safetensors"),
        metadata={"format": "pt"},
    )
    sequences = [tokens for tokens, _ in recorded(learned)]
    moved = {
        side: torch.cat(
            [new - old for new, old in zip(scores(after, sequences), scores(before, sequences), strict=True)]
        )
        for side, scores in {"engine": engine_scores, "trainer": trainer_scores}.items()
    }
    assert moved["engine"].abs().max() > 1e-3, "the change is visible"
    assert (moved["engine"] - moved["trainer"]).abs().max() < 1e-4


def test_dequantized_checkpoint_gives_transformers_the_same_logprobs(learned: Laboratory) -> None:
    directory = learned.artifact("checkpoint", "0004").directory()
    check_checkpoint(directory)
    tensors = load_file(str(directory / "model.safetensors"))
    plain = {}
    for name, tensor in tensors.items():
        if is_quantized(name):
            scale = tensors[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            plain[name] = tensor.float() * scale[: tensor.shape[0], : tensor.shape[1]]
        elif not name.endswith("_scale_inv"):
            plain[name] = tensor
    config = json.loads((directory / "config.json").read_text())
    config.pop("quantization_config")
    plain_directory = directory.parent.parent / "plain"
    plain_directory.mkdir(exist_ok=True)
    save_file(plain, str(plain_directory / "model.safetensors"), metadata={"format": "pt"})
    (plain_directory / "config.json").write_text(json.dumps(config))
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM  # takes seconds

    reference = Qwen3MoeForCausalLM.from_pretrained(
        plain_directory, dtype=torch.float32, config=Qwen3MoeConfig(**config)
    ).eval()
    shutil.rmtree(plain_directory)
    sequences = [tokens for tokens, _ in recorded(learned)][:8]
    for tokens, ours, trained in zip(
        sequences, engine_scores(directory, sequences), trainer_scores(directory, sequences), strict=True
    ):
        with torch.no_grad():
            logprobs = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
        expected = logprobs[:-1].gather(1, torch.tensor(tokens[1:])[:, None])[:, 0]
        assert torch.allclose(ours[1:], expected, atol=1e-4)
        assert torch.allclose(trained[1:], expected, atol=1e-4)


def test_only_policy_tokens_carry_logprobs(learned: Laboratory) -> None:
    rollouts = learned.artifact("rollouts", "0002")
    for episode in read_episodes(rollouts.table("episodes.parquet"), rollouts.table("sequences.parquet")):
        for sequence in episode.sequences:
            assert [logprob is not None for logprob in sequence.logprobs] == [
                role == TokenRole.POLICY for role in sequence.token_role
            ]
