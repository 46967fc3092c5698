"""Complete vLLM 0.32's in-place reload on a CPU.

- Experts: the copy-back fills the packed parameter with unpacked values, since its method packs on the first load only.
- A tied lm_head: its kernel holds a packed copy of the embedding, which is never renewed, because the checkpoint names
  no lm_head. (Other
  linear layers drop their parameter once it is packed, and are packed again when it is loaded again.)
"""

from __future__ import annotations

from typing import Any

from torch import nn


def repack_experts(model: nn.Module) -> None:
    """Pack the experts of every layer whose kernel requires it.

    Call it once after a reload, since it can't detect packed experts.
    """
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if experts is not None and _packs(experts):
            experts.process_weights_after_loading(module)


def renew_head(model: nn.Module) -> None:
    """Tie a tied head to the embedding again, and let its kernel pack it again."""
    head: Any = getattr(model, "lm_head", None)
    config: Any = getattr(model, "config", None)
    if head is None or not getattr(config, "tie_word_embeddings", False):
        return
    head.weight = model.get_submodule("model.embed_tokens").weight
    if hasattr(head, "cpu_linear"):
        head.quant_method.process_weights_after_loading(head)


def _packs(experts: Any) -> bool:
    """Whether the kernel belongs to vLLM's CPU backend, which packs a parameter's values in place."""
    return any(kind.__name__ == "CPUUnquantizedExperts" for kind in type(experts).__mro__)
