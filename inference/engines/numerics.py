"""Rounding of the built-in engine's forward pass: what a checkpoint's recipe says, in float32 tensors.

Tensors hold values of the recipe's dtypes; sums are float32, or float64 for a recipe that rounds: trainer and engine
then round the same numbers, whatever the order of their sums. Roundings work on single values or rows of one token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from triplane_kernels.blockwise import fake_quantize_rows
from triplane_kernels.quantize_reference import dequantize_mx, quantize_mx
from triplane_kernels.wide import grouped_product

from contracts.precision import Dtype, Forward


@dataclass(frozen=True)
class Numerics:
    """Rounding by a recipe."""

    forward: Forward

    def round(self, values: Tensor) -> Tensor:
        """`values`, rounded to the dtype of activations, as float32."""
        return in_dtype(values, self.forward.activations)

    def rounded(self, values: Tensor) -> Tensor:
        """`values` as bfloat16 activations hold them, in the dtype of sums; float32 activations leave them alone."""
        return self.wide(self.round(values)) if self.forward.activations == "bfloat16" else values

    def wide(self, values: Tensor) -> Tensor:
        """`values` in the dtype of sums."""
        return values.double() if self.forward.rounds else values

    def operand(self, rows: Tensor) -> Tensor:
        """Rows [N, columns] as a quantized projection reads them."""
        if self.forward.recipe.startswith("w8a8"):
            return self.wide(fake_quantize_rows(rows, power_of_two=self.forward.power_of_two))
        return self.wide(_in_mx(rows) if self.forward.recipe == "mxfp8" else rows)

    def projection(self, weight: Tensor) -> Tensor:
        """A projection's stored weight [width, columns] as products read it."""
        return _in_mx(weight) if self.forward.recipe == "mxfp8" else weight

    def linear(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Projection of rows [N, columns] by weight [width, columns]."""
        return self.round(F.linear(self.operand(rows), self.wide(weight)))

    def grouped(self, rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
        """Projection of groups of rows by weights [experts, columns, width]. rows: made by `operand`."""
        return self.round(grouped_product(rows, self.wide(weights), ends))

    def router(self, rows: Tensor, weight: Tensor) -> Tensor:
        """Logits [N, experts] of rows [N, hidden], in the dtype of `wide`."""
        return self.wide(self._product(rows, weight, self.forward.router_dtype))

    def head(self, rows: Tensor, weight: Tensor) -> Tensor:
        """float32 logits [N, vocabulary] of rows [N, hidden]."""
        return self._product(rows, weight, self.forward.head_dtype).float()

    def _product(self, rows: Tensor, weight: Tensor, dtype: Dtype) -> Tensor:
        if dtype == "float32":
            return F.linear(self.wide(rows), self.wide(weight))
        found = F.linear(self.wide(in_dtype(rows, dtype)), self.wide(in_dtype(weight, dtype)))
        return in_dtype(found, dtype)


def _in_mx(rows: Tensor) -> Tensor:
    return dequantize_mx(*quantize_mx(rows, None), torch.float32)


def in_dtype(values: Tensor, dtype: Dtype) -> Tensor:
    """`values`, rounded to `dtype`, as float32."""
    return values.float() if dtype == "float32" else values.to(torch.bfloat16).float()
