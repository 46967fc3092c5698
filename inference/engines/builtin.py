"""Built-in engine: the families of `contracts.architectures` on the CPU, in its own thread.

    event loop --Request--> inbox --> Scheduler.step, again and again --results, pieces--> event loop
                                            ^-- (weights, version) between two steps

Results depend to the bit on weights, tokens and seed, not on the batch, the arrival order, reuse of a cached prefix or
the choice of one or two threads.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from triplane_kernels.cpu import resolve_kernels

from inference.engines.base import Completion, Piece, SamplingParams, check_streamable
from inference.engines.config import BuiltinConfig
from inference.engines.kv import LANES
from inference.engines.requests import Answer, Pieces, Reply, Request
from inference.engines.restricted import Restriction
from inference.engines.scheduler import Scheduler
from inference.engines.weights import Weights, read_weights
from inference.errors import EngineError, EngineStopped, OtherArchitecture, RequestTooLong
from inference.grammar.compiled import Vocabulary, compiled_async
from inference.grammar.matcher import Matcher
from inference.router.residency import Batch, Event

PREFIX_BYTES = 512 << 20
SWITCH_INTERVAL_S = 0.0002
"""Python's switch interval, in seconds: how long another thread may hold the interpreter while the engine's thread
waits. The default of 5 ms may occur once per operation of a forward pass: with a half-busy event loop a workload of 8 s
took 30 s.
"""
PIECE_S = 0.02
"""Shortest time between two deliveries of tokens to streams, in seconds. Each costs the event loop a wake-up for every
stream.
"""
MIN_TEMPERATURE = 1e-6
"""Lowest temperature above 0. Logits that are divided by much less overflow, and their distribution has no numbers."""
_SCORE = SamplingParams(temperature=1.0, max_tokens=1, seed=0)


class BuiltinEngine:
    """See inference.engines.base.Engine."""

    def __init__(
        self,
        directory: Path,
        version: str,
        *,
        max_batch: int = 256,
        threads: int | None = None,
        prefix_bytes: int = PREFIX_BYTES,
        publish: Callable[[Batch], None] | None = None,
        drafts: bool = True,
    ) -> None:
        """directory: a checkpoint. max_batch: largest batch. threads: of torch, None for its default. prefix_bytes:
        memory to reuse the state of finished sequences; 0 disables reuse. publish: gets the events of that memory, in
        blocks of prefix_cache.BLOCK_TOKENS tokens; called in the engine's thread. drafts: whether to guess tokens, see
        `inference.engines.drafts`.
        """
        weights = read_weights(directory)
        self._architecture, self._tokenizer = weights.architecture, directory / "tokenizer.json"
        self._version = version
        self._threads, self._prefix_bytes = threads, prefix_bytes
        self._publish, self._events, self._batches = publish, list[Event](), 0
        self._scheduler = Scheduler(
            weights,
            version,
            max_batch=max_batch,
            prefix_bytes=prefix_bytes,
            deliver=self._collect,
            publish=None if publish is None else self._events.append,
            drafts=drafts,
        )
        self._wake = threading.Event()
        self._closing = False
        self._failure: BaseException | None = None
        self._reloads: deque[tuple[Weights, str, asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._results: list[tuple[Request, Any]] = []
        self._pieces_due = 0.0
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_INTERVAL_S))
        self._thread = threading.Thread(target=self._work, name="builtin-engine", daemon=True)
        self._thread.start()

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate."""
        self._check_request(prompt_ids, params)
        restriction = await self._restriction(prompt_ids, params)
        completion: Completion = await self._submit("generate", prompt_ids, params, restriction)
        return completion

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """See Engine.stream. Pieces come every PIECE_S seconds, if a token is sampled as fast."""
        check_streamable(params)
        self._check_request(prompt_ids, params)
        pieces, restriction = Pieces(), await self._restriction(prompt_ids, params)
        request = self._start("generate", prompt_ids, params, pieces, streams=True, restriction=restriction)
        try:
            while True:
                piece = await pieces.next()
                yield piece
                if piece.finish_reason is not None:
                    return
        finally:
            request.cancelled = True

    def streams(self, params: SamplingParams) -> bool:
        """See Engine.streams."""
        return params.routing_from is None

    def _check_request(self, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        """Raise EngineError or RequestTooLong for a request that can't be served."""
        if params.max_tokens < 1:
            raise EngineError(f"max_tokens is {params.max_tokens}: at least 1 is required")
        foreign = next((token for token in params.stop_token_ids if not 0 <= token < 2**31), None)
        if foreign is not None:  # the engine's thread would fail, for everyone
            raise EngineError(f"stop_token_ids has {foreign}: token ids are in [0, 2**31)")
        if params.temperature != 0:
            _check_temperature(params.temperature)
        if not 0 < params.top_p <= 1:  # nor NaN
            raise EngineError(f"top_p is {params.top_p}: it must be above 0 and at most 1")
        if params.grammar is not None and not params.stop_token_ids:
            raise EngineError("a grammar needs stop_token_ids, which end a completion where it allows that: name some")
        if params.routing_from is not None and not self._architecture.experts:
            raise EngineError(
                f"routing is requested, but the policy is a dense {self._architecture.family} model: set"
                " rollouts.record_routing: false"
            )
        if len(prompt_ids) >= self._architecture.max_positions:
            raise RequestTooLong(
                f"prompt has {len(prompt_ids)} tokens, the policy's context holds {self._architecture.max_positions}:"
                " shorten it"
            )

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score."""
        _check_temperature(temperature)
        if len(token_ids) > self._architecture.max_positions:
            raise RequestTooLong(
                f"{len(token_ids)} tokens to score, the policy's context holds {self._architecture.max_positions}:"
                " shorten them"
            )
        params = _SCORE if temperature == 1.0 else SamplingParams(temperature, 1, 0)
        scores: list[float] | None = await self._submit("score", token_ids, params)
        if scores is None:
            raise EngineStopped("the engine was closed while scoring: open another one")
        return scores

    async def load_weights(self, directory: Path, version: str) -> None:
        """See Engine.load_weights. Raises OtherArchitecture; the current policy then stays."""
        weights = await asyncio.to_thread(read_weights, directory)
        if weights.architecture != self._architecture:
            raise OtherArchitecture(f"{directory} has another architecture than the served policy: open a new engine")
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        self._check_running()
        self._reloads.append((weights, version, loop, done))
        self._wake.set()
        await done
        self._tokenizer = directory / "tokenizer.json"

    async def version(self) -> str:
        """See Engine.version. Raises EngineStopped if there is no next token: the engine was closed or has failed."""
        self._check_running()
        return self._version

    @property
    def room(self) -> float:
        """Tokens that the prefix cache holds."""
        shape = self._architecture
        numbers = shape.layers * shape.kv_heads * (2 * shape.head_dim + LANES)
        return self._prefix_bytes / (numbers * torch.float32.itemsize)

    @property
    def passes(self) -> int:
        """Passes of a sequence that sampled, over all sequences so far; without guesses one for each token."""
        return self._scheduler.passes

    @property
    def stopped(self) -> bool:
        """Whether the engine was closed or its thread failed."""
        return self._closing or self._failure is not None

    async def close(self) -> None:
        """See Engine.close."""
        self._closing = True
        self._wake.set()
        await asyncio.to_thread(self._thread.join)

    async def _restriction(self, prompt_ids: Sequence[int], params: SamplingParams) -> Restriction | None:
        """What restricts the sampling, if anything. May take seconds, for a new grammar.

        Raises EngineError for a grammar that can't be followed.
        """
        if not params.restricted:
            return None

        grammar, width = None, self._architecture.vocabulary
        if params.grammar is not None:
            vocabulary = await asyncio.to_thread(Vocabulary.of, self._tokenizer, width)
            grammar = await compiled_async(params.grammar, vocabulary, params.stop_token_ids)

        def made() -> Restriction:
            matcher = None if grammar is None else Matcher(grammar, width)
            return Restriction(matcher, params.top_p, prompt_ids[len(prompt_ids) - params.begun :])

        return await asyncio.to_thread(made)

    async def _submit(
        self,
        kind: Literal["generate", "score"],
        token_ids: Sequence[int],
        params: SamplingParams,
        restriction: Restriction | None = None,
    ) -> Any:
        answer = Answer(asyncio.get_running_loop())
        request = self._start(kind, token_ids, params, answer, restriction=restriction)
        try:
            return await answer.future
        except asyncio.CancelledError:
            request.cancelled = True
            raise

    def _start(
        self,
        kind: Literal["generate", "score"],
        token_ids: Sequence[int],
        params: SamplingParams,
        reply: Reply,
        *,
        streams: bool = False,
        restriction: Restriction | None = None,
    ) -> Request:
        """Hand a request to the engine's thread."""
        tokens = np.array(token_ids, dtype=np.int64)
        if not len(tokens) or tokens.min() < 0 or tokens.max() >= self._architecture.vocabulary:
            raise EngineError(
                f"a request needs at least one token, each in [0, {self._architecture.vocabulary}): is it another"
                " policy's tokenizer?"
            )
        self._check_running()
        request = Request(kind, tokens, params, reply, asyncio.get_running_loop(), streams, restriction=restriction)
        self._scheduler.waiting.append(request)
        self._check_running()  # check again: the thread may have stopped in between, and would never reply
        self._wake.set()
        return request

    def _check_running(self) -> None:
        if self._failure is not None:
            raise EngineStopped(f"the engine has stopped ({self._failure!r}): open another one") from self._failure
        if self._closing:
            raise EngineStopped("the engine is closed: open another one")

    def _work(self) -> None:
        """Body of the engine's thread."""
        if self._threads is not None:
            torch.set_num_threads(self._threads)
        resolve_kernels()
        try:
            with torch.inference_mode():
                while not self._closing:
                    self._turn()
                self._scheduler.abort()
        except Exception as error:  # noqa: BLE001 (handed to every caller)
            self._failure = error
        self._flush()
        self._fail_rest()

    def _turn(self) -> None:
        if self._scheduler.idle and not self._reloads:
            self._wake.wait()
            self._wake.clear()
        while self._reloads and not self._scheduler.scoring:
            weights, version, loop, done = self._reloads.popleft()
            self._scheduler.reload(weights, version)
            self._version = version
            _call(loop, _resolve, done, None)
        self._scheduler.step()
        if self._scheduler.streamed and time.monotonic() >= self._pieces_due:
            self._scheduler.deliver_sampled()
            self._pieces_due = time.monotonic() + PIECE_S
        self._flush()

    def _collect(self, request: Request, result: Any) -> None:
        self._results.append((request, result))

    def _flush(self) -> None:
        """Publish the events and deliver the results of a step, with one wake-up for each event loop."""
        if self._events and self._publish is not None:
            self._publish(Batch(self._batches, self._events.copy()))
            self._events.clear()
            self._batches += 1
        if not self._results:
            return
        results, self._results = self._results, []
        loops = {id(request.loop): request.loop for request, _ in results}
        for key, loop in loops.items():
            _call(loop, _give_all, [(r.reply, result) for r, result in results if id(r.loop) == key])

    def _fail_rest(self) -> None:
        """Fail the remaining requests when the thread ends: with its own failure, or because of `close`."""
        error = EngineStopped(f"the engine has stopped ({self._failure!r}): open another one")
        for request in self._scheduler.unfinished():
            _call(request.loop, request.reply.fail, error)
        while self._reloads:
            _, _, loop, done = self._reloads.popleft()
            _call(loop, _reject, done, error)


def open_builtin(
    spec: BuiltinConfig, directory: Path, version: str, publish: Callable[[Batch], None] | None = None
) -> BuiltinEngine:
    """Engine with these settings. publish: see BuiltinEngine."""
    return BuiltinEngine(
        directory,
        version,
        max_batch=spec.max_batch,
        threads=spec.threads,
        prefix_bytes=spec.prefix_megabytes << 20,
        drafts=spec.drafts,
        publish=publish,
    )


def _check_temperature(temperature: float) -> None:
    if not temperature >= MIN_TEMPERATURE:  # nor NaN
        raise EngineError(
            f"temperature is {temperature}: it must be at least {MIN_TEMPERATURE:g}, or 0 to sample greedily"
        )


def _call(loop: asyncio.AbstractEventLoop, function: Any, *arguments: Any) -> None:
    try:
        loop.call_soon_threadsafe(function, *arguments)
    except RuntimeError:
        return  # the caller's loop is closed


def _resolve(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _give_all(results: list[tuple[Reply, Any]]) -> None:
    for reply, result in results:
        if isinstance(result, Exception):
            reply.fail(result)
        else:
            reply.give(result)


def _reject(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
