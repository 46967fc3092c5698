"""Engine for SGLang's native HTTP API (tested against 0.5.23's interface).

generate --> [attached?] --> /generate (cache salt = version) --> spans marked by the server itself
                 |
                 '-- attach: wait for the server, load the policy, compare probes, mark it
load: own requests end --> /pause_generation (abort) --> /update_weights_from_disk (unproven mark, empty cache) -->
/continue_generation --> probes --> /update_weight_version

The server is somebody else's: one that does not answer is waited for, and loads the policy again if it was restarted.
The call that failed is the caller's to repeat.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from contracts.errors import SchemaError
from contracts.supports import SupportsWriter
from inference.engines.base import (
    Completion,
    FinishReason,
    SamplingParams,
    StreamsWhole,
    require_grammar_from_start,
)
from inference.engines.config import SglangConfig
from inference.engines.http import JsonClient, reading
from inference.engines.marks import Spans, fresh_mark, read_spans, unproven
from inference.engines.policies import PolicyDirectory, PolicyFiles, Prepared, Preparer, served_directory
from inference.engines.probes import difference
from inference.engines.seeds import SEED_BITS
from inference.errors import EngineError, EngineStopped, EngineUnreachable, RequestTooLong, StaleVersion, WeightsDiffer

PREFERENCES = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Parameters for which the server may have been given other preferences: sampling from the whole distribution."""
HEALTH_S = 5.0
OTHERS_S = 60.0
_PAUSE_S = 1.0
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_log = logging.getLogger(__name__)


class SglangEngine(StreamsWhole):
    """See inference.engines.base.Engine. Belongs to one event loop."""

    def __init__(self, config: SglangConfig, files: PolicyFiles) -> None:
        self._config, self._files = config, files
        self._client = JsonClient(
            config.base_url, connections=config.connections, timeout_s=config.timeout_s, retries=config.retries
        )
        self._preparer = Preparer(config)
        self._ready = False
        """Whether the server is proven to serve the policy of `_files`."""
        self._proven: set[str] = set()
        """Versions that the server was proven to serve: requests in flight may still have an earlier one."""
        self._own_mark = ""
        """Mark of the latest attempt of this client to load a policy."""
        self._longest = 0
        """Tokens of the longest prompt that the server accepts."""
        self._widest = 0
        """Tokens of the largest support that the server returns; 0: it returns none."""
        self._lock = asyncio.Lock()
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate.

        SGLang also ends at the end-of-sequence tokens of the model and its tokenizer. One that is no stop token of the
        request is a token like any other: the completion goes on after it. Under a grammar, which has ended there, that
        is an EngineError. Restricted sampling also sets top_k, to the size of the largest support that the server
        returns.
        """
        require_grammar_from_start(params, "SGLang")
        tokens, logprobs, log_mass = list[int](), list[float](), list[float]()
        supports, spans = SupportsWriter(), list[tuple[str, int, int]]()
        async with self._attached() as version:
            while True:
                left = params.max_tokens - len(tokens)
                part = await self._sample([*prompt_ids, *tokens], params, left, version)
                spans += [(mark, start + len(tokens), end + len(tokens)) for mark, start, end in part.spans]
                tokens += part.token_ids
                logprobs += part.logprobs
                log_mass += part.log_mass or []
                if part.supports is not None:
                    supports.extend(part.supports)
                ended = part.finish_reason != "stop" or tokens[-1] in params.stop_token_ids
                full = len(tokens) == params.max_tokens or len(prompt_ids) + len(tokens) > self._longest
                if ended or full:
                    reason: FinishReason = part.finish_reason if ended else "length"
                    made = Completion(tokens, logprobs, _joined(spans), reason)
                    if not params.restricted:
                        return made
                    return replace(made, supports=supports.supports(), log_mass=log_mass or None)
                if params.grammar is not None:
                    raise EngineError(
                        f"SGLang ended at the model's end-of-sequence token {tokens[-1]}, where the grammar ends, too:"
                        " name the end of a turn as eos_token_id in the checkpoint's config.json, and nothing else"
                    )

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score. Only at temperature 1."""
        if temperature != 1.0:
            raise EngineError(f"SGLang scores at temperature 1 only, not {temperature}")
        async with self._attached() as version:
            logprobs, mark = await self._score(token_ids, version)
            if mark != version:
                self._ready = False
                raise StaleVersion(f"{self._client.base} scored with {mark[:24]}, the policy is {version[:12]}")
            return logprobs

    async def load_weights(self, directory: Path, version: str) -> None:
        """See Engine.load_weights. New requests wait; those in flight end with the old weights, or with "abort"."""
        async with self._lock:
            former, self._files = self._files, PolicyDirectory(directory, version)
            self._ready = False
            try:
                await self._attach()
            except BaseException:
                self._files = former
                raise

    async def version(self) -> str:
        """See Engine.version. Attaches first, so that it returns the requested version or raises."""
        async with self._attached():
            return await self._mark()

    async def close(self) -> None:
        """See Engine.close. The server keeps running."""
        self._closed = True
        await self._client.close()

    @asynccontextmanager
    async def _attached(self) -> AsyncIterator[str]:
        """A request to a server that is proven to serve the policy, whose version it gets. A fault makes the next one
        attach again.
        """
        async with self._lock:
            if self._closed:
                raise EngineStopped("the engine is closed: open another one")
            if not self._ready:
                await self._attach()
            version = self._files.version
            self._in_flight += 1
            self._idle.clear()
        try:
            yield version
        except (EngineUnreachable, EngineStopped, StaleVersion):
            self._ready = False
            raise
        finally:
            self._in_flight -= 1
            if not self._in_flight:
                self._idle.set()

    async def _attach(self) -> None:
        await self._wait_until_ready()
        self._longest, self._widest, deterministic = await self._client.read("GET", "/server_info", _limits)
        if not deterministic:
            _log.warning(
                "%s ignores seeds: start it with --enable-deterministic-inference for samples that can be repeated",
                self._client.base,
            )
        prepared = await self._preparer.prepared(self._files, self._config.weights == "dequantized")
        if await self._settled_mark() != self._files.version:
            await self._load(prepared)
        elif self._files.version not in self._proven:
            await self._prove(prepared, self._files.version)
        self._proven.add(self._files.version)
        self._ready = True

    async def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + self._config.startup_timeout_s
        while not await self._client.is_healthy("/ready", HEALTH_S):
            if time.monotonic() > deadline:
                raise EngineStopped(
                    f"{self._client.base}/ready has not answered for {self._config.startup_timeout_s:g} s: start SGLang"
                    " there, or POST /continue_generation if it is paused"
                )
            await asyncio.sleep(_PAUSE_S)

    async def _load(self, prepared: Prepared) -> None:
        """Replace the server's weights, prove them, and mark them with the version."""
        served = await asyncio.to_thread(served_directory, self._files, prepared.plain)
        mark = self._own_mark = fresh_mark(prepared.version)
        try:
            async with asyncio.timeout(self._config.drain_s):
                await self._idle.wait()
        except TimeoutError:
            _log.warning("requests still run after %g s: they are aborted", self._config.drain_s)
        await self._client.call("POST", "/pause_generation", {"mode": "abort"})
        try:
            body = {"model_path": str(served), "weight_version": mark, "flush_cache": True}
            await self._client.call("POST", "/update_weights_from_disk", body)
        except (EngineUnreachable, EngineStopped):
            raise
        except EngineError as error:
            raise EngineError(
                f"{error}: it must read {served} under this path, and have been started on weights of this kind"
                f" (engine.weights is {self._config.weights})"
            ) from error
        finally:
            await self._client.call("POST", "/continue_generation", {"torch_empty_cache": False})
        await self._prove(prepared, mark)
        body = {"new_version": prepared.version, "abort_all_requests": False}
        await self._client.call("POST", "/update_weight_version", body)
        await self._require(prepared.version)

    async def _prove(self, prepared: Prepared, mark: str) -> None:
        """Compare the server's log probabilities of the probes. mark: version of the weights that are to be proven."""
        await self._require(mark)
        salt = f"probe of {mark}"
        scored = await asyncio.gather(*(self._score(probe.token_ids, salt) for probe in prepared.probes))
        if any(found != mark for _, found in scored):
            raise StaleVersion(
                f"{self._client.base} was updated by another client while policy {prepared.version[:12]} was loaded:"
                " use one server per client, and run this again"
            )
        found = difference(prepared.probes, [logprobs for logprobs, _ in scored], prepared.tolerance)
        if found:
            raise WeightsDiffer(
                f"{self._client.base} does not serve policy {prepared.version[:12]} from {self._files.name}: {found}."
                " It is not used: restart it on that checkpoint"
            )

    async def _require(self, mark: str) -> None:
        found = await self._mark()
        if found != mark:
            raise StaleVersion(
                f"{self._client.base} is marked {found[:24]!r}, not {mark[:24]!r}: it was updated or restarted by"
                " another client; use one server per client, and run this again"
            )

    async def _mark(self) -> str:
        """Version with which the server marks its next token."""
        return await self._client.read("GET", "/model_info", lambda reply: str(reply["weight_version"]))

    async def _settled_mark(self) -> str:
        """The mark, after another client that is loading this very policy has finished, or has had time to."""
        until = time.monotonic() + OTHERS_S
        while True:
            mark = await self._mark()
            others = mark.startswith(unproven(self._files.version)) and mark != self._own_mark
            if not others or time.monotonic() > until:
                return mark
            await asyncio.sleep(random.uniform(0.2, 0.6))

    async def _sample(self, context: Sequence[int], params: SamplingParams, most: int, version: str) -> Completion:
        """Up to `most` tokens after `context`, by one request. version: whose cached prefixes it may use."""
        if len(context) > self._longest:
            raise RequestTooLong(
                f"prompt has {len(context)} tokens, the server accepts {self._longest}: shorten it, or start SGLang"
                " with a larger --context-length"
            )
        sampling = PREFERENCES | {
            "max_new_tokens": most,
            "temperature": params.temperature,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": not params.stop_token_ids,
            "no_stop_trim": True,
            "skip_special_tokens": False,
            "sampling_seed": params.seed & SEED_BITS,
        }
        body = {
            "input_ids": list(context),
            "sampling_params": sampling,
            "return_logprob": True,
            "cache_salt": version,
        }
        if params.restricted and not self._widest:
            raise EngineError(
                f"{self._client.base} does not return what tokens were drawn from under a grammar or top_p: use SGLang"
                " 0.5.23 or later, or leave rollouts.grammar and rollouts.top_p out"
            )
        if params.restricted:
            sampling |= {"top_p": params.top_p, "top_k": self._widest}
            body["return_sampling_mask"] = True
        if params.grammar is not None:
            sampling["structural_tag"] = params.grammar
        answer = await self._client.call("POST", "/generate", body)
        with reading(self._client.base):
            return self._completion(answer, params, version)

    def _completion(self, answer: dict[str, Any], params: SamplingParams, version: str) -> Completion:
        """The completion in an answer. Raises EngineError and StaleVersion."""
        found = answer["meta_info"]
        entries = found.get("output_token_logprobs") or []
        tokens = [int(entry[1]) for entry in entries]
        if tokens != answer["output_ids"]:
            raise EngineError(
                f"SGLang's answer has {len(answer['output_ids'])} tokens and {len(tokens)} logprobs that do not belong"
                " to them"
            )
        ended = found["finish_reason"]
        if ended is None or ended["type"] not in _REASONS or (ended["type"] != "abort" and not tokens):
            raise EngineError(
                f"SGLang ended a completion of {len(tokens)} tokens with {ended!r}: known are stop, length, abort"
            )
        spans = read_spans(
            f"SGLang at {self._client.base}", found.get("weight_versions"), len(tokens), version, self._proven
        )
        made = Completion(tokens, [float(entry[0]) for entry in entries], spans, _REASONS[ended["type"]])
        return self._restricted(made, found, whole=params.grammar is None) if params.restricted else made

    def _restricted(self, made: Completion, found: dict[str, Any], *, whole: bool) -> Completion:
        """The completion with the supports in an answer, and log probabilities over them. whole: whether those of
        `made` are over the whole vocabulary. Raises EngineError for supports of other tokens.
        """
        masks, logprobs = (found.get(f"output_token_sampling_{name}") or [] for name in ("mask", "logprobs"))
        size, writer = int(self._files.config()["vocab_size"]), SupportsWriter()
        try:
            for ids in masks:
                writer.add_members(ids, size)
            supports = writer.supports()
            fault = supports.fault(np.array(made.token_ids, np.int64), size)
        except SchemaError as error:
            fault = str(error)
        if fault or len(logprobs) != len(masks):
            raise EngineError(
                f"SGLang's record of what {len(made.token_ids)} tokens were drawn from"
                f" {fault or f'has {len(logprobs)} logprobs'}"
            )
        log_mass = [min(0.0, every - own) for every, own in zip(made.logprobs, logprobs, strict=True)]
        return replace(made, logprobs=logprobs, supports=supports, log_mass=log_mass if whole else None)

    async def _score(self, token_ids: Sequence[int], salt: str) -> tuple[list[float], str]:
        """(log-probability of each token given the previous ones, 0.0 at index 0; version of the weights)."""
        body = {
            "input_ids": list(token_ids),
            "sampling_params": PREFERENCES | {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": 0,
            "cache_salt": salt,
        }
        found = await self._client.call("POST", "/generate", body)
        with reading(self._client.base):
            entries = found["meta_info"].get("input_token_logprobs") or []
            if [int(entry[1]) for entry in entries] != list(token_ids):
                raise EngineUnreachable(f"{self._client.base} ended a scoring request early: retry")
            return [0.0, *(float(entry[0]) for entry in entries[1:])], str(found["meta_info"]["weight_version"])


def _limits(info: dict[str, Any]) -> tuple[int, int, bool]:
    """Of a reply to /server_info: tokens of the longest prompt, and of the largest support that is returned (0: none
    is); whether samples can be repeated.
    """
    repeats = bool(info.get("enable_deterministic_inference"))
    return int(info["max_req_input_len"]) - 1, int(info.get("sampling_mask_max_tokens", 0)), repeats


def _joined(spans: Spans) -> Spans:
    """The same spans with neighbours of one version as one."""
    joined: Spans = []
    for version, start, end in spans:
        if joined and joined[-1][0] == version:
            joined[-1] = (version, joined[-1][1], end)
        elif start < end:
            joined.append((version, start, end))
    return joined
