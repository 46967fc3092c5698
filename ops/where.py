"""Locations of the Dagster resources that steps need, for display."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from inference.engines.config import EngineConfig, RoutedConfig
from resources.experiment import Experiment


def engine(experiment: Experiment) -> str:
    """The engine that samples, and how many episodes at once."""
    return _engine(experiment, experiment.engine)


def evaluation(experiment: Experiment) -> str:
    """The engine of evaluations, and how many episodes at once."""
    return _engine(experiment, experiment.evaluation_engine)


def _engine(experiment: Experiment, config: EngineConfig) -> str:
    prompts = experiment.prompts
    address = getattr(config, "base_url", None) or getattr(config, "address", None)
    place = f" at {address}" if address else ""
    if isinstance(config, RoutedConfig):
        place = f" over {len(config.replicas)} engines"
    return f"{config.kind} engine{place}, {prompts.workers} worker(s) x {experiment.rollouts.concurrency} episodes"


def deployment(experiment: Experiment) -> str:
    """The engine of the smoke episode, and the servers of the live policy."""
    found = experiment.deployment
    canary = f"canary {found.canary}" if found.canary else evaluation(experiment).partition(",")[0]
    return f"smoke episode on {canary}; {len(found.servers)} server(s) to swap"


def sandboxes(experiment: Experiment) -> str:
    """The envd server and the backend of its sandboxes."""
    found = experiment.sandboxes
    return f"envd at {found.server} ({found.backend})" if found.server else f"envd started here ({found.backend})"


def launcher(experiment: Experiment) -> str:
    """Machines of the training, and whether the launcher accepts them."""
    # imports Dagster, which is not needed to list the steps
    from resources.training_launcher import chosen_kind, launch_refusal

    found = experiment.trainer.launcher
    device = f"{found.gpus} GPU(s)" if found.gpus else "CPU"
    refusal = launch_refusal(experiment)
    place = f"{chosen_kind(found.kind)} launcher, {found.nodes} node(s), {device}"
    return f"{place}: WILL BE REFUSED ({refusal})" if refusal else place


WHERE: Mapping[str, Callable[[Experiment], str]] = {"sampler": engine, "sandboxes": sandboxes, "launcher": launcher}
"""Functions by resource."""
