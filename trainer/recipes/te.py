"""Recipes of NVIDIA's TransformerEngine: its Linear and GroupedLinear under `te.autocast`, on a GPU.

Leaves are bfloat16 values. With Float8BlockScaling they are dequantized codes with power-of-two scales, which bfloat16
holds exactly, so that TransformerEngine quantizes them to the exported codes again. Not run here: written against the
interface of version 2.20 and checked against its source (tests/trainer/test_te_interface.py).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call
from triplane_kernels.permute import permute, unpermute

from trainer.errors import TrainingConfigError
from trainer.precision import TeFloat8Block, TeMxfp8
from trainer.recipes.base import Experts, Recipe


class TransformerEngineRecipe(Recipe):
    """See the module. Modules hold no weights: the leaves replace theirs in every call."""

    def __init__(self, precision: TeFloat8Block | TeMxfp8) -> None:
        """Raises TrainingConfigError without TransformerEngine, or without a GPU that computes the recipe."""
        super().__init__(precision.forward)
        self._te, self._scaling = _load(precision)
        self._modules: dict[tuple[int, ...], torch.nn.Module] = {}

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """See Recipe.linear. TransformerEngine needs a row count that its blocks divide: rows are padded with zeros."""
        width, columns = weight.shape
        module = self._modules.get((width, columns))
        if module is None:
            module = self._te.Linear(columns, width, bias=False, params_dtype=torch.bfloat16, device=weight.device)
            self._modules[width, columns] = module
        padded = F.pad(rows, (0, 0, 0, -len(rows) % 128))
        with self._autocast():
            found: Tensor = functional_call(module, {"weight": weight.to(torch.bfloat16)}, (padded,))
        return found[: len(rows)]

    def mixture(self, rows: Tensor, shares: Tensor, chosen: Tensor, experts: Experts) -> Tensor:
        """See Recipe.mixture. Each expert's rows are padded to a multiple of 128."""
        permuted = permute(rows, chosen, len(experts.gate))
        used = int(permuted.offsets[-1])
        splits = permuted.offsets.diff().long().cpu()
        routed = permuted.rows[:used]
        inner = F.silu(self._grouped(routed, experts.gate, splits)) * self._grouped(routed, experts.up, splits)
        out = self._grouped(inner, experts.down, splits)
        return unpermute(F.pad(out, (0, 0, 0, len(permuted.rows) - used)), permuted, shares.float())

    def _grouped(self, rows: Tensor, weights: Tensor, splits: Tensor) -> Tensor:
        count, width, columns = weights.shape
        module = self._modules.get((count, width, columns))
        if module is None:
            module = self._te.GroupedLinear(
                count, columns, width, bias=False, params_dtype=torch.bfloat16, device=weights.device
            )
            self._modules[count, width, columns] = module
        named = {f"weight{index}": weight for index, weight in enumerate(weights.to(torch.bfloat16).unbind())}
        with self._autocast():
            found: Tensor = functional_call(module, named, (rows, splits))
        return found

    def _autocast(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self._te.autocast(enabled=True, recipe=self._scaling)
        return context


def _load(precision: TeFloat8Block | TeMxfp8) -> tuple[Any, Any]:
    """(transformer_engine.pytorch, the scaling recipe). Raises TrainingConfigError."""
    block = isinstance(precision, TeFloat8Block)
    needs = (
        f"trainer.precision.kind {precision.kind} needs TransformerEngine (pip install 'triplane[te]') and a"
        f" {'Hopper' if block else 'Blackwell'} GPU"
    )
    try:
        te, recipes = import_module("transformer_engine.pytorch"), import_module("transformer_engine.common.recipe")
    except (ImportError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise TrainingConfigError(f"{needs}: {reason}; without them use fp8-block or w8a8-1x128") from None
    if block:
        available, reason = te.is_fp8_block_scaling_available(return_reason=True)
        scaling = recipes.Float8BlockScaling()
    else:
        available, reason = te.is_mxfp8_available(return_reason=True)
        scaling = recipes.MXFP8BlockScaling()
    if not available:
        raise TrainingConfigError(f"{needs}: {reason}; without it use fp8-block or w8a8-1x128")
    if block and scaling.use_f32_scales:
        raise TrainingConfigError(
            "NVTE_FP8_BLOCK_SCALING_FP32_SCALES=1 gives te-float8-block other scales than its checkpoint: unset it"
        )
    return te, scaling
