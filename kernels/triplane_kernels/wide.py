"""Products in float64, for forward passes that round: the order of sums then does not change what they round."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    """Product of each group of rows [N, K] with its matrix of weights [G, K, width]; differentiable.

    ends: int32 [G], one past each group's last row; rows after the last group get no defined value. Returns [N, width]
    of rows' dtype: `F.grouped_mm` where it has the dtype (bfloat16, on a CPU float32 too), else a loop over the groups.
    """
    if rows.dtype == torch.bfloat16 or (rows.dtype == torch.float32 and rows.device.type == "cpu"):
        return F.grouped_mm(rows, weights, offs=ends)
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    parts = [rows[start:stop] @ weight for start, stop, weight in zip(starts, stops, weights, strict=True)]
    rest = rows.new_zeros(len(rows) - stops[-1], weights.shape[2])
    return torch.cat([*parts, rest])
