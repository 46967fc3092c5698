"""Which recipes (`contracts.precision`) servers match, and settings of a vLLM server that does. No torch."""

from __future__ import annotations

import json
from collections.abc import Mapping

from contracts.precision import Forward


def server_mismatch(server: str, forward: Forward, plain: bool) -> str | None:
    """Why `server` (vLLM, SGLang or TensorRT-LLM) does not match, with the fix, or None. plain: it loads float32
    weights instead of FP8 codes.

    They round activations wherever they load FP8 blocks, and compute routers in their --dtype. vLLM's output head
    follows --dtype unless `head_dtype` is float32 (vllm#48390), SGLang's unless --enable-fp32-lm-head is given.
    """
    kind, dtype = forward.recipe, vllm_dtype(forward)
    if kind == "w8" and not plain:
        return (
            f"{server}'s FP8 kernels round activations, which recipe w8 does not: set trainer.precision to"
            " {kind: w8a8-1x128, activations: bfloat16, router_dtype: bfloat16}, or engine.weights to dequantized"
        )
    if kind == "w8a8-1x128" and plain:
        return (
            f"a dequantized copy has no FP8 kernel, so {server} would not round activations as recipe w8a8-1x128 does:"
            " serve on a GPU with engine.weights fp8"
        )
    if kind not in ("w8", "w8a8-1x128", "bf16", "fp32"):
        return f"{server} is not known to match recipe {kind}: set trainer.precision to w8a8-1x128 or bf16"
    if forward.activations != dtype:
        return (
            f"{server}'s FP8 kernels compute {dtype} activations, not {forward.activations}: set"
            f" trainer.precision.activations to {dtype}"
        )
    if forward.router_dtype != dtype:
        return (
            f"{server} computes routers in its --dtype {dtype}, not {forward.router_dtype}: set"
            f" trainer.precision.router_dtype to {dtype}"
        )
    if forward.head_dtype not in ("float32", dtype):
        return (
            f"{server} computes the output head in {dtype} or float32, not {forward.head_dtype}: set"
            " trainer.precision.head_dtype to float32"
        )
    return None


def vllm_dtype(forward: Forward) -> str:
    """--dtype of a vLLM server that matches."""
    return "bfloat16" if forward.recipe in ("w8a8-1x128", "bf16") else "float32"


def vllm_flags(forward: Forward) -> list[str]:
    """Arguments of a vLLM server that matches."""
    flags = ["--dtype", vllm_dtype(forward)]
    if forward.head_dtype != vllm_dtype(forward):
        flags += ["--hf-overrides", json.dumps({"head_dtype": forward.head_dtype})]
    return flags


def vllm_environment(forward: Forward) -> Mapping[str, str]:
    """Environment of a vLLM server that matches: with DeepGEMM it rounds scales to powers of two unless told not to."""
    return {"VLLM_USE_DEEP_GEMM_E8M0": "0"} if forward.recipe == "w8a8-1x128" else {}
