"""An experiment: one YAML file, parsed into one typed value with a slice for each step.

Only a step's own slice enters its action key: changing a trainer setting never resamples. Addresses, processes and GPUs
enter no key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import (
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from contracts.digests import digest_of
from contracts.errors import ConfigError
from contracts.yaml_text import load_yaml
from curation.dataset import DatasetConfig
from curation.mixture.config import EpisodesSource
from curation.rewards import RewardConfig
from curation.rewards.config import JudgeComponent
from curation.tasks.suite import ImportedSuiteConfig, TaskSuiteConfig
from inference.engines.config import BuiltinConfig, EngineConfig
from inference.engines.places import shared_places
from inference.rollouts.config import RolloutConfig
from resources.base_config import ImportedBase, SftBase
from resources.cron import cron_fault
from resources.errors import ExperimentError
from resources.overrides import apply_overrides, explain, merge
from resources.placement import PlacementConfig
from resources.sandboxes_config import SandboxesConfig
from resources.section import Section
from resources.trainer_config import TrainerConfig
from trainer.config import require_divisor

_NAME = r"^[a-z][a-z0-9_]{0,62}$"


class PromptsConfig(Section):
    """How many groups an iteration samples."""

    groups: int = Field(default=64, ge=1, le=1_000_000)
    """Prompts per iteration."""
    reserve: int = Field(default=16, ge=0, le=1_000_000)
    """Spare prompts that replace groups without variance."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Mapped steps that share the groups. One worker runs hundreds of episodes at once; few are needed."""


class OffPolicyConfig(Section):
    """How far the policy that sampled may be from the weights that training starts from. Not part of any key: what is
    refused makes nothing.
    """

    overlap: bool = False
    """Sample iteration i+1 with the policy that is live while iteration i trains: engines and trainers never wait for
    each other, and episodes are one training old. Needs room for both at once.
    """
    max_staleness: int = Field(default=1, ge=0, le=100)
    """Trainings between the two, at most; 0 only trains on what the starting weights sampled."""
    min_effective_sample_size: float = Field(default=0.2, ge=0, lt=1)
    """Share of the sampled tokens, at least, that the importance weights leave, before the first optimizer step."""

    @model_validator(mode="after")
    def _overlap_is_stale(self) -> Self:
        if self.overlap and self.max_staleness < 1:
            raise ValueError("overlap trains on episodes one training old, max_staleness is 0: set it to 1")
        return self


class EvaluationConfig(Section):
    """How the candidate and its parent are compared."""

    gate_samples: int = Field(default=2, ge=1, le=1024)
    """Episodes per gate task. Promotion depends on the gate. Fewer episodes refuse more candidates that are as good as
    their parent; see `iterate --dry-run`.
    """
    held_out_samples: int = Field(default=8, ge=0, le=1024)
    """Episodes per held-out task: the k of maj@k and pass@k. No decision uses them; 0 disables them."""
    unseen_samples: int = Field(default=8, ge=0, le=1024)
    """Episodes per unseen task, if the suite has any. No decision uses them; 0 disables them."""
    greedy: bool = True
    """Whether to run held-out and unseen tasks once more at temperature 0."""
    engine: EngineConfig | None = None
    """Engine that plays evaluations and smoke episodes; null: `engine`, which samples. With off_policy.overlap, servers
    that sample can't serve other policies: name other ones here.
    """

    @field_validator("engine", mode="before")
    @classmethod
    def _usual_kind(cls, value: Any) -> Any:
        return {"kind": "builtin", **value} if isinstance(value, dict) else value


class PromotionConfig(Section):
    """When a candidate goes live."""

    margin: float = Field(default=0.05, ge=0, le=1)
    """Largest accepted loss of gate pass rate, compared with the parent and with the best policy that the parent builds
    on.
    """
    confidence: float = Field(default=0.90, gt=0, lt=1)
    """Confidence of the two-sided interval, by task. The candidate passes if the lower end is above -margin. Printed
    intervals always use 95%. `iterate --dry-run` prints how often this rule refuses a known true difference.
    """
    on_refusal: Literal["stop", "retry_from_live"] = "retry_from_live"
    """After a refusal, stop the sequence of iterations, or sample the next one with the live policy."""


class DeploymentConfig(Section):
    """Servers of the live policy.

    The registry names the live policy; the servers listed here are updated after every change.
    """

    servers: tuple[str, ...] = ()
    """Base URLs, up to and including /v1, of `python -m inference serve` or `triplane serve` processes that can read
    the store's files. A server that can't be swapped is withdrawn from traffic and shown on the sampler's page.
    """
    canary: str | None = None
    """Base URL of a server without traffic that runs a candidate's smoke episode; null: use the engine of
    evaluations.
    """
    attempts: int = Field(default=3, ge=1, le=100)
    """Attempts to swap one server."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Timeout of one request to a server, in seconds; loading weights is one request."""

    @field_validator("servers", "canary")
    @classmethod
    def _are_urls(cls, value: tuple[str, ...] | str | None) -> tuple[str, ...] | str | None:
        for url in (value,) if isinstance(value, str) else value or ():
            if not url.startswith(("http://", "https://")) or not url.endswith("/v1"):
                raise ValueError(f"{url!r} is not the base URL of a server: write http://host:8000/v1")
        return value

    @model_validator(mode="after")
    def _canary_has_no_traffic(self) -> Self:
        if self.canary in self.servers:
            raise ValueError(
                f"canary {self.canary} is also listed in servers, whose clients would get candidates: use another"
            )
        if len(set(self.servers)) != len(self.servers):
            raise ValueError("servers lists a URL twice: list each once")
        return self


class ScheduleConfig(Section):
    """When `NAME_nightly` asks for iterations, once it is started in the UI."""

    cron: str = "0 2 * * *"
    """Five fields: minute, hour, day of month, month, day of week."""
    timezone: str = "UTC"
    """Time zone of `cron`, such as Europe/Berlin."""
    iterations: int = Field(default=1, ge=1, le=9999)
    """Iterations per night."""
    max_hours: float | None = Field(default=None, gt=0, le=8760)
    """Begin no further iteration of a night after this time, in hours; null: no limit."""

    @field_validator("cron")
    @classmethod
    def _is_cron(cls, value: str) -> str:
        fault = cron_fault(value)
        if fault:
            raise ValueError(f"{value!r} is not a cron expression ({fault}): write five fields such as '0 2 * * *'")
        return value

    @field_validator("timezone")
    @classmethod
    def _is_a_time_zone(cls, value: str) -> str:
        try:
            ZoneInfo(value)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError(f"{value!r} is no time zone: write UTC or a name such as Europe/Berlin") from None
        return value


class ForkConfig(Section):
    """The iteration of another experiment whose episodes are trained on again. Suite, base policy, prompts and rollouts
    are taken from it by reference; `triplane fork` writes this section.
    """

    experiment: str = Field(pattern=_NAME)
    """Name of the source."""
    iteration: str = Field(pattern=r"^[0-9]{4,}$")
    """Key of the source's iteration that 0000 repeats, such as "0003". The base policy is what its training started
    from.
    """
    replay: int = Field(default=1, ge=1, le=9999)
    """Iterations that repeat the source's from there on; later ones sample."""

    def __str__(self) -> str:
        return f"{self.experiment}/{self.iteration}"


def _kind_of_suite(value: Any) -> str:
    imported = isinstance(value, ImportedSuiteConfig) or (isinstance(value, dict) and value.get("kind") == "import")
    return "import" if imported else "generated"


class Experiment(Section):
    """All settings of an experiment's assets."""

    name: str = Field(pattern=_NAME)
    """Prefix of the assets and name of the partitions: lower case letters, digits and underscores."""
    description: str = ""
    """One-line description for the UI."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of sampling, prompts and training. Tasks and demonstrations have their own seeds."""
    iterations: int = Field(default=8, ge=1, le=9999)
    """Iterations that `demo` runs, and `iterate` if no number is given."""
    fork: ForkConfig | None = None
    """Iterations of another experiment that the first ones repeat; null: every iteration samples."""
    tasks: Annotated[
        Annotated[TaskSuiteConfig, Tag("generated")] | Annotated[ImportedSuiteConfig, Tag("import")],
        Discriminator(_kind_of_suite),
    ] = TaskSuiteConfig()
    """The task suite: generated, or imported by `triplane tasks import`."""
    base: Annotated[SftBase | ImportedBase, Field(discriminator="kind")] = SftBase()
    """Policy that iteration 0 samples with and trains from."""
    prompts: PromptsConfig = PromptsConfig()
    """How many groups an iteration samples."""
    rollouts: RolloutConfig = RolloutConfig()
    """Settings of the agent loop."""
    engine: EngineConfig = BuiltinConfig()
    """Engine that serves the policy."""
    sandboxes: SandboxesConfig = SandboxesConfig()
    """Where episodes run."""
    rewards: RewardConfig = RewardConfig()
    """Components and weights of the reward."""
    dataset: DatasetConfig = DatasetConfig()
    """Rules that leave episodes out of training."""
    trainer: TrainerConfig = TrainerConfig()
    """Training of one iteration."""
    off_policy: OffPolicyConfig = OffPolicyConfig()
    """What may be trained on that another policy than the starting weights has sampled."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Comparison of the candidate with its parent."""
    promotion: PromotionConfig = PromotionConfig()
    """When a candidate goes live."""
    deployment: DeploymentConfig = DeploymentConfig()
    """Servers of the live policy. Not part of any key."""
    schedule: ScheduleConfig | None = None
    """Nightly iterations; null: the defaults, without a freshness policy. Not part of any key."""
    placement: PlacementConfig = PlacementConfig()
    """Where pods run on Kubernetes. Not part of any key."""

    @field_validator("base", "engine", mode="before")
    @classmethod
    def _usual_kind(cls, value: Any, info: ValidationInfo) -> Any:
        usual = {"base": "sft", "engine": "builtin"}[info.field_name or ""]
        return {"kind": usual, **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.trainer.temperature != self.rollouts.temperature:
            raise ValueError(
                f"trainer.temperature {self.trainer.temperature} differs from rollouts.temperature "
                f"{self.rollouts.temperature}: set both to the same value"
            )
        self._require_one_variance()
        self._require_components()
        self._require_a_trainable_base()
        self._require_records()
        self._require_experts()
        for name, engine in self.engines.items():
            self._require_useful(name, engine)
        self._require_an_engine_for_each_half()
        if self.trainer.lora is not None and self.trainer.precision.forward.rounds:
            raise ValueError(
                f"trainer.lora merges adapters in float32, but trainer.precision {self.trainer.precision.kind} rounds:"
                " use w8 or fp32 with float32 head and router"
            )
        if self.rollouts.group_size < 2:
            raise ValueError("rollouts.group_size 1 leaves no other episode as baseline: use at least 2")
        return self

    def _require_useful(self, name: str, engine: EngineConfig) -> None:
        """Require that an engine can serve what is trained."""
        if engine.events is not None:
            raise ValueError(
                f"{name}.events_port has no effect on one server: name several in base_url, make it a replica of"
                f" {name}.kind routed, or leave it out"
            )
        reason = engine.mismatch(self.trainer.precision.forward)
        if reason is not None:
            raise ValueError(f"{name}.kind {engine.kind} can't serve trainer.precision: {reason}")
        if self.trainer.lora is not None and not engine.serves_adapters:
            raise ValueError(
                f"trainer.lora makes adapters, which {name}.kind {engine.kind} serves merged into float32 weights only:"
                f" set {name}.weights to dequantized, in replicas too"
            )
        for restriction in sorted(self.rollouts.restrictions - engine.restrictions):
            raise ValueError(
                f"rollouts.{restriction} samples from part of the vocabulary, of which {name}.kind {engine.kind} gives"
                " no record to train on: use builtin or sglang, or for a grammar vllm with engine.flags"
                " [--no-skip-tokenizer-init]"
            )

    def _require_an_engine_for_each_half(self) -> None:
        """Require that an iteration that is sampled ahead keeps its engine while the one before it is evaluated."""
        if not self.off_policy.overlap or not self.engine.shared:
            return
        if self.evaluation.engine is None:
            raise ValueError(
                f"off_policy.overlap samples while candidates are evaluated, and servers of engine.kind"
                f" {self.engine.kind} serve one policy at a time: name other servers in evaluation.engine"
            )
        shared = shared_places(self.engine, self.evaluation.engine)
        if shared:
            raise ValueError(
                f"off_policy.overlap needs two engines, but engine and evaluation.engine share {', '.join(shared)}:"
                " name other servers, or other GPUs (devices of vllm, env.CUDA_VISIBLE_DEVICES of trtllm)"
            )
        if getattr(self.engine, "idle", "keep") != "keep":
            raise ValueError(
                "off_policy.overlap samples while it trains, engine.idle would take away the servers: set it to keep"
            )

    def _require_one_variance(self) -> None:
        """Require that the dataset and refills compare the same values; refills know only test results."""
        of_solved = self.dataset.drop_zero_variance and self.dataset.variance_of == "solved"
        if self.rollouts.refill and self.dataset.drop_zero_variance and not of_solved:
            raise ValueError(
                "dataset.variance_of is reward, but rollouts.refill compares solved: set rollouts.refill to false, or"
                " dataset.variance_of to solved"
            )
        if self.rewards.solved == 0 and (self.rollouts.refill or of_solved):
            raise ValueError(
                "rewards.solved is 0, but rollouts.refill and dataset.variance_of compare solved: set rollouts.refill"
                " to false and dataset.variance_of to reward"
            )

    def _require_components(self) -> None:
        """Require that the components that the dataset's rules name are there, and have what the rules read."""
        components = {each.name: each for each in self.rewards.components}
        for name in sorted(self.dataset.components - components.keys()):
            known = ", ".join(components) or "none yet"
            raise ValueError(
                f"dataset.require or dataset.agree names {name}, which rewards.components lacks: name one of those"
                f" ({known}), or add it there, with weight 0 if it is not to be rewarded"
            )
        for names in (each.components for each in self.dataset.agree):
            judge = components[names[0]]
            if len(names) == 1 and (not isinstance(judge, JudgeComponent) or judge.samples < 2):
                raise ValueError(
                    f"dataset.agree compares {names[0]} with itself, which only a judge with several samples can"
                    " contradict: raise its samples, or name another component beside it"
                )
        advantage = getattr(self.trainer.algorithm, "advantage", None)
        if self.dataset.agree and not self.dataset.drop_zero_variance and advantage == "leave_one_out":
            raise ValueError(
                "dataset.agree may leave a single graded episode in a group, which has no baseline with"
                " trainer.algorithm.advantage leave_one_out: set dataset.drop_zero_variance to true"
            )

    def _require_a_trainable_base(self) -> None:
        """Require that a base policy's sources exist before it, and that iterations continue its adapters."""
        if not isinstance(self.base, SftBase):
            return
        for number, each in enumerate(self.base.mixture):
            if isinstance(each, EpisodesSource) and each.experiment == self.name:
                raise ValueError(
                    f"base.mixture.{number}.experiment is {self.name} itself, whose episodes come after its base"
                    " policy: name another experiment"
                )
        if self.base.lora is not None and self.trainer.lora != self.base.lora:
            raise ValueError("base.lora makes adapters, which iterations continue: set trainer.lora to the same values")

    def _require_records(self) -> None:
        """Require that the engine returns what is recorded, and that what is replayed is recorded."""
        if self.trainer.routing_replay and not self.rollouts.record_routing:
            raise ValueError("trainer.routing_replay is true, but rollouts.record_routing is false: set it to true too")
        if self.rollouts.record_routing and not self.engine.records_routing:
            raise ValueError(
                f"rollouts.record_routing is true, but engine.kind {self.engine.kind} returns no routed experts: use"
                " builtin, or vllm with engine.flags [--enable-return-routed-experts]"
            )

    def _require_experts(self) -> None:
        """Require that a dense model is not asked for anything of a mixture of experts, and that experts can be
        divided.
        """
        if not isinstance(self.base, SftBase) or self.base.start is not None:
            return
        model, ranks = self.base.model, self.trainer.launcher.expert_ranks
        if model.family == "qwen3_moe":
            try:
                require_divisor(model.experts, ranks)
            except ConfigError as error:
                raise ValueError(str(error)) from None
            return
        asked = {
            **{f"base.sft.{name}": value for name, value in self.base.sft.of_experts().items()},
            **{f"trainer.{name}": value for name, value in self.trainer.of_experts().items()},
            "rollouts.record_routing": self.rollouts.record_routing,
            "trainer.launcher.expert_ranks": ranks if ranks > 1 else 0,
        }
        for name, value in asked.items():
            if value:
                raise ValueError(
                    f"{name} is {value}, but base.model.family {model.family} has no experts: leave it out"
                )

    @property
    def evaluation_engine(self) -> EngineConfig:
        """Engine that plays evaluations and smoke episodes."""
        return self.evaluation.engine or self.engine

    @property
    def spaced(self) -> bool:
        """Whether policies write tool calls with blanks and newlines, as Qwen writes them."""
        return self.base.spaced

    @property
    def imported(self) -> bool:
        """Whether policies descend from an imported one."""
        return self.base.original is not None

    @property
    def ungraded_allowed(self) -> float:
        """Share of the episodes that may remain ungraded.

        None where the same rollouts must always get the same rewards: deterministic, no judges.
        """
        if self.rollouts.profile == "deterministic" and not self.rewards.asked:
            return 0.0
        return self.rewards.max_ungraded

    @property
    def engines(self) -> dict[str, EngineConfig]:
        """The engines that are named, by the setting that names them."""
        named = {"engine": self.engine, "evaluation.engine": self.evaluation.engine}
        return {name: engine for name, engine in named.items() if engine is not None}

    @property
    def demonstrated(self) -> TaskSuiteConfig:
        """Generated suite for the base policy's tokenizer and demonstrations: the experiment's own, or the default."""
        return self.tasks if isinstance(self.tasks, TaskSuiteConfig) else TaskSuiteConfig()

    @property
    def digest(self) -> str:
        """Digest of the whole experiment, for display; no action key depends on it."""
        return digest_of(self.model_dump(mode="json"))


def load_experiment(path: Path | str, overrides: list[str] | None = None) -> Experiment:
    """Read an experiment file and apply overrides such as "trainer.learning_rate=1e-4" (values are YAML). Its key
    `extends` may name a file beside it, whose values it changes: see `merge`.

    Raises ExperimentError that names the file, the field, the value and the fix.
    """
    source = Path(path)
    values = read_values(source)
    return parse_experiment(apply_overrides(values, overrides or [], Experiment), str(source))


def read_values(source: Path, extended: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Values of an experiment file, merged into those of the file that its `extends` names. extended: the files that
    extend this one.

    Raises ExperimentError.
    """
    try:
        values = load_yaml(source.read_text(encoding="utf-8"))
    except OSError as error:
        said = f", which {extended[-1]} extends," if extended else ""
        raise ExperimentError(
            f"experiment {source}{said} can't be read ({error.strerror}): name a YAML file in experiments/"
        ) from None
    except ValueError as error:
        raise ExperimentError(f"experiment {source} is not YAML: {error}") from None
    if not isinstance(values, dict):
        raise ExperimentError(f"experiment {source} is not a mapping: begin with `name: ...`")
    base = values.pop("extends", None)
    if base is None:
        return values
    if not isinstance(base, str):
        raise ExperimentError(f"experiment {source}: extends = {base!r:.60} is not the name of a file beside it")
    files = (*extended, source.resolve())
    other = (source.parent / base).resolve()
    if other in files:
        raise ExperimentError(f"experiment {source}: extends = {base!r} leads back to {other.name}: remove one of them")
    return merge(read_values(other, files), values, Experiment)


def parse_experiment(values: dict[str, Any], source: str = "experiment") -> Experiment:
    """Build an experiment from plain values. Raises ExperimentError."""
    try:
        return Experiment.model_validate(values)
    except ValidationError as error:
        raise ExperimentError(explain(error, Experiment, f"experiment {source}")) from None


def find_experiments(folder: Path) -> list[Path]:
    """Experiment files in a folder, by name."""
    return sorted(folder.glob("*.yaml"))
