"""Recorded routing of a dataset's rows, checked against the model that replays it.

Routing replay: the forward pass sends each token to the experts that the sampler chose, weighted by the trainer's own
router probabilities, so that the routers keep their gradient (R3, arXiv:2510.11370, section 3; without it reinforcement
learning of mixtures of experts diverges, Megatron-LM issue 4168).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from contracts.architectures import Architecture
from contracts.errors import SchemaError
from contracts.routing import Routes, decode_routes, routes_dtype
from trainer.data import RouteRows, Rows, ScoredSequence
from trainer.errors import TrainingConfigError, TrainingDataError
from trainer.flat import flat_array

_AGAIN = "sample the rollouts again with the policy that is trained, or set trainer.routing_replay: false"


def require_experts(config: Mapping[str, Any], settings: Mapping[str, object]) -> None:
    """Raise TrainingConfigError if a dense model is given a setting of a mixture of experts. config: a config.json.
    settings: value of each such setting, by its name.
    """
    shape = Architecture.from_config(config)
    for name, value in settings.items() if not shape.experts else ():
        if value:
            raise TrainingConfigError(
                f"job field config.{name} is {value}, but the checkpoint is a dense {shape.family} model without"
                " experts: leave it out"
            )


def read_routes(
    sequences: Rows, values: Iterable[bytes | None], what: str, config: Mapping[str, Any], folder: Path | None
) -> RouteRows:
    """Routing of each sequence. values: of the column `contracts.episodes.ROUTED_EXPERTS`. config: a config.json.
    folder: see `flat_array`.

    Raises TrainingDataError with `what`, the row number and the mismatch.
    """
    places = config["num_hidden_layers"] * config["num_experts_per_tok"]
    flat = flat_array(int(sequences.lengths.sum()) * places, routes_dtype(config["num_experts"]), folder)
    recorded, end = np.zeros(len(sequences), np.int64), 0
    for row, value in enumerate(values):
        routes = _decoded(value, sequences[row], f"{what} row {row}", config)
        flat[end : end + routes.size] = routes.reshape(-1)
        recorded[row], end = len(routes), end + routes.size
    return RouteRows(flat, recorded, (config["num_hidden_layers"], config["num_experts_per_tok"]))


def _decoded(value: bytes | None, sequence: ScoredSequence, where: str, config: Mapping[str, Any]) -> Routes:
    if value is None:
        raise TrainingDataError(
            f"{where} has no routed_experts: set rollouts.record_routing: true and sample again, or set"
            " trainer.routing_replay: false"
        )
    try:
        routes = decode_routes(value)
    except SchemaError as error:
        raise TrainingDataError(f"{where}: {error}") from None
    fault = _fault(routes, sequence, config)
    if fault:
        raise TrainingDataError(f"{where}: routed_experts {fault}: {_AGAIN}")
    return routes


def _fault(routes: Routes, sequence: ScoredSequence, config: Mapping[str, Any]) -> str | None:
    """Why a record does not belong to a sequence and a model, or None."""
    recorded, layers, picks = routes.shape
    shape = {
        "layers": (layers, config["num_hidden_layers"]),
        "experts per token": (picks, config["num_experts_per_tok"]),
    }
    for name, (found, wanted) in shape.items():
        if found != wanted:
            return f"has {found} {name}, the model {wanted}"
    if not sequence.scored[-1] <= recorded <= sequence.length:
        return (
            f"covers {recorded} positions of {sequence.length} tokens, of which the last policy token is at"
            f" {sequence.scored[-1]}"
        )
    if routes.max() >= config["num_experts"]:
        return f"names expert {routes.max()}, the model has {config['num_experts']}"
    if not np.diff(np.sort(routes, axis=-1)).all():
        return "names an expert twice for one token"
    return None
