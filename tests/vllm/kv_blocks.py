"""Prints the blocks of keys and values that vLLM reports on a CPU: `python kv_blocks.py FOLDER FLAGS` for each pair.

Runs in the environment of `make test-vllm`. Prints one JSON object: {folder: [blocks, tokens of a block]}.
"""

from __future__ import annotations

import gc
import json
import sys

from vllm import LLM

found = {}
for folder, dtype in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
    llm = LLM(
        folder,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=4,
        dtype="bfloat16",
        kv_cache_dtype=dtype,
    )
    cache = llm.llm_engine.vllm_config.cache_config
    found[folder] = [cache.num_gpu_blocks, cache.block_size]
    del llm
    gc.collect()
print(json.dumps(found))
