"""Recorded routing of a dataset's rows, checked against the model that replays it.

Routing replay: the forward pass sends each token to the experts that the sampler chose, weighted by the trainer's own
router probabilities, so that the routers keep their gradient (R3, arXiv:2510.11370, section 3; without it reinforcement
learning of mixtures of experts diverges, Megatron-LM issue 4168).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from contracts.errors import SchemaError
from contracts.routing import Routes, decode_routes
from trainer.data import ScoredSequence
from trainer.errors import TrainingDataError

_AGAIN = "sample the rollouts again with the policy that is trained, or set trainer.routing_replay: false"


def with_routes(
    sequences: Sequence[ScoredSequence], column: pa.ChunkedArray, what: str, config: Mapping[str, Any]
) -> list[ScoredSequence]:
    """The sequences with their routing. column: `contracts.episodes.ROUTED_EXPERTS`. config: a config.json.

    Raises TrainingDataError with `what`, the row number and the mismatch.
    """
    found = []
    for index, (sequence, value) in enumerate(zip(sequences, column, strict=True)):
        where = f"{what} row {index}"
        if not value.is_valid:
            raise TrainingDataError(
                f"{where} has no routed_experts: set rollouts.record_routing: true and sample again, or set"
                " trainer.routing_replay: false"
            )
        try:
            routes = decode_routes(value.as_py())
        except SchemaError as error:
            raise TrainingDataError(f"{where}: {error}") from None
        fault = _fault(routes, sequence, config)
        if fault:
            raise TrainingDataError(f"{where}: routed_experts {fault}: {_AGAIN}")
        found.append(dataclasses.replace(sequence, routes=routes))
    return found


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
