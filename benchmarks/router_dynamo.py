"""Dynamo's side of the `router` benchmark: its hash of a prompt's blocks, and its radix tree's find_matches.

    python -P router_dynamo.py FOLDER BLOCK_TOKENS     answers `FIRST LAST` with its microseconds over those prompts

In the environment of `make test-peers`. Imports nothing of Triplane.
"""

from __future__ import annotations

import importlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def _filled(core: Any, folder: Path, size: int) -> Any:
    tree = core.RadixTree()
    chains, holders = np.load(folder / "chains.npy"), json.loads((folder / "holders.json").read_text())
    for number, (chain, places) in enumerate(zip(chains, holders, strict=True)):
        hashes = core.compute_block_hash_for_seq(chain.tolist(), size)
        for place, depth in places:
            blocks = [
                {"block_hash": number * len(hashes) + block + 1, "tokens_hash": each}
                for block, each in enumerate(hashes[:depth])
            ]
            data = {"stored": {"parent_hash": None, "blocks": blocks}}
            tree.apply_event(place, json.dumps({"event_id": number, "data": data, "dp_rank": 0}).encode())
    return tree


def _main(folder: Path, size: int) -> None:
    core = importlib.import_module("dynamo._core")
    tree, prompts = _filled(core, folder, size), np.load(folder / "prompts.npy", mmap_mode="r")
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        first, last = (int(each) for each in line.split())
        hashing, finding, found = [], [], 0
        for prompt in prompts[first:last]:
            tokens = prompt.tolist()
            begin = time.perf_counter()
            hashes = core.compute_block_hash_for_seq(tokens, size)
            hashed = time.perf_counter()
            scores = tree.find_matches(hashes).scores
            finding.append(time.perf_counter() - hashed)
            hashing.append(hashed - begin)
            found += max(scores.values(), default=0)
        answer = {
            "dynamo_hash_p50_us": statistics.median(hashing) * 1e6,
            "dynamo_find_p50_us": statistics.median(finding) * 1e6,
            "dynamo_blocks_found": found / (last - first),
        }
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
