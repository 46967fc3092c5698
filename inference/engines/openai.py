"""Client of a server with token ids in the OpenAI completions API: Triplane's, or vLLM.

Only connection faults are retried, a limited number of times, with jitter. Every request contains its seed, so a
repetition at Triplane's server gives the same tokens. Other servers count random numbers from a request's first token,
so each turn of an episode gets another seed there, and preferences of the model are overridden. Start vLLM with
`--logprobs-mode processed_logprobs`, else its logprobs ignore the temperature.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np

from inference.engines.base import (
    Completion,
    FinishReason,
    Piece,
    SamplingParams,
    check_streamable,
    require_unrestricted,
)
from inference.engines.config import CONNECTIONS, RETRIES, TIMEOUT_S
from inference.engines.http import JsonClient, reading
from inference.engines.seeds import mixed_seed
from inference.errors import EngineError, StaleVersion

WHOLE = {
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "ignore_eos": True,
}
"""Sampling from the whole distribution, up to the request's own stop tokens. vLLM would take most of what is left out
from the model's generation_config.json.
"""
OWNER = "triplane"
"""Owner of a policy in /v1/models of Triplane's server."""
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}


class OpenAIEngine:
    """See inference.engines.base.Engine. May be used from one event loop only, as httpx's pool requires."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        version: str | None = None,
        directory: Path | None = None,
        pinned: bool = True,
        connections: int = CONNECTIONS,
        timeout_s: float = TIMEOUT_S,
        retries: int = RETRIES,
    ) -> None:
        """version: required version; Triplane's server refuses others (StaleVersion).

        None accepts any version. directory: the checkpoint of that version. vLLM has no versions: it must show that it
        was started on this directory (else StaleVersion); its tokens then get `version`. pinned: False accepts any
        version of Triplane's server, whose tokens have the version that it names.
        """
        self._base, self._model, self._version = base_url.rstrip("/"), model, version
        self._pinned = pinned
        self._directory = directory
        self._own: bool | None = None
        self._client = JsonClient(self._base, connections=connections, timeout_s=timeout_s, retries=retries)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate."""
        answer = await self._client.call("POST", "/completions", await self._body(prompt_ids, params))
        with reading(self._base):
            (choice,) = answer["choices"]
            tokens, logprobs, spans = self._tokens(choice, str(answer["model"]))
            return Completion(tokens, logprobs, spans, self._reason(choice))

    async def stream(self, prompt_ids: Sequence[int], params: SamplingParams) -> AsyncGenerator[Piece]:
        """See Engine.stream."""
        check_streamable(params)
        body = await self._body(prompt_ids, params) | {"stream": True}
        async with aclosing(self._client.events("/completions", body)) as events:
            async for event in events:
                with reading(self._base):
                    pieces = [self._piece(choice, str(event["model"])) for choice in event["choices"]]
                for piece in pieces:  # none in an event that tells the usage
                    yield piece

    def streams(self, params: SamplingParams) -> bool:
        """See Engine.streams."""
        return not params.restricted and params.routing_from is None

    async def _body(self, prompt_ids: Sequence[int], params: SamplingParams) -> dict[str, Any]:
        require_unrestricted(params, "openai")
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": [int(token) for token in prompt_ids],
            "max_tokens": params.max_tokens,
            "temperature": params.temperature,
            "top_p": 1,
            "seed": params.seed,
            "logprobs": 1,
            "stop_token_ids": list(params.stop_token_ids),
            "return_token_ids": True,
        }
        if await self.is_ours():
            body["policy_version"] = self._required
        else:
            body |= WHOLE | {"seed": mixed_seed(params.seed, len(prompt_ids))}
        return body

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score. vLLM supports temperature 1 only."""
        if await self.is_ours():
            body = {"token_ids": list(token_ids), "temperature": temperature, "policy_version": self._required}
            answer = await self._client.call("POST", "/score", body)
            with reading(self._base):
                return list(answer["logprobs"])
        if temperature != 1.0:
            raise EngineError(f"{self._base} scores at temperature 1 only, not {temperature}")
        body = {
            "model": self._model,
            "prompt": list(token_ids),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": 0,
        }
        answer = await self._client.call("POST", "/completions", body)
        with reading(self._base):
            (choice,) = answer["choices"]
            found = zip(token_ids[1:], choice["prompt_logprobs"][1:], strict=True)
            return [0.0, *(entry[str(token)]["logprob"] for token, entry in found)]

    async def load_weights(self, directory: Path, version: str) -> None:
        """See Engine.load_weights. The server must be Triplane's, and be able to read `directory`."""
        if not await self.is_ours():
            raise EngineError(f"{self._base} is not a Triplane server: restart it with {directory} to serve {version}")
        await self._client.call("POST", "/load_weights", {"directory": str(directory.absolute()), "version": version})
        self._version = version

    async def version(self) -> str:
        """See Engine.version.

        For other servers, returns the version given at construction, after a check that the server serves it (else
        raises StaleVersion), or its model's name if none was given.
        """
        policy = await self._policy()
        with reading(self._base):
            return str(policy["version"]) if self._own else self._version or str(policy["id"])

    async def tokens_of(self, text: str) -> list[int] | int:
        """Ids that the server makes of a text, or their number if it returns no ids. It samples one token.

        Markup in the text is markup, except at Triplane's server.
        """
        body: dict[str, Any] = {"model": self._model, "prompt": text, "max_tokens": 1, "return_token_ids": True}
        if not await self.is_ours():
            body["add_special_tokens"] = False
        answer = await self._client.call("POST", "/completions", body)
        with reading(self._base):
            ids: list[int] | None = answer["choices"][0].get("prompt_token_ids")
            return int(answer["usage"]["prompt_tokens"]) if ids is None else ids

    async def close(self) -> None:
        """See Engine.close. The server keeps running."""
        await self._client.close()

    @property
    def _required(self) -> str | None:
        """Version that Triplane's server must serve; None: any."""
        return self._version if self._pinned else None

    async def is_ours(self) -> bool:
        """Whether the server is Triplane's."""
        if self._own is None:
            await self._policy()
        return bool(self._own)

    async def _policy(self) -> dict[str, Any]:
        answer = await self._client.call("GET", "/models")
        try:
            policy: dict[str, Any] = answer["data"][0]
        except (KeyError, IndexError, TypeError):
            raise EngineError(
                f"{self._base}/models lists no model: check that an engine's API is at {self._base}"
            ) from None
        with reading(self._base):
            own = policy.get("owned_by") == OWNER
            if not own:
                policy = next((each for each in answer["data"] if each["id"] == self._model), policy)
                self._check_origin(policy)
        self._own = own
        return policy

    def _check_origin(self, policy: dict[str, Any]) -> None:
        """Check the checkpoint of a server without versions: vLLM returns the model that it was started with in
        `root`.
        """
        root = str(policy.get("root") or policy["id"])
        wanted = {self._version} | ({str(self._directory.absolute())} if self._directory else set())
        if self._version is not None and not wanted & {str(policy["id"]), root, str(Path(root).absolute())}:
            raise StaleVersion(
                f"{self._base} serves {policy['id']!r} from {root!r}, which is not proven to be policy"
                f" {self._version[:12]}: restart it on that checkpoint, as in `vllm serve"
                f" {self._directory or 'DIRECTORY'} --served-model-name {self._model}`, and run this again"
            )

    def _tokens(self, choice: dict[str, Any], model: str) -> tuple[list[int], list[float], list[tuple[str, int, int]]]:
        """Ids, logprobs and spans of the tokens in an answer, or in a part of it. model: named in it."""
        tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs") or []
        if tokens is None and not choice.get("text"):  # as in vLLM's last event
            tokens = []
        if tokens is None or len(tokens) != len(logprobs):
            raise EngineError(f"{self._base} returned no token ids with logprobs: it must support return_token_ids")
        spans = choice.get("policy_spans")
        if spans is None:
            spans = [(self._version or model, 0, len(tokens))] if tokens else []
        return tokens, logprobs, [(str(version), int(start), int(end)) for version, start, end in spans]

    def _piece(self, choice: dict[str, Any], model: str) -> Piece:
        """A part of an answer."""
        tokens, logprobs, spans = self._tokens(choice, model)
        reason = None if choice["finish_reason"] is None else self._reason(choice)
        return Piece(np.array(tokens, np.int32), np.array(logprobs, np.float32), spans, reason)

    def _reason(self, choice: dict[str, Any]) -> FinishReason:
        reason = _REASONS.get(choice["finish_reason"])
        if reason is None:
            raise EngineError(
                f"{self._base} ended a completion with {choice['finish_reason']!r}: this client knows stop, length,"
                " abort"
            )
        return reason
