"""Training jobs: shape of the model, recipe, and the artifacts to read. Importing this needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from contracts.artifacts import ArtifactRef, Frozen
from contracts.checkpoints import BLOCK, quantization_config, ragged_sides
from trainer.algorithms import Algorithm
from trainer.algorithms.corrections import Corrections
from trainer.algorithms.grpo import Grpo
from trainer.errors import TrainingConfigError
from trainer.settings import Settings

SFT_VERSION = "4"
"""Code version of supervised training: bump when the same job would give another checkpoint."""
RL_VERSION = "4"
"""Code version of policy-gradient training: bump when the same job would give another checkpoint."""
IMPORT_VERSION = "1"
"""Code version of `trainer.import_hf`."""

SNAPSHOT, SNAPSHOT_JOB = "trainer_snapshot", "job"
"""Kind of the snapshot markers that a job resumes from, and the manifest config field with the job's key."""


class ModelConfig(Settings):
    """Shape of a Qwen3-MoE decoder."""

    hidden_size: int = Field(default=128, ge=8)
    """Width of the residual stream. A multiple of 128, the FP8 block, as are expert_width, heads * head_dim and
    kv_heads * head_dim.
    """
    layers: int = Field(default=3, ge=1)
    """Decoder layers."""
    experts: int = Field(default=8, ge=1)
    """Experts per layer."""
    expert_width: int = Field(default=128, ge=8)
    """Inner width of one expert."""
    experts_per_token: int = Field(default=2, ge=1)
    """Experts that the router selects per token."""
    heads: int = Field(default=4, ge=1)
    """Query heads."""
    kv_heads: int = Field(default=4, ge=1)
    """Key and value heads; divides `heads`."""
    head_dim: int = Field(default=32, ge=2, multiple_of=2)
    """Width of one head."""
    max_positions: int = Field(default=512, ge=8)
    """Longest context, in tokens."""
    rope_theta: float = Field(default=10_000.0, gt=0)
    """Base of the rotary position frequencies."""
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    """Epsilon added to the mean square before the root."""
    tie_word_embeddings: bool = True
    """Whether the output head is the embedding matrix."""
    initializer_range: float = Field(default=0.02, gt=0)
    """Standard deviation of freshly drawn weights."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.experts_per_token > self.experts:
            raise ValueError(f"experts_per_token {self.experts_per_token} exceeds experts {self.experts}: lower it")
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}: choose a divisor")
        names = {
            "hidden_size": "hidden_size",
            "moe_intermediate_size": "expert_width",
            "num_attention_heads * head_dim": "heads * head_dim",
            "num_key_value_heads * head_dim": "kv_heads * head_dim",
        }
        for name, size in ragged_sides(self._sizes()).items():
            raise ValueError(
                f"{names[name]} = {size} is not a multiple of {BLOCK}, the FP8 block that other loaders of the"
                f" checkpoint expect: make it {-(-size // BLOCK) * BLOCK}"
            )
        return self

    def _sizes(self) -> dict[str, int]:
        return {
            "hidden_size": self.hidden_size,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "moe_intermediate_size": self.expert_width,
        }

    def hf_config(self, vocab_size: int, end_of_turn: int | None = None) -> dict[str, Any]:
        """The `config.json` of a Qwen3MoeForCausalLM checkpoint of this shape, FP8 blocks declared."""
        config: dict[str, Any] = {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "vocab_size": vocab_size,
            **self._sizes(),
            "num_hidden_layers": self.layers,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "intermediate_size": self.expert_width,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_norm_eps,
            "tie_word_embeddings": self.tie_word_embeddings,
            "initializer_range": self.initializer_range,
            "router_aux_loss_coef": 0.0,
            "use_cache": True,
            "torch_dtype": "float32",
        }
        if end_of_turn is not None:
            config["eos_token_id"] = end_of_turn
        config["quantization_config"] = quantization_config(config)
        return config


class SftConfig(Settings):
    """Supervised warm start. It stops by a criterion, not by time; see `expected_solve`."""

    learning_rate: float = Field(default=3e-3, ge=0)
    """Learning rate of Muon, for the quantized matrices."""
    adamw_learning_rate: float = Field(default=3e-3, ge=0)
    """Learning rate of AdamW, for embeddings, norms and routers."""
    batch_size: int = Field(default=16, ge=1)
    """Demonstrations per step."""
    warmup_steps: int = Field(default=50, ge=0)
    """Steps over which the learning rates rise linearly."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger global norm are scaled down to this norm."""
    router_balance: float = Field(default=0.0, ge=0)
    """Weight of the load-balance loss of the routers, over the tokens of one step."""
    max_steps: int = Field(default=4000, ge=1)
    """Maximum number of steps. The metrics show if training reached it before the criterion."""
    evaluate_every: int = Field(default=50, ge=1)
    """Steps between evaluations on the validation demonstrations."""
    probe_episodes: int = Field(default=128, ge=1)
    """Clean validation demonstrations per evaluation while the criterion is still far."""
    evaluation_episodes: int = Field(default=640, ge=1)
    """Clean validation demonstrations of an evaluation that may stop training."""
    expected_solve: float = Field(default=0.20, gt=0, le=1)
    """Stopping criterion: minimum mean probability that a sampled episode equals the clean expert's: mean of
    exp(sum of log p over policy tokens).
    """
    expected_form: float = Field(default=0.9, gt=0, le=1)
    """Stopping criterion: minimum mean probability of the episode's first turn. Demonstrations that vary it (parallel
    calls) limit the reachable value.
    """
    consecutive: int = Field(default=2, ge=1)
    """Consecutive evaluations that must meet both criteria."""
    decay_steps: int = Field(default=100, ge=0)
    """Number of steps, after both criteria are met, over which the learning rates fall linearly to 0. At a constant
    rate the last batches decide which of two close answers is likelier.
    """
    snapshot_every: int = Field(default=200, ge=1)
    """Steps between snapshots from which a killed job resumes, with the same result bit for bit."""


class RlConfig(Settings):
    """One iteration of policy-gradient training."""

    algorithm: Algorithm = Grpo()
    """The policy-gradient algorithm. Its kind's defaults are those of its paper."""
    corrections: Corrections = Corrections()
    """Corrections for the difference between sampler and trainer."""
    learning_rate: float = Field(default=5e-4, ge=0)
    """Learning rate of AdamW, for all weights. 0 changes no code and no scale."""
    optimizer_steps: int = Field(default=8, ge=1)
    """Number of minibatches that the iteration's groups are split into."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's decay of the first moment."""
    beta2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's decay of the second moment."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay."""
    temperature: float = Field(default=1.0, gt=0)
    """Sampling temperature of the rollouts, which divides the logits. Must equal rollouts.temperature."""
    max_gradient_norm: float = Field(default=1.0, gt=0)
    """Gradients with a larger global norm are scaled down to this norm."""
    router_balance: float = Field(default=0.0, ge=0)
    """Weight of the routers' load-balance loss, over all tokens of one optimizer step. Above 0 an additional forward
    pass first counts the tokens of each expert.
    """
    routing_replay: bool = False
    """Whether training sends each token to the experts that the sampler chose, in all forward and backward passes
    (arXiv:2510.11370). Needs rollouts.record_routing.
    """
    microbatch_tokens: int = Field(default=4096, ge=64)
    """Maximum tokens of a forward pass.

    Limits memory use; the gradient is that of the whole minibatch.
    """
    permute_rewards: bool = False
    """Control experiment: permute rewards within each group by the seed, so that nothing can be learned from them."""

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the fields. `routing_replay` is left out if false, so that action keys stay as they are without it."""
        values: dict[str, Any] = dump(self)
        if not self.routing_replay:
            values.pop("routing_replay", None)
        return values

    @field_validator("algorithm", mode="before")
    @classmethod
    def _usual_kind(cls, value: Any) -> Any:
        return {"kind": "grpo", **value} if isinstance(value, dict) else value


class _Job(Frozen):
    store: str
    """Store URL for `contracts.store.open_store`."""
    key: str
    """Action key of the checkpoint and of the trainer state."""
    seed: int
    """Seed of initialization and data order."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank. The count changes the resulting bits."""
    ranks: int = Field(default=1, ge=1, le=1024)
    """Processes that share every batch. The count changes the resulting bits."""
    rank_timeout_s: float = Field(default=45.0, gt=0)
    """Longest time that a rank waits for another one, which may be writing a snapshot, in seconds."""

    @property
    def numerics(self) -> dict[str, str | int]:
        """Settings, beyond inputs, configuration and torch, that affect the resulting bits; part of the manifest."""
        return {"backend": "torch", "device": "cpu", "threads": self.threads, "ranks": self.ranks}


class SftJob(_Job):
    """Train a fresh model on demonstrations."""

    kind: Literal["sft"] = "sft"
    tokenizer: ArtifactRef
    demonstrations: ArtifactRef
    model: ModelConfig = ModelConfig()
    config: SftConfig = SftConfig()


class RlJob(_Job):
    """Train a checkpoint on one iteration's dataset."""

    kind: Literal["rl"] = "rl"
    dataset: ArtifactRef
    checkpoint: ArtifactRef
    trainer_state: ArtifactRef
    config: RlConfig = RlConfig()


Job = Annotated[SftJob | RlJob, Field(discriminator="kind")]
_JOB: TypeAdapter[SftJob | RlJob] = TypeAdapter(Job)


def parse_job(text: str) -> SftJob | RlJob:
    """Parse a job from JSON or YAML text. Raises TrainingConfigError with field, value and fix."""
    try:
        return _JOB.validate_python(yaml.safe_load(text))
    except yaml.YAMLError as error:
        raise TrainingConfigError(
            f"the job is neither JSON nor YAML ({str(error).splitlines()[0]}): correct it"
        ) from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "job"
        raise TrainingConfigError(f"job field {where}: {first['msg']} (got {first.get('input')!r:.80})") from None


def read_job(source: str) -> SftJob | RlJob:
    """Read a job from inline JSON or from the file `source`. Raises TrainingConfigError."""
    if source.lstrip().startswith("{"):
        return parse_job(source)
    path = Path(source)
    if not path.is_file():
        raise TrainingConfigError(f"job file {source} does not exist: pass a JSON or YAML file, or inline JSON")
    return parse_job(path.read_text())
