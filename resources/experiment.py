"""An experiment: one YAML file, parsed into one typed value with a slice for each step.

A step's own slice, and nothing more, goes into its action key: changing the trainer's never resamples. Where a thing
runs (addresses, processes, GPUs) is in no key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from contracts.digests import digest_of
from curation.dataset import DatasetConfig
from curation.rewards import RewardConfig
from curation.tasks.demonstrations import DemonstrationConfig
from curation.tasks.suite import ImportedSuiteConfig, TaskSuiteConfig
from envd.backends import BackendName
from envd.types import Limits
from inference.engines.config import BuiltinConfig, EngineConfig
from inference.rollouts.config import RolloutConfig
from resources.errors import ExperimentError
from resources.overrides import apply_overrides, explain
from trainer.config import GrpoConfig, ModelConfig, SftConfig


class Section(BaseModel):
    """Base class of the sections of an experiment: immutable, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class SftBase(Section):
    """The base policy is a fresh model, warmed up on scripted expert episodes."""

    kind: Literal["sft"] = "sft"
    """Discriminates the two ways to get a base policy."""
    demonstrations: DemonstrationConfig = DemonstrationConfig()
    """The expert episodes."""
    model: ModelConfig = ModelConfig()
    """The model's shape."""
    sft: SftConfig = SftConfig()
    """The recipe and its stopping criterion."""

    @property
    def spaced(self) -> bool:
        """Whether tool calls are written with blanks and newlines, as Qwen writes them."""
        return False


class ImportedBase(Section):
    """The base policy is an existing checkpoint directory of Qwen3-MoE in the Hugging Face layout."""

    kind: Literal["import"]
    """Discriminates the two ways to get a base policy."""
    path: str = Field(min_length=1)
    """The directory, as the process that materializes base_policy sees it."""
    spaced: bool = True
    """Whether tool calls are written with blanks and newlines, as Qwen writes them."""

    @property
    def directory(self) -> Path:
        """The checkpoint's directory."""
        return Path(self.path)


class PromptsConfig(Section):
    """How many groups an iteration samples."""

    groups: int = Field(default=64, ge=1, le=1_000_000)
    """Prompts an iteration."""
    reserve: int = Field(default=16, ge=0, le=1_000_000)
    """Further prompts, for groups that show no variance."""
    workers: int = Field(default=1, ge=1, le=1024)
    """Mapped steps that share the groups. A worker holds hundreds of episodes at once, so tens are many."""


class LimitsConfig(Section):
    """What one episode's sandbox may use."""

    memory_mb: int = Field(default=512, ge=16)
    """All its processes and files together, in MiB."""
    pids: int = Field(default=64, ge=4)
    """Processes and threads alive at once."""
    cpu: float = Field(default=1.0, gt=0)
    """Cores."""
    disk_mb: int = Field(default=64, ge=1)
    """Everything it writes, in MiB."""
    lifetime_s: float = Field(default=600.0, gt=0)
    """Seconds after which it is destroyed, whoever forgot it."""

    def limits(self) -> Limits:
        """Limits in the environment plane's type."""
        return Limits(**self.model_dump())


class SandboxesConfig(Section):
    """Where episodes and verifications run."""

    backend: Literal["auto", BackendName] = "auto"
    """Of the server started here; agents and verdicts run on it. auto: namespaces, else gvisor. plain isolates nothing
    and is never chosen by auto.
    """
    address: str | None = None
    """`unix:/path` or `host:port` of an envd server that already runs, its key in $TRIPLANE_ENVD_KEY_FILE; null takes
    $TRIPLANE_ENVD, else starts one for the run.
    """
    limits: LimitsConfig = LimitsConfig()
    """What one episode's sandbox may use."""


class LauncherConfig(Section):
    """Where training runs."""

    kind: Literal["local"] = "local"
    """local: a process on this machine."""
    nodes: int = Field(default=1, ge=1, le=1024)
    """Machines."""
    gpus: int = Field(default=0, ge=0, le=64)
    """GPUs a machine; 0 trains on the CPU. The local launcher refuses any other number: the trainer computes on the CPU
    only.
    """
    threads: int = Field(default=2, ge=1, le=1024)
    """CPU threads of a training process. Another count gives other bits, so it is part of the keys of base_policy and
    checkpoint, and is never taken from the machine: the same experiment trains the same bits on 2 cores and on 64.
    """
    timeout_s: float = Field(default=86_400.0, gt=0)
    """Seconds after which a training process is stopped."""

    @property
    def numerics(self) -> dict[str, str | int]:
        """Settings that decide the bits of a training run beside inputs, configuration and torch; part of its action
        key.
        """
        device = "cuda" if self.gpus else "cpu"
        return {"backend": "torch", "device": device, "threads": self.threads, "ranks": self.nodes * max(1, self.gpus)}


class TrainerConfig(Section):
    """One iteration's training."""

    grpo: GrpoConfig = GrpoConfig()
    """The algorithm."""
    launcher: LauncherConfig = LauncherConfig()
    """Where it runs."""


class EvaluationConfig(Section):
    """How the candidate and its parent are compared."""

    gate_samples: int = Field(default=2, ge=1, le=1024)
    """Episodes a gate task. The gate decides; with few of them it also refuses many equal candidates, see `iterate
    --dry-run`.
    """
    held_out_samples: int = Field(default=8, ge=0, le=1024)
    """Episodes a held-out task: the k of maj@k and pass@k. No decision reads them; 0 plays none."""
    unseen_samples: int = Field(default=8, ge=0, le=1024)
    """Episodes an unseen task, where the suite has any. No decision reads them; 0 plays none."""
    greedy: bool = True
    """Whether held-out and unseen tasks are played once more at temperature 0."""


class PromotionConfig(Section):
    """When a candidate goes live."""

    margin: float = Field(default=0.05, ge=0, le=1)
    """Pass rate on the gate that the candidate may lose, at most: to its parent, and to the best policy so far of those
    the parent builds on.
    """
    confidence: float = Field(default=0.90, gt=0, lt=1)
    """Of the two-sided interval, by task, whose lower end must stay above -margin. Printed intervals are always at 95%.
    `iterate --dry-run` prints how often this rule refuses a known true difference.
    """
    on_refusal: Literal["stop", "retry_from_live"] = "retry_from_live"
    """What the next iteration of a sequence does: not start, or sample again with the live policy."""


class DeploymentConfig(Section):
    """Where the live policy is served.

    The registry alone says which one that is; servers named here are told of every change.
    """

    servers: tuple[str, ...] = ()
    """Base URLs, up to and including /v1, of `python -m inference serve` or `triplane serve` processes; each must see
    the store's files. Those that can't be swapped are withdrawn from traffic and named on the sampler's page.
    """
    canary: str | None = None
    """Base URL of such a server without traffic, on which a candidate plays its smoke episode; null: an engine as
    `engine` says.
    """
    attempts: int = Field(default=3, ge=1, le=100)
    """Attempts at the swap of one server."""
    timeout_s: float = Field(default=120.0, gt=0)
    """Deadline of one request to a server, in seconds; loading weights is one."""

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


def _kind_of_suite(value: Any) -> str:
    imported = isinstance(value, ImportedSuiteConfig) or (isinstance(value, dict) and value.get("kind") == "import")
    return "import" if imported else "generated"


class Experiment(Section):
    """Everything that decides what an experiment's assets hold."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")
    """Prefix of its assets and name of its partitions: lower case letters, digits and underscores."""
    description: str = ""
    """One line for the UI."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of sampling, prompts and training. Tasks and demonstrations have their own."""
    iterations: int = Field(default=8, ge=1, le=9999)
    """Iterations that `demo` and an unnumbered `iterate` run."""
    tasks: Annotated[
        Annotated[TaskSuiteConfig, Tag("generated")] | Annotated[ImportedSuiteConfig, Tag("import")],
        Discriminator(_kind_of_suite),
    ] = TaskSuiteConfig()
    """The task suite: generated, or imported by `triplane tasks import`."""
    base: Annotated[SftBase | ImportedBase, Field(discriminator="kind")] = SftBase()
    """The policy that iteration 0 samples with and trains from."""
    prompts: PromptsConfig = PromptsConfig()
    """How many groups an iteration samples."""
    rollouts: RolloutConfig = RolloutConfig()
    """The agent loop."""
    engine: EngineConfig = BuiltinConfig()
    """What serves the policy."""
    sandboxes: SandboxesConfig = SandboxesConfig()
    """Where episodes run."""
    rewards: RewardConfig = RewardConfig()
    """What an episode is worth."""
    dataset: DatasetConfig = DatasetConfig()
    """What is left out of training."""
    trainer: TrainerConfig = TrainerConfig()
    """Training of one iteration."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Comparison with the parent."""
    promotion: PromotionConfig = PromotionConfig()
    """When a candidate goes live."""
    deployment: DeploymentConfig = DeploymentConfig()
    """Where the live policy is served. In no key."""

    @field_validator("base", "engine", mode="before")
    @classmethod
    def _usual_kind(cls, value: Any, info: ValidationInfo) -> Any:
        usual = {"base": "sft", "engine": "builtin"}[info.field_name or ""]
        return {"kind": usual, **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.trainer.grpo.temperature != self.rollouts.temperature:
            raise ValueError(
                f"trainer.grpo.temperature {self.trainer.grpo.temperature} differs from rollouts.temperature "
                f"{self.rollouts.temperature}: set both to the same value"
            )
        self._require_one_variance()
        if self.rollouts.group_size < 2:
            raise ValueError("rollouts.group_size 1 leaves no other episode as baseline: use at least 2")
        return self

    def _require_one_variance(self) -> None:
        """Refuse a dataset that compares something else than refills, which know only the results of the tests."""
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

    @property
    def demonstrated(self) -> TaskSuiteConfig:
        """Generated suite of the base policy's tokenizer and demonstrations: the experiment's own, or the default
        one.
        """
        return self.tasks if isinstance(self.tasks, TaskSuiteConfig) else TaskSuiteConfig()

    @property
    def digest(self) -> str:
        """Digest of the whole experiment, for display; no action key depends on it."""
        return digest_of(self.model_dump(mode="json"))


def load_experiment(path: Path | str, overrides: list[str] | None = None) -> Experiment:
    """Read an experiment file and apply overrides such as "trainer.grpo.learning_rate=1e-4" (values are YAML).

    Raises ExperimentError that names the file, the field, the value and the fix.
    """
    source = Path(path)
    try:
        text = source.read_text()
    except OSError as error:
        raise ExperimentError(
            f"experiment {source} can't be read ({error.strerror}): name a YAML file in experiments/"
        ) from None
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ExperimentError(f"experiment {source} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise ExperimentError(f"experiment {source} is not a mapping: begin with `name: ...`")
    return parse_experiment(apply_overrides(values, overrides or []), str(source))


def parse_experiment(values: dict[str, Any], source: str = "experiment") -> Experiment:
    """Build an experiment from plain values. Raises ExperimentError."""
    try:
        return Experiment.model_validate(values)
    except ValidationError as error:
        raise ExperimentError(explain(error, Experiment, source)) from None


def find_experiments(folder: Path) -> list[Path]:
    """Experiment files in a folder, by name."""
    return sorted(folder.glob("*.yaml"))
