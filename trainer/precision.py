"""Setting `trainer.precision`: the recipe by which a policy trains and is served. Importing this needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, TypeAdapter, ValidationError

from contracts.checkpoints import quantization_config
from contracts.precision import FORWARD, PRECISION, Dtype, Forward, ForwardRecipe
from trainer.errors import TrainingDataError
from trainer.settings import Settings


class _Precision(Settings):
    kind: str
    """Selects the recipe."""
    head_dtype: Dtype = "float32"
    """Dtype of the output head's operands and logits. vLLM matches float32 with `head_dtype`."""
    router_dtype: Dtype = "float32"
    """Dtype of the router's operands and logits. vLLM computes it in its --dtype."""

    served: ClassVar[ForwardRecipe]
    """Recipe of the exported checkpoint's forward pass."""

    @property
    def between(self) -> Dtype:
        """Dtype of activations between products."""
        return "float32"

    @property
    def forward(self) -> Forward:
        """What an engine must compute to serve the policy."""
        return Forward(self.served, self.between, self.head_dtype, self.router_dtype)


class W8(_Precision):
    """Weights in FP8 blocks of 128x128, all products in float32."""

    kind: Literal["w8"] = "w8"
    """Selects this recipe."""

    served: ClassVar[ForwardRecipe] = "w8"


class Fp32(_Precision):
    """Nothing is rounded; the checkpoint is float32."""

    kind: Literal["fp32"]
    """Selects this recipe."""

    served: ClassVar[ForwardRecipe] = "fp32"


class _Bfloat16(_Precision):
    """Recipes with bfloat16 between products."""

    router_dtype: Dtype = "bfloat16"
    """Dtype of the router's operands and logits. vLLM computes it in its --dtype, which is bfloat16 here."""

    @property
    def between(self) -> Dtype:
        """See the base class."""
        return "bfloat16"


class Bf16(_Bfloat16):
    """Weights, activations and results of products in bfloat16, sums in float32; the checkpoint is bfloat16."""

    kind: Literal["bf16"]
    """Selects this recipe."""

    served: ClassVar[ForwardRecipe] = "bf16"


class W8A8(_Precision):
    """Weights in FP8 blocks, and the projections' activations in FP8 blocks of 1x128, as vLLM computes on Hopper."""

    kind: Literal["w8a8-1x128"]
    """Selects this recipe."""
    activations: Dtype = "float32"
    """Dtype of activations between products. vLLM's FP8 kernels need bfloat16."""

    served: ClassVar[ForwardRecipe] = "w8a8-1x128"

    @property
    def between(self) -> Dtype:
        """See the base class."""
        return self.activations


class Fp8Block(W8A8):
    """`w8a8-1x128` by the kernels of this repository: experts multiply FP8 codes, forward and backward."""

    kind: Literal["fp8-block"]  # type: ignore[assignment]
    """Selects this recipe."""
    wgrad: bool = False
    """Whether gradients of the experts' weights are products of FP8 codes too, which loses the most accuracy."""


class TeFloat8Block(_Bfloat16):
    """TransformerEngine's Float8BlockScaling: FP8 blocks with power-of-two scales. Needs a Hopper GPU."""

    kind: Literal["te-float8-block"]
    """Selects this recipe."""

    served: ClassVar[ForwardRecipe] = "w8a8-1x128-e8m0"


class TeMxfp8(_Bfloat16):
    """TransformerEngine's MXFP8BlockScaling: FP8 in blocks of 1x32, a bfloat16 checkpoint. Needs a Blackwell GPU."""

    kind: Literal["te-mxfp8"]
    """Selects this recipe."""

    served: ClassVar[ForwardRecipe] = "mxfp8"


AnyPrecision = W8 | Fp32 | Bf16 | W8A8 | Fp8Block | TeFloat8Block | TeMxfp8
Precision = Annotated[AnyPrecision, Field(discriminator="kind")]
_ADAPTER: TypeAdapter[AnyPrecision] = TypeAdapter(Precision)
DEFAULT = W8()


def with_precision(config: Mapping[str, Any], precision: Precision) -> dict[str, Any]:
    """config.json of a model that trains by `precision`. config: that of the default recipe."""
    if precision == DEFAULT:
        return dict(config)
    found = {name: value for name, value in config.items() if name != "quantization_config"}
    forward = precision.forward
    if forward.quantized:
        found["quantization_config"] = quantization_config(found)
    found["torch_dtype"] = forward.activations
    return {**found, FORWARD: forward.entry(), PRECISION: precision.model_dump(mode="json")}


def precision_of(config: Mapping[str, Any]) -> Precision:
    """Setting that made a model's config.json. Raises TrainingDataError if this version does not know it."""
    entry = config.get(PRECISION)
    if entry is None:
        return DEFAULT
    try:
        return _ADAPTER.validate_python(entry)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in (PRECISION, *first["loc"]))
        raise TrainingDataError(
            f"config.json: {where}: {first['msg']}: train it with the version that made it"
        ) from None
