"""Weights service: pulls checkpoints from the store into a folder that a vLLM server on the same machine reads.

engine of the sampler -- POST /pull {digest, key, kind} --> service --> <folder>/<digest> --> vLLM loads it by its path

May import contracts, inference.engines.vllm_plain and inference.errors.
"""
