"""Precision recipes: how the forward pass computes its products, one file each.

In: activations and leaves (`trainer.parameters`). Out: activations. Imports torch and triplane_kernels; `trainer.model`
calls a recipe wherever precision matters. `trainer.precision` has their settings.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from trainer.precision import W8A8, Bf16, Fp8Block, Precision, TeFloat8Block, TeMxfp8, precision_of
from trainer.recipes.base import Recipe


def recipe_of(config: Mapping[str, Any]) -> Recipe:
    """Recipe of a model with this config.json. Raises TrainingDataError, TrainingConfigError."""
    return _open(precision_of(config))


@functools.cache
def _open(precision: Precision) -> Recipe:
    if isinstance(precision, Bf16):
        from trainer.recipes.bf16 import Bf16Recipe

        return Bf16Recipe(precision.forward)
    if isinstance(precision, Fp8Block):
        from trainer.recipes.fp8_block import Fp8BlockRecipe

        return Fp8BlockRecipe(precision.forward, wgrad=precision.wgrad)
    if isinstance(precision, TeFloat8Block | TeMxfp8):
        from trainer.recipes.te import TransformerEngineRecipe

        return TransformerEngineRecipe(precision)
    if isinstance(precision, W8A8):
        from trainer.recipes.w8a8 import W8A8Recipe

        return W8A8Recipe(precision.forward)
    return Recipe(precision.forward)
