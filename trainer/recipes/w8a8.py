"""Recipe `w8a8-1x128`: projections of FP8 weights with activations in FP8 blocks of 1x128, as vLLM computes on Hopper.

Products are those of the dequantized operands, whose sums differ from those of an FP8 unit by float32's rounding. The
gradient goes straight through both quantizations.
"""

from __future__ import annotations

from torch import Tensor
from triplane_kernels.blockwise import fake_quantize_rows

from trainer.recipes.base import Recipe


class W8A8Recipe(Recipe):
    """See the module."""

    def operand(self, rows: Tensor) -> Tensor:
        """See Recipe.operand."""
        return self.wide(fake_quantize_rows(rows.float()))
