"""Served weights against a checkpoint, parameter by parameter.

A parameter in the checkpoint's layout is compared element by element. A layer with a special kernel is checked twice:
do its parameters have the checkpoint's numbers (in any order), and does its output on probes match them? The first
check finds stale or rounded weights, even small differences; the second finds numbers in the wrong order for the
kernel. A parameter without a comparison counts as a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .checkpoint import SCALE, Checkpoint
from .contents import same_numbers
from .probes import expert_errors, linear_error
from .shards import Slice, columns, owned_experts, query_key_value, rows, vocabulary

LINEAR_TOLERANCE = {torch.float32: 1e-7}
"""Share of the largest weight. A float32 product with the identity adds only zeros, so it returns the weights. Other
types: COARSE.
"""
EXPERT_TOLERANCE = {torch.float32: 1e-4}
"""Relative tolerance: two float32 products of up to some thousand terms differ by 1e-6. Other types: COARSE."""
COARSE = 0.1
"""For bfloat16 and FP8 kernels that round activations: two products with an error of 3.7% each are below it, a wrong
order or expert is far above. `same_numbers` finds small differences of weights.
"""

OTHER = "holds other numbers than the checkpoint"
Difference = tuple[str, str]


@torch.inference_mode()
def differences(model: nn.Module, directory: str, exact: bool) -> list[Difference]:
    """(name, difference) of all weights in `model` that differ from the checkpoint. exact: False leaves rounding to the
    probes, for kernels that quantize weights again.
    """
    audit = _Audit(model, Checkpoint(directory), exact)
    found = list(audit.run())
    unseen = sorted(name for name, _ in model.named_parameters() if name not in audit.seen)
    return found + [(name, "is not compared with any tensor of the checkpoint") for name in unseen]


class _Audit:
    """One comparison of a model with a checkpoint, which records the compared parameters."""

    def __init__(self, model: nn.Module, checkpoint: Checkpoint, exact: bool) -> None:
        self._model, self._checkpoint, self._exact = model, checkpoint, exact
        self._kind: torch.dtype = next(part.dtype for name, part in model.named_parameters() if "norm" in name)
        self.seen: set[str] = set()

    def run(self) -> Iterator[Difference]:
        for name, module in self._model.named_modules():
            if name.endswith(("norm", "embed_tokens")):
                yield from self._stored(name, module)
            elif name.endswith("routed_experts"):
                yield from self._experts(name, module)
            elif name == "lm_head":
                tied = self._checkpoint.config.get("tie_word_embeddings") and not self._checkpoint.has("lm_head.weight")
                source = "model.embed_tokens" if tied else name
                yield from self._linear(name, module, [(source, vocabulary(module))])
            elif name.endswith("qkv_proj"):
                base = name.removesuffix("qkv_proj")
                sources = [f"{base}{part}_proj" for part in "qkv"]
                yield from self._linear(name, module, list(zip(sources, query_key_value(module), strict=True)))
            elif name.endswith("mlp.gate_up_proj"):
                base, share = name.removesuffix("gate_up_proj"), rows(module.tp_rank, module.tp_size)
                yield from self._linear(name, module, [(f"{base}{part}_proj", share) for part in ("gate", "up")])
            elif name.endswith(("o_proj", "mlp.down_proj")):
                yield from self._linear(name, module, [(name, columns(module.tp_rank, module.tp_size))])
            elif name.endswith("mlp.gate"):
                yield from self._linear(name, module, [(name, rows(0, 1))])

    def _stored(self, name: str, module: Any) -> Iterator[Difference]:
        """Compare a parameter in the checkpoint's layout; an embedding may be padded."""
        self.seen.add(f"{name}.weight")
        expected = self._checkpoint.weight(f"{name}.weight")
        if hasattr(module, "shard_indices"):
            expected = vocabulary(module)(expected)
        served = module.weight[: len(expected)]
        if not torch.equal(served.cpu(), expected.to(served.dtype)):
            yield _place(name), OTHER

    def _linear(self, name: str, module: Any, sources: list[tuple[str, Slice]]) -> Iterator[Difference]:
        """Compare a layer that multiplies by the named weights, stacked."""
        names = [(f"{source}.weight", share) for source, share in sources]
        if not self._contains(name, module, "", names):
            yield _place(name), OTHER
            return
        expected = torch.cat([share(self._checkpoint.weight(source)) for source, share in names])
        error = linear_error(module, expected)
        if not error <= LINEAR_TOLERANCE.get(self._kind, COARSE):
            yield (
                _place(name),
                f"multiplies by another matrix than the checkpoint's (off by {error:.1e} of its largest weight)",
            )

    def _experts(self, name: str, module: Any) -> Iterator[Difference]:
        """Compare all experts of a layer, which share one kernel."""
        base = f"{name.removesuffix('.routed_experts')}"
        own = owned_experts(module, self._checkpoint.config["num_experts"])
        parallel = module.moe_config
        inner, outer = rows(parallel.tp_rank, parallel.tp_size), columns(parallel.tp_rank, parallel.tp_size)
        place, stale = _place(base), False
        for part, sources in (("w13", [("gate_proj", inner), ("up_proj", inner)]), ("w2", [("down_proj", outer)])):
            names = [(f"{base}.{expert}.{source}.weight", share) for expert in own for source, share in sources]
            if not self._contains(name, module, part, names):
                stale = True
                yield f"{place}.{part}", OTHER
        if stale:
            return
        weights = [
            tuple(
                share(self._checkpoint.weight(f"{base}.{expert}.{source}.weight"))
                for source, share in (("gate_proj", inner), ("up_proj", inner), ("down_proj", outer))
            )
            for expert in own
        ]
        errors = expert_errors(module, own, weights, self._kind)  # type: ignore[arg-type]  # three each
        wrong = [
            expert
            for expert, error in zip(own, errors, strict=True)
            if not error <= EXPERT_TOLERANCE.get(self._kind, COARSE)
        ]
        if wrong:
            shown = ", ".join(str(expert) for expert in wrong[:8])
            yield (
                f"{place}.w13, w2",
                (
                    f"compute something else than the checkpoint's (experts {shown} of {len(own)}, off by up to"
                    f" {max(errors):.1e}): their numbers are not in the order the kernel reads"
                ),
            )

    def _contains(self, name: str, module: nn.Module, prefix: str, sources: list[tuple[str, Slice]]) -> bool:
        """Whether the module's parameters with `prefix` have the numbers of the sources, both codes and scales."""
        mine = {f"{name}.{key}": part for key, part in module.named_parameters(recurse=False) if key.startswith(prefix)}
        self.seen |= set(mine)
        if not self._exact:
            return True
        scaled = self._checkpoint.has(sources[0][0] + SCALE)
        for part in mine.values():
            if not part.numel():
                continue  # dropped by a kernel with a packed copy, which the probe tests
            suffix = SCALE if scaled and part.itemsize > 1 else ""
            stored = torch.cat([share(self._checkpoint.raw(source + suffix)).flatten() for source, share in sources])
            if not same_numbers(part.cpu(), stored):
                return False
        return True


def _place(name: str) -> str:
    """model.layers.1.self_attn.qkv_proj -> layer 1: self_attn.qkv_proj."""
    parts = name.split(".")
    if parts[:2] == ["model", "layers"]:
        return f"layer {parts[2]}: {'.'.join(parts[3:]).removeprefix('mlp.')}"
    return name.removeprefix("model.")
