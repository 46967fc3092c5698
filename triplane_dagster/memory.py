"""Forecast of an experiment's memory: its training, and its vLLM server on each GPU."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.errors import ConfigError, TriplaneError
from inference.engines.config import VllmConfig
from inference.engines.vllm_memory import EngineMemory, engine_memory
from resources.base_config import SftBase
from resources.experiment import Experiment
from resources.gpus import local_gpus
from trainer.plan import Batch, Limit, Plan, Workload, machine_limits, plan_training

PUBLISHED: Mapping[str, Mapping[str, Any]] = {
    "Qwen3-30B-A3B": {
        "vocab_size": 151936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "max_position_embeddings": 40960,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
    "Qwen3-4B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": 9728,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
    },
}
"""Fields of the published config.json, by the name of the directory, for a plan before the weights are fetched."""


@dataclass(frozen=True)
class ExperimentPlan:
    """Memory of one iteration."""

    model: str
    """Where the shape comes from."""
    work: Workload
    training: Plan
    engine: EngineMemory | None
    """None unless vLLM serves."""
    limits: list[Limit]
    """Of this machine, the tightest first; of a job on GPUs those of this machine's GPUs."""
    gpus: list[tuple[str, int]]
    """(name, bytes) of the GPUs of this machine."""

    @property
    def fits(self) -> bool:
        """Whether the training fits the limits."""
        ranks = self.work.ranks
        return all(self.training.peak * (ranks if limit.shared else 1) <= limit.free for limit in self.limits)


def plan_experiment(experiment: Experiment) -> ExperimentPlan:
    """Plan of the experiment's iterations. Raises ConfigError if the model's shape is not known."""
    model, config = model_shape(experiment)
    work, gpus = workload(experiment, config), local_gpus()
    return ExperimentPlan(
        model=model,
        work=work,
        training=plan_training(work),
        engine=_engine(experiment, config),
        limits=[Limit(name, size, shared=False) for name, size in gpus] if work.cuda else machine_limits(),
        gpus=gpus,
    )


def workload(experiment: Experiment, config: Mapping[str, Any]) -> Workload:
    """What training computes: full microbatches in which the policy wrote every token, an upper bound."""
    trainer, where = experiment.trainer, experiment.trainer.launcher
    longest = min(experiment.dataset.max_tokens or experiment.rollouts.max_tokens, experiment.rollouts.max_tokens)
    tokens = max(trainer.microbatch_tokens, longest)
    rows = experiment.prompts.groups * experiment.rollouts.group_size
    return Workload(
        config=config,
        batch=Batch(
            tokens,
            tokens,
            rows=rows,
            sequences=max(1, tokens // longest),
            supported=bool(experiment.rollouts.restrictions),
        ),
        backend=where.backend,
        ranks=where.processes,
        stage=where.stage,
        expert_ranks=where.expert_ranks,
        recompute=where.activation_checkpointing,
        cuda=where.gpus > 0,
    )


def model_shape(experiment: Experiment) -> tuple[str, dict[str, Any]]:
    """(source, config.json) of the experiment's model. Raises ConfigError if nothing tells its shape."""
    base, original = experiment.base, experiment.base.original
    if original is None:
        from curation.tokenizer import VOCABULARY

        assert isinstance(base, SftBase)
        return "base.model", base.model.hf_config(VOCABULARY)
    path = original.directory / "config.json"
    if path.is_file():
        try:
            return str(path), json.loads(path.read_text())
        except ValueError as error:
            raise ConfigError(f"{path} is not JSON ({error}): fetch it again") from None
    known = PUBLISHED.get(original.directory.name)
    if known is None:
        raise ConfigError(
            f"{'base.path' if original is base else 'base.start.path'}={original.path}: there is no {path}, and no"
            f" published shape is called {original.directory.name}: fetch the model, or name a directory with its"
            f" config.json (known: {', '.join(PUBLISHED)})"
        )
    return f"the published shape of {original.directory.name}, since {path} does not exist", dict(known)


def _engine(experiment: Experiment, config: Mapping[str, Any]) -> EngineMemory | None:
    if not isinstance(experiment.engine, VllmConfig):
        return None
    episodes = experiment.prompts.workers * experiment.rollouts.concurrency
    return engine_memory(experiment.engine, config, experiment.rollouts.max_tokens, episodes)


def training_note(experiment: Experiment) -> str:
    """One line for a dry run: the total and the largest kinds, or why there is no plan."""
    from trainer.plan.limits import in_units

    try:
        plan = plan_experiment(experiment)
    except TriplaneError as error:
        return f"memory: not planned ({error})"
    found = plan.training
    biggest = ", ".join(f"{kind} {in_units(size)}" for kind, size in found.biggest[:3])
    ranks = f"{plan.work.ranks} rank(s) of " if plan.work.ranks > 1 else ""
    free = f"; {plan.limits[0].name} has {in_units(plan.limits[0].free)} free" if plan.limits and not plan.fits else ""
    problem = f"; vLLM: {plan.engine.problems[0]}" if plan.engine and plan.engine.problems else ""
    return f"memory of training: {ranks}{in_units(found.peak)} in {found.moment} ({biggest}){free}{problem}"
