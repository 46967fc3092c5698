"""Engine for vLLM's token-level HTTP API.

generate --> [attached?] --> /inference/v1/generate (cache salt = version) --> spans marked by the server itself
                 |
                 '-- attach: start or find the server, load the policy, prove it (vllm_update)
a fault of the server --> is it well? if not: start another, attach again (bounded); the call that failed is the
caller's to repeat
"""

from __future__ import annotations

import asyncio
import base64
import logging
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from contracts.errors import SchemaError
from contracts.routing import Routes, decode_routes
from inference.engines.base import (
    Completion,
    FinishReason,
    Piece,
    SamplingParams,
    check_sampled,
    check_streamable,
    empty_piece,
    piece_of,
    require_grammar_from_start,
    require_unrestricted,
)
from inference.engines.config import VllmConfig
from inference.engines.http import JsonClient, reading
from inference.engines.marks import UNMARKED, read_spans
from inference.engines.policies import PolicyDirectory, PolicyFiles, Prepared, Preparer, served_directory
from inference.engines.seeds import mixed_seed
from inference.engines.vllm_keeper import HEALTH_S, VllmKeeper
from inference.engines.vllm_update import (
    Policy,
    is_asleep,
    is_paused,
    load_policy,
    prove_policy,
    score,
    served_version,
    serves,
)
from inference.errors import EngineError, EngineStopped, EngineUnreachable, RequestTooLong, StaleVersion, WeightsDiffer
from inference.grammar.compiled import Vocabulary, compiled_async
from inference.grammar.replay import with_supports

_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_GENERATE = "/inference/v1/generate"
RETRY_S = 5.0
"""Seconds between two checks whether an external server that has failed is back."""
Placer = Callable[[PolicyFiles, bool], Awaitable[Path]]
"""Puts the files of a policy where the server reads them, and returns that folder. The flag: as float32 weights."""
_log = logging.getLogger(__name__)


async def _place_here(files: PolicyFiles, plain: bool) -> Path:
    """Place the files on this machine, whose disk the server shares."""
    return await asyncio.to_thread(served_directory, files, plain)


class VllmEngine:
    """See inference.engines.base.Engine.

    Belongs to one event loop. `keeper` outlives it; without a keeper, a server that it starts ends with it.
    """

    def __init__(
        self,
        config: VllmConfig,
        files: PolicyFiles,
        keeper: VllmKeeper | None = None,
        *,
        preparer: Preparer | None = None,
        place: Placer = _place_here,
        waits: bool = True,
    ) -> None:
        """preparer: shared by several engines. waits: whether a call that failed waits until the server is well again,
        or another one is started, before its error is raised.
        """
        self._config, self._files = config, files
        self._preparer, self._place, self._waits = preparer or Preparer(config), place, waits
        self._keeper = keeper or VllmKeeper(config)
        self._owns_keeper = keeper is None
        self._client: JsonClient | None = None
        self._ready = False
        """Whether the server of `_client` is proven to serve the policy of `_files`."""
        self._proven: set[str] = set()
        """Versions that a server has been proven to serve: requests in flight may still have an earlier one."""
        self._context = 0
        self._lock = asyncio.Lock()
        self._recovery: asyncio.Task[None] | None = None
        self._restarts = 0
        self._failure: EngineError | None = None
        """Raised by every call; of an external server until that is back."""
        self._retry_at = 0.0

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate.

        If the server is dead, another one is started before the error is raised.
        """
        client, body = await self._request(prompt_ids, params)
        async with self._recovering(client):
            answer = await client.call("POST", _GENERATE, body)
        return await self._made(client, answer, params)

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """See Engine.stream. The server names the versions of tokens at the end only, so they are yielded then.

        An empty piece before them says that there is a first token.
        """
        check_streamable(params)
        client, body = await self._request(prompt_ids, params)
        tokens, content, last = list[int](), list[dict[str, Any]](), dict[str, Any]()
        events = client.events(_GENERATE, body | {"stream": True})
        async with self._recovering(client), aclosing(events):
            async for event in events:
                with reading(client.base):
                    for last in event["choices"]:
                        if not tokens and last["token_ids"]:
                            yield empty_piece()
                        tokens += last["token_ids"] or []
                        content += (last["logprobs"] or {}).get("content") or []
        whole = last | {"token_ids": tokens, "logprobs": {"content": content}}
        yield piece_of(await self._made(client, {"choices": [whole]}, params))

    def streams(self, params: SamplingParams) -> bool:
        """See Engine.streams."""
        return params.routing_from is None

    async def _request(self, prompt_ids: Sequence[int], params: SamplingParams) -> tuple[JsonClient, dict[str, Any]]:
        """Client of a server of the policy, and the body of a request."""
        if params.top_p < 1.0:
            require_unrestricted(params, "vllm")
        require_grammar_from_start(params, "vLLM")
        client = await self._attached()
        room = min(params.max_tokens, self._context - len(prompt_ids))
        if room < 1:
            raise RequestTooLong(
                f"prompt has {len(prompt_ids)} tokens, the server's context holds {self._context}: shorten it"
            )
        sampling = {
            "max_tokens": room,
            "temperature": params.temperature,
            "top_p": 1.0,
            "top_k": -1,
            "seed": mixed_seed(params.seed, len(prompt_ids)),
            "logprobs": 0,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": True,
            "detokenize": False,
        }
        if params.grammar is not None:
            sampling["structured_outputs"] = {"structural_tag": params.grammar}
        if params.routing_from is not None:
            sampling["routed_experts_prompt_start"] = params.routing_from
        tokens = [int(token) for token in prompt_ids]
        return client, {"token_ids": tokens, "sampling_params": sampling, "cache_salt": self._files.version}

    async def _made(self, client: JsonClient, answer: dict[str, Any], params: SamplingParams) -> Completion:
        """The completion in an answer, its versions proven; under a grammar with what that left to draw from, which
        vLLM does not return. Raises EngineError.
        """
        with reading(client.base):
            completion = self._completion(answer, routed=params.routing_from is not None)
        if params.grammar is None:
            return completion
        vocabulary = await asyncio.to_thread(self._vocabulary)
        check_sampled(completion, params.max_tokens, vocabulary.size)
        # compiled here, so that the thread below finds it and waits for no other grammar
        await compiled_async(params.grammar, vocabulary, params.stop_token_ids)
        return await asyncio.to_thread(with_supports, completion, params, vocabulary)

    def _vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._files.file("tokenizer.json"), self._files.config()["vocab_size"])

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score. Only at temperature 1, and for one token less than the context length."""
        client = await self._attached()
        if temperature != 1.0:
            raise EngineError(f"vLLM scores at temperature 1 only, not {temperature}")
        if len(token_ids) >= self._context:
            raise RequestTooLong(
                f"{len(token_ids)} tokens to score, the server's context holds {self._context}: shorten them"
            )
        version = self._files.version
        logprobs, marks = await score(client, list(token_ids), version)
        self._check_spans(marks, {version}, 1)
        return logprobs

    async def load_weights(self, directory: Path, version: str) -> None:
        """See Engine.load_weights.

        New requests wait; those in flight finish with the old weights, or end with "abort".
        """
        await self.load(PolicyDirectory(directory, version))

    async def load(self, files: PolicyFiles) -> None:
        """Like `load_weights`, for files that are wherever `files` says."""
        async with self._lock:
            former, self._files, self._ready = self._files, files, False
            try:
                await self._attach()
            except BaseException:
                self._files = former
                raise

    def doubt(self) -> None:
        """Prove the server's weights again before its next use."""
        self._ready = False

    async def mark(self) -> str:
        """Version that the external server names now, which may be unproven or another client's."""
        return await served_version(await self._connect(self._config.base_url or ""))

    async def check(self, timeout_s: float) -> None:
        """Check that the server replies in time and names the policy.

        Raises EngineUnreachable without a reply, EngineStopped after a restart, StaleVersion for another policy.
        """
        assert self._client is not None, "checked after it was attached"
        try:
            async with asyncio.timeout(timeout_s):
                found = await served_version(self._client)
        except TimeoutError:
            raise EngineUnreachable(f"{self._client.base} did not reply within {timeout_s:g} s") from None
        if found == UNMARKED:
            raise EngineStopped(f"{self._client.base} was restarted")
        if found != self._files.version:
            raise StaleVersion(f"{self._client.base} serves {found[:24]}, not policy {self._files.version[:12]}")

    async def check_failure(self) -> None:
        """Raise the failure after which this engine starts no server any more: only another engine can serve again."""
        if self._failure is not None and self._config.base_url is None:
            raise self._failure

    async def version(self) -> str:
        """See Engine.version. Attaches first, so that it returns the requested version or raises."""
        return await served_version(await self._attached())

    async def close(self) -> None:
        """See Engine.close. The server stays with its keeper."""
        self._failure = self._failure or EngineStopped("the engine is closed: open another one")
        if self._recovery is not None:
            self._recovery.cancel()
            await asyncio.gather(self._recovery, return_exceptions=True)
        await self._drop_client()
        if self._owns_keeper:
            await asyncio.to_thread(self._keeper.stop)

    async def _attached(self) -> JsonClient:
        """Client of a server that is proven to serve the policy."""
        async with self._lock:
            if self._failure is not None and not await self._is_back():
                raise self._failure
            if not self._ready:
                await self._attach()
            assert self._client is not None
            return self._client

    async def _is_back(self) -> bool:
        """Whether an external server that has failed passes its health check again."""
        if self._config.base_url is None or self._client is None or time.monotonic() < self._retry_at:
            return False
        if not await self._client.is_healthy("/health", HEALTH_S):
            self._retry_at = time.monotonic() + RETRY_S
            return False
        self._failure, self._ready = None, False
        return True

    async def _attach(self) -> None:
        """Make a server serve the policy: the running one, or a new one if there is none or it can't load the
        weights.
        """
        address = self._config.base_url or self._keeper.address
        if address is None or not await self._adopt(address):
            await self._start_afresh()

    async def _adopt(self, address: str) -> bool:
        """Load the policy into the running server. Returns False if that failed and another server may be started."""
        client = await self._connect(address)
        prepared = await self._prepared(client)
        try:
            asleep = self._config.idle == "sleep" and await is_asleep(client)
            if asleep or await is_paused(client) or not await serves(client, prepared.version):
                policy = await self._policy(prepared)
                await load_policy(client, policy, self._config.drain_s, asleep=asleep)
            await self._welcome(client)
        except (WeightsDiffer, EngineUnreachable, EngineStopped) as error:
            if self._config.base_url is not None:
                raise
            _log.warning("restarting vLLM: %s", error)
            return False
        return True

    async def _start_afresh(self) -> None:
        prepared = await self._prepared(None)
        policy = await self._policy(prepared)
        client = await self._connect(await self._keeper.start(policy.served))
        try:
            await prove_policy(client, policy)
        except BaseException:
            await asyncio.to_thread(self._keeper.stop)
            raise
        await self._welcome(client)

    async def _policy(self, prepared: Prepared) -> Policy:
        """The policy, with its files where the server reads them."""
        served = await self._place(self._files, prepared.plain)
        return Policy(prepared.version, served, prepared.probes, self._config.exact, prepared.tolerance)

    async def _welcome(self, client: JsonClient) -> None:
        self._context = await client.read("GET", "/v1/models", lambda reply: int(reply["data"][0]["max_model_len"]))
        self._ready = True
        self._retry_at = 0.0
        self._proven.add(self._files.version)

    async def _connect(self, address: str) -> JsonClient:
        """Client of this address: the existing one, with its requests in flight, or a new one."""
        if self._client is None or self._client.base != address.rstrip("/"):
            await self._drop_client()
            self._client = JsonClient(
                address,
                connections=self._config.connections,
                timeout_s=self._config.timeout_s,
                retries=self._config.retries,
            )
        return self._client

    async def _prepared(self, client: JsonClient | None) -> Prepared:
        """Expected replies of a server of the policy. client: of a running server."""
        plain = self._config.weights == "dequantized"
        if self._config.weights == "auto":
            plain = await self._is_cpu(client)
        return await self._preparer.prepared(self._files, plain)

    async def _is_cpu(self, client: JsonClient | None) -> bool:
        if self._config.base_url is None or client is None:
            return await asyncio.to_thread(lambda: self._keeper.device) == "cpu"
        config = await client.read("GET", "/server_info", lambda reply: str(reply["vllm_config"]))
        return "device_config=cpu" in config

    @asynccontextmanager
    async def _recovering(self, client: JsonClient) -> AsyncGenerator[None]:
        """Raise the errors of a call, after a fault of the server once that is replaced, unless nobody `waits`."""
        try:
            yield
        except (EngineUnreachable, EngineStopped):
            if self._waits or self._config.base_url is None:
                recovery = self._begin_recovery(client)
                if self._waits:
                    await asyncio.shield(recovery)  # canceling the call does not cancel the replacement
            else:
                self.doubt()
            raise

    def _begin_recovery(self, client: JsonClient) -> asyncio.Task[None]:
        """Replace the server of `client` in the background, if it is dead."""
        if self._recovery is None or self._recovery.done():
            self._recovery = asyncio.create_task(self._recover(client))
        return self._recovery

    async def _recover(self, client: JsonClient) -> None:
        async with self._lock:
            if client is not self._client:
                return
            try:
                if self._config.base_url is not None:
                    await self._wait_for(client)
                elif not await self._keeper.answers():
                    await self._restart()
            except EngineError as error:
                self._failure = error

    async def _wait_for(self, client: JsonClient) -> None:
        """Wait until an external server passes its health check; its weights are then checked again."""
        deadline = time.monotonic() + self._config.startup_timeout_s
        while not await client.is_healthy("/health", HEALTH_S):
            if time.monotonic() > deadline:
                raise EngineStopped(
                    f"{client.base} failed its health check for {self._config.startup_timeout_s:g} s: restart it"
                )
            self._ready = False
            await asyncio.sleep(1.0)

    async def _restart(self) -> None:
        words = self._keeper.last_words()
        if self._restarts >= self._config.max_restarts:
            raise EngineStopped(f"vLLM died {self._restarts + 1} times, see engine.max_restarts: {words}")
        self._restarts += 1
        _log.warning("vLLM died, restarting it (%d of %d): %s", self._restarts, self._config.max_restarts, words)
        await asyncio.to_thread(self._keeper.stop)
        self._ready = False
        await self._start_afresh()

    def _completion(self, answer: dict[str, Any], *, routed: bool) -> Completion:
        (choice,) = answer["choices"]
        tokens, content = choice["token_ids"] or [], (choice["logprobs"] or {}).get("content") or []
        if [entry["token_id"] for entry in content] != tokens:
            raise EngineError(
                f"vLLM's answer has {len(tokens)} tokens and {len(content)} logprobs that do not belong to them"
            )
        reason = _REASONS.get(choice["finish_reason"])
        if reason is None:
            raise EngineError(
                f"vLLM ended a completion with {choice['finish_reason']!r}: known are stop, length, abort"
            )
        spans = self._check_spans(choice["weight_versions"], self._proven, len(tokens))
        routes = _routes(choice.get("routed_experts")) if routed else None
        return Completion(tokens, [entry["logprob"] for entry in content], spans, reason, routes)

    def _check_spans(
        self, marks: list[dict[str, Any]] | None, known: set[str], count: int
    ) -> list[tuple[str, int, int]]:
        """Versions with which the server marked its tokens.

        Raises StaleVersion unless they cover all tokens and are known.
        """
        try:
            address = self._config.base_url or self._keeper.address
            return read_spans(f"vLLM at {address}", marks, count, self._files.version, known)
        except EngineUnreachable:
            self._ready = False
            raise

    async def _drop_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


def _routes(encoded: str | None) -> Routes | None:
    """Routing in a reply: the base64 text of a NumPy file, or None from a server without
    `--enable-return-routed-experts`.
    """
    if encoded is None:
        return None
    try:
        return decode_routes(base64.b64decode(encoded, validate=True))
    except (SchemaError, ValueError) as error:
        raise EngineError(f"vLLM's routed experts can't be read: {error}") from None
