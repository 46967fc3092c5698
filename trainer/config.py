"""Training jobs: shape of the model, recipe, and the artifacts to read. Importing this needs no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_serializer,
    model_validator,
)

from contracts.adapters import TARGETS, Adapter, Target
from contracts.artifacts import ArtifactRef, Frozen
from contracts.yaml_text import load_yaml
from trainer.algorithms import Algorithm
from trainer.algorithms.corrections import Corrections
from trainer.algorithms.grpo import Grpo
from trainer.errors import TrainingConfigError
from trainer.model_config import ModelConfig
from trainer.precision import DEFAULT, Precision
from trainer.schedule import Schedule
from trainer.settings import Settings
from trainer.truncation import Truncation

SFT_VERSION = "5"
"""Code version of supervised training: bump when the same job would give another checkpoint."""
RL_VERSION = "4"
"""Code version of policy-gradient training: bump when the same job would give another checkpoint."""
IMPORT_VERSION = "1"
"""Code version of `trainer.import_hf`."""

SNAPSHOT, SNAPSHOT_JOB = "trainer_snapshot", "job"
"""Kind of the snapshot markers that a job resumes from, and the manifest config field with the job's key."""


TrainedRole = Literal["policy", "environment", "prompt", "forced"]
"""Lower-case names of `contracts.episodes.TokenRole`."""


class LoraConfig(Settings):
    """Low-rank adapters (arXiv:2106.09685) that are trained in place of the weights."""

    rank: int = Field(default=16, ge=1)
    """Rank of each adapter."""
    alpha: float = Field(default=32.0, gt=0)
    """alpha / rank multiplies the product of an adapter's factors."""
    targets: tuple[Target, ...] = Field(default=("q_proj", "k_proj", "v_proj", "o_proj"), min_length=1)
    """Projections that get an adapter, in every layer; gate_proj, up_proj and down_proj also in every expert. All other
    weights stay as they are.
    """
    dropout: Literal["none"] = "none"
    """Dropout of the adapters' input. There is none, so that what trained is what serves."""

    @property
    def adapter(self) -> Adapter:
        """The same numbers, targets in a fixed order."""
        return Adapter(self.rank, self.alpha, tuple(target for target in TARGETS if target in self.targets))


class _Growing(Settings):
    """Settings with fields that older action keys lack: they are left out of a dump while they have their default."""

    LATER: ClassVar[tuple[str, ...]] = ()

    @model_serializer(mode="wrap")
    def _leave_out_unset(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        values: dict[str, Any] = dump(self)
        for name in self.LATER:
            if getattr(self, name) == type(self).model_fields[name].default:
                values.pop(name, None)
        return values


def _refuse_without_schedule(schedule: str, **given: float | None) -> None:
    """Raise ValueError for a setting of falling schedules that a constant one ignores."""
    for name, value in given.items():
        if schedule == "constant" and value:
            raise ValueError(f"{name}={value} has no effect with schedule constant: set schedule, or leave it out")


class SftConfig(_Growing):
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
    router_z: float = Field(default=0.0, ge=0)
    """Weight of the routers' z loss (arXiv:2202.08906), over the tokens of one step. It keeps router logits small."""
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
    exp(sum of log p over policy tokens). 1 turns the criterion off.
    """
    expected_form: float = Field(default=0.9, gt=0, le=1)
    """Stopping criterion: minimum mean probability of the episode's first turn. Demonstrations that vary it (parallel
    calls) limit the reachable value.
    """
    consecutive: int = Field(default=2, ge=1)
    """Consecutive evaluations that must meet both criteria."""
    average_steps: int = Field(default=100, ge=0)
    """Number of steps, after both criteria are met, whose mean weights are published. In the weights of a single step
    the last batches decide which of two close answers is likelier.
    """
    snapshot_every: int = Field(default=200, ge=1)
    """Steps between snapshots from which a killed job resumes, with the same result bit for bit."""
    schedule: Schedule = "constant"
    """Course of both learning rates after the warmup; a falling one ends at `max_steps`."""
    final_rate: float = Field(default=0.0, ge=0, le=1)
    """Part of the learning rates that a falling schedule leaves."""
    batch_tokens: int | None = Field(default=None, ge=1)
    """Maximum tokens per step, instead of `batch_size` demonstrations."""
    microbatch_tokens: int | None = Field(default=None, ge=64)
    """Maximum tokens of a forward pass; None: all of a step. Limits memory use; the gradient is that of the step."""
    truncation: Truncation = "error"
    """Rule for demonstrations longer than the model's context: error refuses them, drop leaves them out, left and right
    cut tokens at the begin or at the end, last_turns keeps the prompt and the last turns that fit.
    """
    trained_roles: tuple[TrainedRole, ...] = Field(default=("policy",), min_length=1)
    """Roles of the tokens that are learned: policy, environment, prompt, forced (by a grammar). Validation scores the
    policy's tokens, or these if no clean demonstration has any of the policy.
    """

    LATER = (
        "router_z",
        "schedule",
        "final_rate",
        "batch_tokens",
        "microbatch_tokens",
        "truncation",
        "trained_roles",
    )

    @model_validator(mode="after")
    def _schedule_falls(self) -> Self:
        _refuse_without_schedule(self.schedule, final_rate=self.final_rate)
        return self

    def of_experts(self) -> dict[str, object]:
        """Settings that only a mixture of experts has, by name."""
        return {"router_balance": self.router_balance, "router_z": self.router_z}

    @property
    def routing_losses(self) -> bool:
        """Whether the routers have a loss of their own."""
        return self.router_balance > 0 or self.router_z > 0


class RlConfig(_Growing):
    """One iteration of policy-gradient training."""

    algorithm: Algorithm = Grpo()
    """The policy-gradient algorithm. Its kind's defaults are those of its paper."""
    corrections: Corrections = Corrections()
    """Corrections for the difference between sampler and trainer."""
    learning_rate: float = Field(default=5e-4, ge=0)
    """Learning rate of AdamW, for all weights. 0 changes no code and no scale, except those of an FP8 original, which
    the first step quantizes again (docs/models.md).
    """
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
    router_z: float = Field(default=0.0, ge=0)
    """Weight of the routers' z loss (arXiv:2202.08906), over all tokens of one optimizer step, as `router_balance`. It
    keeps router logits small.
    """
    routing_replay: bool = False
    """Whether training sends each token to the experts that the sampler chose, in all forward and backward passes
    (arXiv:2510.11370). Needs rollouts.record_routing.
    """
    microbatch_tokens: int = Field(default=4096, ge=64)
    """Maximum tokens of a forward pass.

    Limits memory use; the gradient is that of the whole minibatch.
    """
    precision: Precision = DEFAULT
    """Recipe by which the policy trains and is served: rounding of weights, activations, output head and router. The
    base policy is made by it too.
    """
    permute_rewards: bool = False
    """Control experiment: permute rewards within each group by the seed, so that nothing can be learned from them."""
    snapshot_every: int = Field(default=8, ge=1)
    """Minibatches between snapshots from which a killed job resumes, with the same result bit for bit. None is written
    after the last one, so that iterations of up to 8 optimizer steps write none by default.
    """
    schedule: Schedule = "constant"
    """Course of the learning rate after the warmup, over the optimizer steps of all iterations."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps, of all iterations, over which the learning rate rises linearly."""
    schedule_steps: int | None = Field(default=None, ge=1)
    """Optimizer steps, of all iterations, after which the rate is `learning_rate * final_rate`; above `warmup_steps`.
    Needed unless `schedule` is constant, and refused if it is.
    """
    final_rate: float = Field(default=0.0, ge=0, le=1)
    """Part of the learning rate that a falling schedule leaves."""

    lora: LoraConfig | None = None
    """Adapters to train in place of the weights; null trains all weights. The checkpoint then holds the base's FP8
    codes unchanged, and the adapter in PEFT's format in the folder `adapter`. Later iterations continue the adapter.
    """

    LATER = (
        "routing_replay",
        "router_z",
        "lora",
        "precision",
        "snapshot_every",
        "schedule",
        "warmup_steps",
        "schedule_steps",
        "final_rate",
    )

    @model_validator(mode="after")
    def _schedule_has_an_end(self) -> Self:
        _refuse_without_schedule(self.schedule, schedule_steps=self.schedule_steps, final_rate=self.final_rate)
        if self.schedule != "constant" and self.schedule_steps is None:
            raise ValueError(
                f"schedule {self.schedule} needs schedule_steps: set it to iterations * optimizer_steps, or use"
                " constant"
            )
        if self.schedule != "constant" and self.schedule_steps is not None and self.schedule_steps <= self.warmup_steps:
            raise ValueError(
                f"schedule_steps={self.schedule_steps}: must be above warmup_steps={self.warmup_steps}, after which"
                f" schedule {self.schedule} falls"
            )
        return self

    def of_experts(self) -> dict[str, object]:
        """Settings that only a mixture of experts has, by name."""
        return {
            "router_balance": self.router_balance,
            "router_z": self.router_z,
            "routing_replay": self.routing_replay,
        }

    @field_validator("algorithm", "precision", mode="before")
    @classmethod
    def _usual_kind(cls, value: Any, info: ValidationInfo) -> Any:
        usual = {"algorithm": "grpo", "precision": DEFAULT.kind}[info.field_name or ""]
        return {"kind": usual, **value} if isinstance(value, dict) else value


Device = Literal["cpu", "cuda"]
BackendName = Literal["torch", "fsdp2", "deepspeed"]
Starter = Literal["agent", "torchrun", "deepspeed"]


def require_divisor(experts: int | None, expert_ranks: int) -> None:
    """Raise TrainingConfigError unless `expert_ranks` divides the number of experts; None: the model has none."""
    if (experts or 1) % expert_ranks:
        raise TrainingConfigError(
            f"trainer.launcher.expert_ranks {expert_ranks} does not divide the model's {experts or 'no'} experts: set"
            " it to a divisor"
        )


class BackendConfig(Settings):
    """The library that holds weights and optimizer."""

    backend: BackendName = "torch"
    """torch: the whole model in every training process. fsdp2: torch's fully_shard; weights, gradients and optimizer
    are divided among the processes. deepspeed: ZeRO.
    """
    zero_stage: int | None = Field(default=None, ge=1, le=3)
    """DeepSpeed only, which uses 2 if null. 1 divides the optimizer's state among the processes, 2 also the gradients,
    3 also the weights.
    """
    activation_checkpointing: bool = False
    """fsdp2 and deepspeed: compute each layer again in the backward pass instead of keeping its activations. Less
    memory, same bits.
    """
    expert_ranks: int = Field(default=1, ge=1, le=1024)
    """fsdp2 and deepspeed: consecutive processes that divide each layer's experts (expert parallelism). Tokens are sent
    to the process of their expert, in place of its weights to theirs. Must divide the number of processes and of
    experts; with deepspeed, at stages 1 and 2, it is the number of processes.
    """
    starter: Starter = "agent"
    """What starts the training processes of a machine: agent, which is the trainer itself, torchrun, or DeepSpeed's
    launcher. Changes no bit. With each, a process that ends or hangs ends all, with one error.
    """

    @model_validator(mode="after")
    def _check_backend(self) -> Self:
        if self.zero_stage is not None and self.backend != "deepspeed":
            raise ValueError(f"zero_stage {self.zero_stage} needs backend deepspeed, not {self.backend}: remove it")
        if self.activation_checkpointing and self.backend == "torch":
            raise ValueError("activation_checkpointing needs backend fsdp2 or deepspeed, not torch: remove it")
        if self.expert_ranks > 1 and self.backend == "torch":
            raise ValueError(f"expert_ranks {self.expert_ranks} needs backend fsdp2 or deepspeed, not torch: remove it")
        if self.expert_ranks > 1 and self.backend == "deepspeed" and self.stage == 3:
            raise ValueError(
                f"expert_ranks {self.expert_ranks} does not go with zero_stage 3, which divides all weights: remove it,"
                " or use stage 2"
            )
        return self

    def check_expert_ranks(self, processes: int) -> None:
        """Raise ValueError unless the experts can be divided among this many training processes."""
        if processes % self.expert_ranks:
            raise ValueError(
                f"expert_ranks {self.expert_ranks} does not divide the {processes} training processes: set it to a"
                " divisor"
            )
        if self.backend == "deepspeed" and self.expert_ranks not in (1, processes):
            raise ValueError(
                f"expert_ranks {self.expert_ranks} of deepspeed is not the number of training processes: set it to"
                f" {processes}, or use backend fsdp2"
            )

    @property
    def stage(self) -> int:
        """ZeRO stage of DeepSpeed."""
        return self.zero_stage or 2

    @property
    def backend_numerics(self) -> dict[str, str | int]:
        """Settings of the backend that affect the resulting bits."""
        found: dict[str, str | int] = {"backend": self.backend}
        if self.backend == "deepspeed":
            found["zero_stage"] = self.stage
        if self.expert_ranks > 1:
            found["expert_ranks"] = self.expert_ranks
        return found


class _Job(BackendConfig, Frozen):
    store: str
    """Store URL for `contracts.store.open_store`."""
    key: str
    """Action key of the checkpoint and of the trainer state."""
    seed: int = Field(ge=0, lt=2**31)
    """Seed of initialization and data order."""
    device: Device = "cpu"
    """Where ranks compute. cuda: each rank on an NVIDIA GPU of its own."""
    threads: int = Field(default=1, ge=1)
    """CPU threads of each rank. The count changes the resulting bits."""
    ranks: int = Field(default=1, ge=1, le=1024)
    """Processes that share every batch. The count changes the resulting bits."""
    rank_timeout_s: float = Field(default=45.0, gt=0, le=604_800)
    """Longest time that a rank waits for an answer of another one, in seconds."""

    @model_validator(mode="after")
    def _check_expert_ranks(self) -> Self:
        self.check_expert_ranks(self.ranks)
        return self

    @property
    def numerics(self) -> dict[str, str | int]:
        """Settings, beyond inputs, configuration and torch, that affect the resulting bits; part of the manifest."""
        return {**self.backend_numerics, "device": self.device, "threads": self.threads, "ranks": self.ranks}


class MixtureSource(Frozen):
    """Further demonstrations of a mixture."""

    demonstrations: ArtifactRef
    weight: float = Field(default=1.0, gt=0, allow_inf_nan=False)
    """Share of the rows drawn, relative to the job's `demonstrations`, whose weight is 1."""


def source_roles(names: Iterable[object]) -> list[str]:
    """Roles, in the lineage of a supervised checkpoint, of the sources with these names."""
    return ["demonstrations", *(f"mixture {name}" for name in list(names)[1:])]


class SftJob(_Job):
    """Train a fresh model, or a checkpoint, on demonstrations."""

    kind: Literal["sft"] = "sft"
    tokenizer: ArtifactRef
    demonstrations: ArtifactRef
    mixture: tuple[MixtureSource, ...] = ()
    """Further demonstrations to draw from; the stopping criterion uses those of `demonstrations` alone."""
    sources: tuple[str, ...] = ()
    """Names of `demonstrations` and of each of `mixture`. With names, each source trains its share of all `max_steps`
    batches to the row (without `batch_tokens`), and has losses of its own in the metrics; empty: neither.
    """
    model: ModelConfig = ModelConfig()
    """Shape of the fresh model."""
    checkpoint: ArtifactRef | None = None
    """Checkpoint to start from in place of a fresh model, with the `trainer_state` of its key."""
    trainer_state: ArtifactRef | None = None
    lora: LoraConfig | None = None
    """Adapters to train, by AdamW, in place of the weights of that checkpoint; null: none."""
    config: SftConfig = SftConfig()
    precision: Precision = DEFAULT
    """Recipe of the trained policy."""

    @property
    def start(self) -> dict[str, ArtifactRef]:
        """The artifacts to start from, by role; empty for a fresh model."""
        found = {"checkpoint": self.checkpoint, "trainer_state": self.trainer_state}
        return {role: ref for role, ref in found.items() if ref is not None}

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.start) == 1:
            raise ValueError("checkpoint and trainer_state belong together: pass both of one key, or neither")
        if self.lora is not None and not self.start:
            raise ValueError("lora needs weights to adapt: pass checkpoint and trainer_state")
        count = 1 + len(self.mixture)
        if self.sources and not len(set(self.sources)) == len(self.sources) == count:
            raise ValueError(f"sources has {', '.join(self.sources)}: give each of the {count} a name of its own")
        return self

    @property
    def shares(self) -> dict[str, float]:
        """Weights of the named sources."""
        return dict(zip(self.sources, (1.0, *(each.weight for each in self.mixture)), strict=False))

    @property
    def data(self) -> dict[str, ArtifactRef]:
        """The artifacts of all sources by their role in the lineage, `demonstrations` first."""
        names = self.sources or range(len(self.mixture) + 1)
        refs = [self.demonstrations, *(each.demonstrations for each in self.mixture)]
        return dict(zip(source_roles(names), refs, strict=True))

    @model_serializer(mode="wrap")
    def _leave_out_default(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Dump the fields, without `precision` and `sources` where they are the default, so that keys stay as they are
        without them.
        """
        values: dict[str, Any] = dump(self)
        if self.precision == DEFAULT:
            values.pop("precision", None)
        if not self.sources:
            values.pop("sources", None)
        return values


class RlJob(_Job):
    """Train a checkpoint on one iteration's dataset."""

    kind: Literal["rl"] = "rl"
    dataset: ArtifactRef
    checkpoint: ArtifactRef
    trainer_state: ArtifactRef
    config: RlConfig = RlConfig()
    min_effective_sample_size: float = Field(default=0.0, ge=0, lt=1)
    """Share of the sampled tokens, at least, that the importance weights leave; else nothing is trained. Not part of
    the key.
    """


Job = Annotated[SftJob | RlJob, Field(discriminator="kind")]
_JOB: TypeAdapter[SftJob | RlJob] = TypeAdapter(Job)


def parse_job(text: str) -> SftJob | RlJob:
    """Parse a job from JSON or YAML text. Raises TrainingConfigError with field, value and fix."""
    try:
        values = load_yaml(text)
    except ValueError as error:
        raise TrainingConfigError(f"the job is neither JSON nor YAML ({error}): correct it") from None
    try:
        return _JOB.validate_python(values)
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
    return parse_job(path.read_text(encoding="utf-8"))
