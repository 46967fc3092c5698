"""Bridge of the `bridge-chaos` benchmark: `python -m benchmarks.bridge_chaos_server FOLDER ENVD`, at
FOLDER/bridge.sock. ENVD: address of the server of its sandboxes.

Its engine draws each token from the whole context before it, so that one wrong token changes all that follow. SIGUSR1
makes the engine lose what it is sampling. Answers each line of its input with its open episodes, until the input ends.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import os
import random
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from benchmarks.bridge_chaos_hosted import Script, hosting
from benchmarks.processes import die_with_parent
from contracts.rpc.listening import Listening
from inference.bridge.checks import Limits
from inference.bridge.registry import Bounds
from inference.bridge.serve import Options, serving
from inference.engines.base import Completion, Piece, SamplingParams
from inference.errors import EngineError, EngineStopped

VOCABULARY = 4096
LEASE_S = 10.0
"""Of all episodes, in seconds: those of clients that do not come back are gone after that."""
_LONGEST_PIECE = 6
_PAUSE_S = 0.015
"""Mean time of a piece."""


class ChainEngine:
    """Token and logprob at a place are a digest of (seed, all tokens before it); where turns end with stop tokens, as
    those of hosted episodes, the tokens are a script's.
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self._losses = 0

    def lose(self) -> None:
        """Fail all streams that run."""
        self._losses += 1

    def streams(self, params: SamplingParams) -> bool:
        """See Engine."""
        return True

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """See Engine."""
        chain = hashlib.blake2b(params.seed.to_bytes(8, "little"), digest_size=8)
        chain.update(np.asarray(prompt_ids, "<i4").tobytes())
        planned = self._script.rest(prompt_ids)[: params.max_tokens] if params.stop_token_ids else None
        left, losses = params.max_tokens if planned is None else len(planned), self._losses
        while left:
            await asyncio.sleep(random.expovariate(1 / _PAUSE_S))
            if self._losses > losses:
                raise EngineStopped("the engine was lost: this is a test")
            ids, logprobs = [], []
            for _ in range(min(left, random.randint(1, _LONGEST_PIECE))):
                drawn = chain.digest()
                ids.append(int.from_bytes(drawn[:4], "little") % VOCABULARY if planned is None else planned.pop(0))
                logprobs.append(-int.from_bytes(drawn[4:], "little") / 2**29)
                chain.update(ids[-1].to_bytes(4, "little"))
            left -= len(ids)
            tokens, scores = np.array(ids, np.int32), np.array(logprobs, np.float32)
            end: Literal["length", "stop"] = "length" if planned is None else "stop"
            yield Piece(tokens, scores, [("chain", 0, len(ids))], None if left else end)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """The bridge streams."""
        raise EngineError("this engine streams only")

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """Nobody asks."""
        raise EngineError("this engine scores nothing")

    async def load_weights(self, directory: Path, version: str) -> None:
        """There are none."""

    async def version(self) -> str:
        """See Engine."""
        return "chain"

    async def close(self) -> None:
        """See Engine."""


async def _serve(folder: Path, envd: str) -> None:
    script = Script()
    engine = ChainEngine(script)
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, engine.lose)
    bounds = Bounds(lease_s=LEASE_S)
    hosted = functools.partial(hosting, envd, script.tokenizer)
    options = Options(Listening(f"unix:{folder / 'bridge.sock'}"), bounds, folder / "journal", hosting=hosted)
    async with serving(engine, Limits(VOCABULARY, 0), options) as bridge:
        print(json.dumps({"open": bridge.sessions.open}), flush=True)
        while await asyncio.to_thread(sys.stdin.readline):
            print(json.dumps({"open": bridge.sessions.open}), flush=True)


if __name__ == "__main__":
    die_with_parent(os.getppid())
    os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
    asyncio.run(_serve(Path(sys.argv[1]), sys.argv[2]))
