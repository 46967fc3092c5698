"""A named evaluation: the tasks, sampling and sandboxes with which any policy is measured. One YAML file each.

Everything that decides an episode is in the file, so that each policy is measured alike, whatever becomes of the
experiment that the file was saved from.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml
from pydantic import Field

from contracts.errors import ConfigError
from contracts.new_files import write_new
from contracts.tasks import Split
from inference.engines.config import BuiltinConfig, EngineConfig
from inference.rollouts.config import RolloutConfig
from resources.experiment import Experiment
from resources.named_files import parse_named, read_values
from resources.sandboxes_config import SandboxesConfig
from resources.section import Section

USUAL_SAMPLES = 8
"""Episodes per task, unless told otherwise."""


class PlaySettings(Protocol):
    """Settings that decide how a policy plays, of an experiment or of a named evaluation."""

    @property
    def seed(self) -> int:
        """Seed of the episodes."""

    @property
    def rollouts(self) -> RolloutConfig:
        """The agent loop."""

    @property
    def evaluation_engine(self) -> EngineConfig:
        """Engine that serves the policy."""

    @property
    def sandboxes(self) -> SandboxesConfig:
        """Where episodes and verdicts run."""

    @property
    def spaced(self) -> bool:
        """Whether the policy writes tool calls with blanks and newlines."""

    @property
    def imported(self) -> bool:
        """Whether the policy descends from an imported one."""

    @property
    def ungraded_allowed(self) -> float:
        """Share of the episodes that infrastructure faults may leave ungraded."""


@dataclass(frozen=True)
class EvaluationSettings:
    """Settings of a named evaluation for one policy; see PlaySettings."""

    seed: int
    rollouts: RolloutConfig
    evaluation_engine: EngineConfig
    sandboxes: SandboxesConfig
    spaced: bool
    imported: bool
    ungraded_allowed: float


class Evaluation(Section):
    """A measurement that every policy can be put to."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]{0,62}$")
    """Name of the file: lower case letters, digits and underscores."""
    description: str = ""
    """One line for lists."""
    suite: str = Field(pattern=r"^[0-9a-f]{8,64}$")
    """Digest of the task suite, or at least its first eight digits."""
    split: Split = Split.HELD_OUT
    """Split whose tasks are played."""
    samples: int = Field(default=USUAL_SAMPLES, ge=1, le=1024)
    """Episodes per task: the k of maj@k and pass@k."""
    greedy: bool = False
    """Temperature 0 instead of rollouts.temperature."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the episodes; every policy meets the same random numbers."""
    rollouts: RolloutConfig = RolloutConfig()
    """The agent loop. What concerns groups, such as group_size, has no effect."""
    engine: EngineConfig = BuiltinConfig()
    """Engine that serves the policy; a policy that is named by its URL is sampled there."""
    sandboxes: SandboxesConfig = SandboxesConfig()
    """Where episodes and verdicts run."""
    spaced: bool | None = None
    """Whether tool calls are written with blanks and newlines; null: as the policy's own chat template does."""
    max_ungraded: float = Field(default=0.05, ge=0, le=1)
    """Largest share of episodes that infrastructure faults may leave ungraded; none under the deterministic profile."""

    @classmethod
    def of(
        cls, experiment: Experiment, name: str, suite: str, split: Split, samples: int | None, *, greedy: bool
    ) -> Evaluation:
        """The evaluation that an experiment's iterations make of their policies, on any suite. samples: None for
        theirs, or 1 if greedy.
        """
        config = experiment.evaluation
        usual = {
            Split.GATE: config.gate_samples,
            Split.HELD_OUT: config.held_out_samples,
            Split.UNSEEN: config.unseen_samples,
        }
        return cls(
            name=name,
            suite=suite,
            split=split,
            samples=samples or (1 if greedy else usual.get(split)) or USUAL_SAMPLES,
            greedy=greedy,
            seed=experiment.seed,
            rollouts=experiment.rollouts,
            engine=experiment.evaluation_engine,
            sandboxes=experiment.sandboxes,
            spaced=experiment.spaced if experiment.imported else None,
            max_ungraded=experiment.rewards.max_ungraded,
        )

    def settings(self, *, spaced: bool, imported: bool) -> EvaluationSettings:
        """Settings for a policy. spaced: what its chat template says."""
        return EvaluationSettings(
            self.seed,
            self.rollouts,
            self.engine,
            self.sandboxes,
            spaced if self.spaced is None else self.spaced,
            imported,
            0.0 if self.rollouts.profile == "deterministic" else self.max_ungraded,
        )


def load_evaluation(path: Path) -> Evaluation:
    """Read an evaluation file. Raises ConfigError that names the file, the field, the value and the fix."""
    values = read_values(path, "evaluation", "make it with `triplane evaluate POLICY --save NAME`")
    if isinstance(values.get("engine"), dict):
        values["engine"] = {"kind": "builtin", **values["engine"]}
    return parse_named(values, Evaluation, path, "evaluation")


def save_evaluation(evaluation: Evaluation, path: Path) -> None:
    """Write an evaluation file with every value. Raises ConfigError if there is another one."""
    text = yaml.safe_dump(evaluation.model_dump(mode="json"), sort_keys=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        write_new(path, text)
    except FileExistsError:
        if load_evaluation(path) != evaluation:
            raise ConfigError(f"{path} exists and says something else: choose another name, or remove it") from None
