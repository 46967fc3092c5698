"""Engine for TensorRT-LLM's gRPC server (`trtllm-serve --grpc`), by the messages of `smg-grpc-proto`.

generate --> server of the current policy --> Generate: tokens, log probabilities; the version is the server's
load --> start a server of the new policy --> compare probes --> it serves; the old one ends after its requests

A server serves one policy all its life, since the protocol replaces no weights. One at `address` is only compared.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
from smg_grpc_proto.generated import trtllm_service_pb2 as pb2
from smg_grpc_proto.generated.trtllm_service_pb2_grpc import TrtllmServiceStub

from contracts.retries import backoff_s
from inference.engines.base import Completion, FinishReason, SamplingParams, StreamsWhole, require_unrestricted
from inference.engines.config import TrtllmConfig
from inference.engines.guarded import GuardedServer, free_port
from inference.engines.policies import PolicyDirectory, PolicyFiles, Prepared, Preparer, served_directory
from inference.engines.probes import difference
from inference.engines.seeds import mixed_seed
from inference.errors import EngineError, EngineStopped, EngineUnreachable, RequestTooLong, StaleVersion, WeightsDiffer

HEALTH_S = 10.0
_FIRST_PAUSE_S, _POLL_S = 0.1, 0.5
_MESSAGE_BYTES = 32 * 2**20
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "cancelled": "abort", "timeout": "abort"}
_CODES = {
    grpc.StatusCode.UNAVAILABLE: EngineUnreachable,
    grpc.StatusCode.DEADLINE_EXCEEDED: EngineUnreachable,
    grpc.StatusCode.CANCELLED: EngineUnreachable,
    grpc.StatusCode.INVALID_ARGUMENT: EngineError,
    grpc.StatusCode.UNIMPLEMENTED: EngineError,
}
"""Errors by the server's status; others mean that it failed (EngineStopped)."""
_log = logging.getLogger(__name__)


class TrtllmEngine(StreamsWhole):
    """See inference.engines.base.Engine. Belongs to one event loop."""

    def __init__(self, config: TrtllmConfig, files: PolicyFiles) -> None:
        self._config, self._files = config, files
        self._preparer = Preparer(config)
        self._server: _Server | None = None
        """Server of new requests; proven."""
        self._retiring: set[asyncio.Task[None]] = set()
        self._lock = asyncio.Lock()
        self._restarts = 0
        self._closed = False

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate. At temperature 1 or 0 only: the server returns log probabilities of temperature 1."""
        require_unrestricted(params, "trtllm")
        if params.temperature not in (0.0, 1.0):
            raise EngineError(
                f"TensorRT-LLM's gRPC returns log probabilities of temperature 1, not of {params.temperature:g}: sample"
                " at temperature 1, or use another engine"
            )
        async with self._serving() as server:
            room = min(params.max_tokens, server.context - len(prompt_ids))
            if room < 1:
                raise RequestTooLong(
                    f"prompt has {len(prompt_ids)} tokens, the server's context holds {server.context}: shorten it"
                )
            greedy = params.temperature == 0.0
            request = pb2.GenerateRequest(
                request_id=uuid.uuid4().hex,
                tokenized=pb2.TokenizedInput(input_token_ids=prompt_ids),
                sampling_config=_sampling(seed=mixed_seed(params.seed, len(prompt_ids)), top_k=1 if greedy else 0),
                output_config=pb2.OutputConfig(logprobs=1, exclude_input_from_output=True),
                max_tokens=room,
                stop_token_ids=params.stop_token_ids,
                ignore_eos=True,
                include_stop_token_in_output=True,
            )
            return _completion(await server.generate(request), server.version)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score. Only at temperature 1, and for one token less than the context length."""
        if temperature != 1.0:
            raise EngineError(f"TensorRT-LLM scores at temperature 1 only, not {temperature}")
        async with self._serving() as server:
            return await server.score(token_ids)

    async def load_weights(self, directory: Path, version: str) -> None:
        """See Engine.load_weights. New requests wait; those in flight finish on the old policy's server."""
        async with self._lock:
            former, self._files = self._files, PolicyDirectory(directory, version)
            try:
                await self._attach()
            except BaseException:
                self._files = former
                raise

    async def version(self) -> str:
        """See Engine.version. Attaches first, so that it returns the requested version or raises."""
        async with self._serving() as server:
            return server.version

    async def close(self) -> None:
        """See Engine.close. Ends the servers that were started here."""
        self._closed = True
        await asyncio.gather(*self._retiring, return_exceptions=True)
        server, self._server = self._server, None
        if server is not None:
            await server.stop()

    @asynccontextmanager
    async def _serving(self) -> AsyncIterator[_Server]:
        """The server of the policy, for one request."""
        async with self._lock:
            if self._closed:
                raise EngineStopped("the engine is closed: open another one")
            server = self._server
            if server is None or server.version != self._files.version or server.doubted:
                server = await self._attach()
            server.in_flight += 1
        try:
            yield server
        except (EngineUnreachable, EngineStopped):
            server.doubted = True
            raise
        finally:
            server.in_flight -= 1

    async def _attach(self) -> _Server:
        """Make a server serve the policy, and new requests use it."""
        old = self._server
        if old is not None and old.version == self._files.version and await old.answers():
            old.doubted = False
            return old
        prepared = await self._preparer.prepared(self._files, self._config.weights == "dequantized")
        served = await asyncio.to_thread(served_directory, self._files, prepared.plain)
        if self._config.address is not None:
            new = old or _Server(self._config, self._config.address, None)
        else:
            failed = old is not None and old.version == self._files.version
            if old is not None and failed:
                self._count_restart(old)
            if old is not None and (failed or not self._config.overlap):
                self._server = None
                await self._retire(old)
                old = None
            port = free_port()
            child = GuardedServer(self._command(served, port), self._environment)
            new = _Server(self._config, f"127.0.0.1:{port}", child)
        try:
            await new.prove(prepared, served, int(self._files.config()["max_position_embeddings"]))
            if self._closed:
                raise EngineStopped("the engine was closed while its server started")
        except BaseException:
            if new is not self._server:
                await new.stop()
            raise
        if old is not None and old is not new:
            task = asyncio.create_task(self._retire(old))
            self._retiring.add(task)
            task.add_done_callback(self._retiring.discard)
        self._server = new
        return new

    def _count_restart(self, dead: _Server) -> None:
        if self._restarts >= self._config.max_restarts:
            raise EngineStopped(
                f"TensorRT-LLM died {self._restarts + 1} times, see engine.max_restarts: {dead.last_words()}"
            )
        self._restarts += 1
        _log.warning(
            "TensorRT-LLM died, starting another (%d of %d): %s",
            self._restarts,
            self._config.max_restarts,
            dead.last_words(),
        )

    async def _retire(self, server: _Server) -> None:
        """End a server after its requests, or after `drain_s` seconds, or with the engine."""
        until = time.monotonic() + self._config.drain_s
        try:
            while server.in_flight and server.alive and not self._closed and time.monotonic() < until:
                await asyncio.sleep(_POLL_S)
        finally:
            await server.stop()

    def _command(self, directory: Path, port: int) -> list[str]:
        config = self._config
        usual = ["--grpc", "--host", "127.0.0.1", "--port", str(port), "--backend", "pytorch"]
        usual += ["--tp_size", str(config.tensor_parallel)]
        usual += ["--max_seq_len", str(self._files.config()["max_position_embeddings"])]
        return [*config.program, "serve", str(directory), *usual, *config.flags]

    def _environment(self, scratch: Path) -> dict[str, str]:
        return {**os.environ, "HF_HUB_OFFLINE": "1", "TMPDIR": str(scratch), **self._config.env}


class _Server:
    """One server, and the policy that it was proven to serve."""

    def __init__(self, config: TrtllmConfig, address: str, child: GuardedServer | None) -> None:
        """child: its process, if it was started here."""
        self.address, self.version, self.context = address, "", 0
        self.in_flight = 0
        self.doubted = False
        """Whether a request failed since it last answered."""
        self._stopped = False
        self._config, self._child = config, child
        options = [
            ("grpc.max_receive_message_length", _MESSAGE_BYTES),
            ("grpc.max_send_message_length", _MESSAGE_BYTES),
        ]
        self._channel = grpc.aio.insecure_channel(address, options=options)
        self._stub: Any = TrtllmServiceStub(self._channel)
        self._room = asyncio.Semaphore(config.connections)

    @property
    def alive(self) -> bool:
        """Whether its process runs; True for a server that was not started here."""
        return self._child is None or self._child.alive

    def last_words(self) -> str:
        """End of its log."""
        return self._child.last_words() if self._child is not None else "it was not started here"

    async def answers(self) -> bool:
        """Whether it says that it is well. Raises EngineUnreachable once it is stopped."""
        try:
            with self._until_stopped():
                found = await self._stub.HealthCheck(pb2.HealthCheckRequest(), timeout=HEALTH_S)
            return bool(found.status == "OK")
        except grpc.aio.AioRpcError:
            return False

    async def prove(self, prepared: Prepared, served: Path, longest: int) -> None:
        """Wait for it and compare its log probabilities with the policy's. longest: context of the policy."""
        await self._until_it_answers()
        info = await self._call(self._stub.GetModelInfo, pb2.GetModelInfoRequest())
        self.context = min(info.max_seq_len or longest, longest)
        if not prepared.probes and self._child is None and info.model_id != str(served):
            raise StaleVersion(
                f"{self.address} serves {info.model_id!r}, which is not shown to be policy {prepared.version[:12]}:"
                f" start it on {served}, or raise engine.probe_gigabytes"
            )
        scored = await asyncio.gather(*(self.score(probe.token_ids) for probe in prepared.probes))
        found = difference(prepared.probes, scored, prepared.tolerance)
        if found:
            raise WeightsDiffer(
                f"{self.address} does not serve policy {prepared.version[:12]} from {served}: {found}. It is not used:"
                " start a server on that checkpoint"
            )
        self.version, self.doubted = prepared.version, False

    async def generate(self, request: pb2.GenerateRequest) -> pb2.GenerateComplete:
        """The whole answer of a request. Canceling this cancels it at the server. Raises EngineUnreachable if the
        server is stopped meanwhile.
        """
        async with self._room:
            for attempt in range(self._config.retries + 1):
                try:
                    with self._until_stopped():
                        async for response in self._stub.Generate(request, timeout=self._config.timeout_s):
                            if response.HasField("complete"):
                                return response.complete
                    raise EngineStopped(f"{self.address} ended a request without an answer")
                except grpc.aio.AioRpcError as error:
                    lost = error.code() == grpc.StatusCode.UNAVAILABLE
                    if attempt == self._config.retries or not lost or not self.alive:
                        raise self._error(error) from error
                    await asyncio.sleep(backoff_s(attempt + 1, _FIRST_PAUSE_S))
        raise AssertionError("the loop returns or raises")

    async def score(self, token_ids: Sequence[int]) -> list[float]:
        """Log probability of each token given the previous ones; 0.0 at index 0.

        Entry t of the answer has the distribution after token t under the name of token t (TensorRT-LLM's servicer
        pairs them so): the next token is looked up among its alternatives.
        """
        if len(token_ids) >= self.context:
            raise RequestTooLong(
                f"{len(token_ids)} tokens to score, the server's context holds {self.context}: shorten them"
            )
        request = pb2.GenerateRequest(
            request_id=uuid.uuid4().hex,
            tokenized=pb2.TokenizedInput(input_token_ids=token_ids),
            sampling_config=_sampling(seed=0, top_k=1),
            output_config=pb2.OutputConfig(prompt_logprobs=1, exclude_input_from_output=True),
            max_tokens=1,
            ignore_eos=True,
        )
        entries = (await self.generate(request)).prompt_logprobs
        found = [0.0]
        for entry, token in zip(entries, token_ids[1:], strict=False):
            each = next((top.logprob for top in entry.top_logprobs if top.token_id == token), None)
            if each is None:
                break
            found.append(each)
        if len(found) != len(token_ids):
            raise EngineError(
                f"{self.address} returned no log probability of prompt token {len(found)}: it must be a TensorRT-LLM"
                " whose prompt_logprobs contain the prompt's own tokens"
            )
        return found

    async def stop(self) -> None:
        """Close the connection, and end the process if it was started here. Idempotent."""
        self._stopped = True
        await self._channel.close()
        if self._child is not None:
            await asyncio.to_thread(self._child.stop)

    async def _until_it_answers(self) -> None:
        began = time.monotonic()
        while not await self.answers():
            if not self.alive:
                raise EngineError(f"TensorRT-LLM ended while it started: {self.last_words()}")
            if time.monotonic() - began > self._config.startup_timeout_s:
                raise EngineStopped(
                    f"{self.address} did not answer a health check for {self._config.startup_timeout_s:g} s (see"
                    f" engine.startup_timeout_s): {self.last_words()}"
                )
            await asyncio.sleep(_POLL_S)

    async def _call(self, call: Any, request: Any) -> Any:
        try:
            with self._until_stopped():
                return await call(request, timeout=self._config.timeout_s)
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error

    @contextmanager
    def _until_stopped(self) -> Iterator[None]:
        """Raise EngineUnreachable for a call that `stop` ends, or that comes after it.

        gRPC raises CancelledError in calls whose channel is closed, as if their task had been cancelled.
        """
        try:
            yield
        except (asyncio.CancelledError, grpc.aio.UsageError):
            task = asyncio.current_task()
            if not self._stopped or (task is not None and task.cancelling()):
                raise
            raise EngineUnreachable(
                f"TensorRT-LLM at {self.address} was stopped before it answered: ask again"
            ) from None

    def _error(self, error: grpc.aio.AioRpcError) -> EngineError:
        kind = _CODES.get(error.code(), EngineStopped)
        return kind(f"TensorRT-LLM at {self.address} answered {error.code().name}: {error.details()}")


def _sampling(*, seed: int, top_k: int) -> pb2.SamplingConfig:
    """Sampling from the whole distribution, or greedily with top_k 1; 0 is no limit."""
    return pb2.SamplingConfig(
        beam_width=1,
        num_return_sequences=1,
        temperature=1.0,
        top_k=top_k,
        top_p=1.0,
        min_p=0.0,
        repetition_penalty=1.0,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        seed=seed,
    )


def _completion(answer: pb2.GenerateComplete, version: str) -> Completion:
    tokens = list(answer.output_token_ids)
    reason = _REASONS.get(answer.finish_reason)
    if reason is None:
        raise EngineStopped(f"TensorRT-LLM ended a completion with {answer.finish_reason!r}")
    # the server reports 0.0 for a token that it has no log probability of: such a token lacks an alternative
    known = [
        entry.logprob
        for token, entry in zip(tokens, answer.logprobs, strict=False)
        if token == entry.token_id and token in {top.token_id for top in entry.top_logprobs}
    ]
    if len(known) != len(tokens):
        raise EngineError(
            f"TensorRT-LLM's answer has {len(tokens)} tokens and {len(known)} log probabilities that belong to them"
        )
    spans = [(version, 0, len(tokens))] if tokens else []
    return Completion(tokens, known, spans, reason)
