"""Read codes and scales of a quantized checkpoint, to see whether its export is sound."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from contracts.artifacts import Artifact
from contracts.checkpoints import WEIGHTS
from contracts.tensor_files import TensorFiles, byte_size

MAX_BYTES = 1 << 30
"""Codes to read. Of larger checkpoints an evenly spaced part of the tensors is read, always the same."""
SCALE = "_scale_inv"
MAX_SATURATED = 0.02
"""Share of codes at the largest magnitude. A block's scale puts its largest weight there, about one code in 16384; a
scale that is too small cuts off many.
"""
MAX_SCALE_RATIO = 1.5
"""Median ratio of scales to those of the parent. An iteration changes weights by a few percent at most."""
LARGEST_CODE = 0x7E
"""Bits of 448, the largest number of float8_e4m3fn, without the sign."""


@dataclass(frozen=True)
class CodeFacts:
    """What the codes and scales of a checkpoint look like."""

    tensors: int
    """Quantized tensors that were read."""
    of: int
    """Quantized tensors of the checkpoint."""
    saturated: float
    """Share of the codes that have the largest magnitude."""
    zero: tuple[str, ...]
    """Tensors whose codes are all zero."""
    scale_ratios: dict[str, float]
    """Median ratio of a tensor's scales to those of the parent, by tensor; empty if the parent was imported."""


def code_facts(checkpoint: Artifact, parent: Artifact) -> CodeFacts | None:
    """Facts about a checkpoint, compared with its parent's; None if nothing in it is quantized.

    Scales are not compared with those of an imported parent: the first optimizer step quantizes all weights again, with
    other scales than an FP8 original may have.
    """
    import torch  # not needed by processes that only list the steps

    files = TensorFiles(checkpoint.directory(), WEIGHTS)
    before = None if "imported" in parent.meta else TensorFiles(parent.directory(), WEIGHTS)
    names = sorted(name for name in files.forms if f"{name}{SCALE}" in files.forms)
    if not names:
        return None
    size = sum(byte_size(files.forms[name]) for name in names)
    read = names[:: -(-size // MAX_BYTES)]
    saturated, codes, zero, ratios = 0, 0, [], {}
    for name in read:
        bits = files.tensor(name).view(-1).view(torch.uint8) & 0x7F
        saturated, codes = saturated + int((bits == LARGEST_CODE).sum()), codes + bits.numel()
        if not bool(bits.any()):
            zero.append(name)
        if before is not None and before.forms.get(f"{name}{SCALE}") == files.forms[f"{name}{SCALE}"]:
            now, then = (each.tensor(f"{name}{SCALE}") for each in (files, before))
            ratios[name] = float((now / then).median())
    return CodeFacts(len(read), len(names), saturated / max(1, codes), tuple(zero), ratios)


def code_faults(facts: CodeFacts) -> Iterator[str]:
    """What is unsound in codes and scales of a policy that was trained from its parent."""
    if facts.saturated > MAX_SATURATED:
        yield f"{facts.saturated:.1%} of the codes are saturated, more than {MAX_SATURATED:.0%}"
    if facts.zero:
        yield f"{len(facts.zero)} tensor(s) are all zeros, first {facts.zero[0]}"
    moved = [name for name, ratio in facts.scale_ratios.items() if not 1 / MAX_SCALE_RATIO <= ratio <= MAX_SCALE_RATIO]
    if moved:
        ratio = facts.scale_ratios[moved[0]]
        yield f"the scales of {len(moved)} tensor(s) changed, first {moved[0]}: {ratio:.3g} times those of its parent"
