"""Rounding of a policy's forward pass, as its config.json names it: what trains and what serves must agree on it.

A config.json without the entry is a policy of recipe `w8` if it declares FP8 blocks, else of recipe `fp32`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from contracts.errors import SchemaError

ForwardRecipe = Literal["w8", "w8a8-1x128", "fp32", "bf16", "w8a8-1x128-e8m0", "mxfp8"]
"""Rounding of the products: FP8 weights (`w8`), and activations in blocks of 1x128 (`w8a8-1x128`; with power-of-two
scales `w8a8-1x128-e8m0`), none (`fp32`), bfloat16 operands and results (`bf16`), MXFP8 operands (`mxfp8`).
"""
Dtype = Literal["float32", "bfloat16"]
FORWARD = "triplane_forward"
"""Entry of config.json with the fields of `Forward`; absent for recipe `w8` in float32."""
PRECISION = "triplane_precision"
"""Entry of config.json with the trainer's setting, from which training continues; absent beside an absent `FORWARD`."""
FP8: tuple[ForwardRecipe, ...] = ("w8", "w8a8-1x128", "w8a8-1x128-e8m0")
"""Recipes whose projections are stored as FP8 codes with scales."""


@dataclass(frozen=True)
class Forward:
    """Rounding of a forward pass."""

    recipe: ForwardRecipe = "w8"
    activations: Dtype = "float32"
    """Dtype of everything between two products, and of all weights that are not FP8 codes."""
    head_dtype: Dtype = "float32"
    """Dtype of the output head's operands and logits."""
    router_dtype: Dtype = "float32"
    """Dtype of the router's operands and logits."""

    @property
    def quantized(self) -> bool:
        """Whether projections are stored as FP8 codes with scales."""
        return self.recipe in FP8

    @property
    def power_of_two(self) -> bool:
        """Whether scales of FP8 blocks are powers of two."""
        return self.recipe == "w8a8-1x128-e8m0"

    @property
    def rounds(self) -> bool:
        """Whether a value between two weights is rounded to less than float32."""
        dtypes = (self.activations, self.head_dtype, self.router_dtype)
        return self.recipe not in ("w8", "fp32") or "bfloat16" in dtypes

    def entry(self) -> dict[str, str]:
        """The entry of config.json."""
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"recipe {self.recipe}, activations {self.activations}, head {self.head_dtype}, router {self.router_dtype}"
        )


def exported_forward(config: Mapping[str, Any]) -> Forward:
    """Rounding of a checkpoint that the trainer exported, by its config.json. Raises SchemaError."""
    return forward_of(config) if FORWARD in config else Forward()


def forward_of(config: Mapping[str, Any]) -> Forward:
    """Rounding that a config.json names. Raises SchemaError for an entry that this version does not know."""
    entry = config.get(FORWARD)
    if entry is None:
        return Forward("w8") if "quantization_config" in config else Forward("fp32")
    hints = get_type_hints(Forward)
    names = {field.name for field in fields(Forward)}
    if not isinstance(entry, dict) or set(entry) != names:
        raise SchemaError(f"config.json: {FORWARD} must have exactly {', '.join(sorted(names))}: export it again")
    for name, value in entry.items():
        allowed = get_args(hints[name])
        assert get_origin(hints[name]) is Literal
        if value not in allowed:
            raise SchemaError(
                f"config.json: {FORWARD}.{name} is {value!r}, known are {', '.join(allowed)}: export it"
                " again with this version"
            )
    return Forward(**entry)
