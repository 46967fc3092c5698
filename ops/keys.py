"""Action key of every step: digests of its inputs, its own slice of the experiment, and its code version."""

from __future__ import annotations

from typing import Any

from contracts.artifacts import ArtifactRef
from contracts.digests import action_key, digest_of
from contracts.tasks import Split
from curation import tokenizer
from curation.dataset import DATASET_VERSION
from curation.rewards import REWARDS_VERSION
from curation.tasks import demonstrations
from inference.rollouts import ROLLOUTS_VERSION
from resources.experiment import Experiment, ImportedBase, SftBase
from trainer.config import GRPO_VERSION, IMPORT_VERSION, SFT_VERSION

INPUTS_VERSION = "1"
PROMPTS_VERSION = "1"
EVALUATION_VERSION = "2"
DECISION_VERSION = "2"
EVALUATION_RUN_VERSION = f"{ROLLOUTS_VERSION}+{REWARDS_VERSION}"


def derived_seed(experiment: Experiment, purpose: str) -> int:
    """31-bit seed for one purpose, independent of those for other purposes."""
    return int(digest_of([experiment.seed, purpose])[:8], 16) >> 1


def tokenizer_key(experiment: Experiment) -> str:
    """Action key of the base policy's tokenizer."""
    return tokenizer.tokenizer_key(experiment.demonstrated.seed)


def demonstrations_key(experiment: Experiment, base: SftBase, tokenizer_ref: ArtifactRef) -> str:
    """Action key of the demonstrations."""
    return demonstrations.demonstrations_key(base.demonstrations, experiment.demonstrated.seed, tokenizer_ref)


def sft_slice(experiment: Experiment, base: SftBase) -> dict[str, Any]:
    """Settings that decide the warm start beside its data."""
    return {
        "model": base.model.model_dump(mode="json"),
        "sft": base.sft.model_dump(mode="json"),
        "seed": experiment.seed,
        "numerics": experiment.trainer.launcher.numerics,
    }


def sft_key(experiment: Experiment, base: SftBase, tokenizer: ArtifactRef, demonstrations: ArtifactRef) -> str:
    """Action key of the base policy's checkpoint and trainer state."""
    inputs = {"tokenizer": tokenizer.digest, "demonstrations": demonstrations.digest}
    return action_key("base_policy", inputs, sft_slice(experiment, base), SFT_VERSION)


def base_version(experiment: Experiment) -> str:
    """Code version of the step base_policy."""
    return IMPORT_VERSION if isinstance(experiment.base, ImportedBase) else SFT_VERSION


def inputs_key(experiment: Experiment, iteration: str) -> str:
    """Action key of an iteration's inputs: its place alone, so that they are written once."""
    return action_key("iteration_inputs", {}, {"experiment": experiment.name, "iteration": iteration}, INPUTS_VERSION)


def prompts_slice(experiment: Experiment, iteration: str, cursor: int) -> dict[str, Any]:
    """Settings that decide the draw of prompts beside the suite."""
    slice_ = experiment.prompts.model_dump(mode="json", exclude={"workers"})
    return {**slice_, "iteration": iteration, "cursor": cursor, "seed": experiment.seed}


def prompts_key(experiment: Experiment, iteration: str, suite: ArtifactRef, cursor: int) -> str:
    """Action key of the prompts of one iteration."""
    return action_key(
        "prompts", {"task_suite": suite.digest}, prompts_slice(experiment, iteration, cursor), PROMPTS_VERSION
    )


def rollouts_slice(experiment: Experiment, iteration: str) -> dict[str, Any]:
    """Settings that decide an iteration's episodes beside policy, prompts and suite."""
    return {
        **_sampling_slice(experiment),
        "experiment": experiment.name,
        "iteration": iteration,
        "workers": experiment.prompts.workers,
        "rollouts": experiment.rollouts.model_dump(mode="json"),
    }


def rollouts_key(
    experiment: Experiment, iteration: str, policy: ArtifactRef, prompts: ArtifactRef, suite: ArtifactRef
) -> str:
    """Action key of the rollouts of one iteration, from which the keys of its groups are derived."""
    inputs = {"policy": policy.digest, "prompts": prompts.digest, "task_suite": suite.digest}
    return action_key("rollouts", inputs, rollouts_slice(experiment, iteration), ROLLOUTS_VERSION)


def rewards_key(experiment: Experiment, rollouts: ArtifactRef, suite: ArtifactRef) -> str:
    """Action key of the rewards of one iteration."""
    inputs = {"rollouts": rollouts.digest, "task_suite": suite.digest}
    return action_key("rewards", inputs, experiment.rewards.slice(), REWARDS_VERSION)


def dataset_key(experiment: Experiment, rollouts: ArtifactRef, rewards: ArtifactRef) -> str:
    """Action key of the dataset of one iteration."""
    inputs = {"rollouts": rollouts.digest, "rewards": rewards.digest}
    return action_key("dataset", inputs, experiment.dataset.model_dump(mode="json"), DATASET_VERSION)


def training_slice(experiment: Experiment, iteration: str) -> dict[str, Any]:
    """Settings that decide one iteration's training beside its data."""
    return {
        "grpo": experiment.trainer.grpo.model_dump(mode="json"),
        "seed": derived_seed(experiment, f"training/{iteration}"),
        "numerics": experiment.trainer.launcher.numerics,
    }


def checkpoint_key(
    experiment: Experiment, iteration: str, dataset: ArtifactRef, start: ArtifactRef, trainer_state: ArtifactRef
) -> str:
    """Action key of the checkpoint and trainer state that one iteration trains."""
    inputs = {"dataset": dataset.digest, "checkpoint": start.digest, "trainer_state": trainer_state.digest}
    return action_key("checkpoint", inputs, training_slice(experiment, iteration), GRPO_VERSION)


EVALUATION_SLOTS = "evaluation"
"""Stands for the experiment in the seeds of evaluations, so that experiments with an equal policy share its runs."""

_GROUPING = {"group_size", "oversample", "refill", "concurrency", "profile"}


def evaluation_slice(experiment: Experiment, split: Split, samples: int, *, greedy: bool = False) -> dict[str, Any]:
    """Settings that decide how a policy plays a split. greedy: at temperature 0."""
    rollouts = experiment.rollouts.model_dump(mode="json", exclude=_GROUPING)
    return {
        **_sampling_slice(experiment),
        "split": split.value,
        "samples": samples,
        "rollouts": {**rollouts, "temperature": 0.0} if greedy else rollouts,
    }


def evaluation_run_key(
    experiment: Experiment, policy: ArtifactRef, suite: ArtifactRef, split: Split, samples: int, *, greedy: bool = False
) -> str:
    """Action key of one policy's episodes on one split."""
    inputs = {"policy": policy.digest, "task_suite": suite.digest}
    slice_ = evaluation_slice(experiment, split, samples, greedy=greedy)
    return action_key("evaluation_run", inputs, slice_, EVALUATION_RUN_VERSION)


def evaluation_key(experiment: Experiment, runs: dict[str, ArtifactRef]) -> str:
    """Action key of the comparison. runs: by role, e.g. candidate_gate."""
    config = {"confidence": experiment.promotion.confidence}
    return action_key("evaluation", {role: ref.digest for role, ref in runs.items()}, config, EVALUATION_VERSION)


def decision_key(
    experiment: Experiment, iteration: str, candidate: ArtifactRef, parent: ArtifactRef, evaluation: ArtifactRef
) -> str:
    """Action key of the decision about a candidate."""
    inputs = {"candidate": candidate.digest, "parent": parent.digest, "evaluation": evaluation.digest}
    return action_key("sampler", inputs, decision_slice(experiment, iteration), DECISION_VERSION)


def decision_slice(experiment: Experiment, iteration: str) -> dict[str, Any]:
    """Settings that decide about a candidate beside its evaluation."""
    rule = experiment.promotion.model_dump(mode="json", exclude={"on_refusal"})
    return {**rule, "experiment": experiment.name, "iteration": iteration}


def _sampling_slice(experiment: Experiment) -> dict[str, Any]:
    return {
        "engine": experiment.engine.kind,
        "sandbox_limits": experiment.sandboxes.limits.model_dump(mode="json"),
        "spaced": experiment.base.spaced,
        "seed": experiment.seed,
    }
