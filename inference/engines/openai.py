"""The client of a server that takes and returns token ids over the OpenAI completions API: ours, or vLLM.

Retries, bounded and with jitter, follow connection faults only; any answer is final. Every request carries its seed, so asking our server
again gives the same tokens. Start vLLM with `--logprobs-mode processed_logprobs`, else its logprobs ignore the temperature.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from inference.engines.base import Completion, FinishReason, SamplingParams
from inference.errors import EngineError, EngineUnreachable, RequestTooLong, StaleVersion

FIRST_PAUSE_S = 0.1
OWNER = "triplane"
"""What /v1/models says of a policy served by us."""
_FAULTS = (httpx.ConnectError, httpx.ConnectTimeout, httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_SEED_BITS = (1 << 63) - 1
"""vLLM takes signed 64-bit seeds only."""


class OpenAIEngine:
    """See inference.engines.base.Engine. May be used from one event loop only, as httpx's pool requires."""

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        version: str | None = None,
        directory: Path | None = None,
        connections: int = 256,
        timeout_s: float = 600.0,
        retries: int = 4,
    ) -> None:
        """version: what must be served; our server refuses to answer with another (StaleVersion). None takes whatever is served.
        directory: the checkpoint of that version. vLLM knows no versions: it must show that it was started on this directory (StaleVersion),
        its answers are then stamped with `version`."""
        self._base, self._model, self._version, self._retries = base_url.rstrip("/"), model, version, retries
        self._directory = directory
        self._own: bool | None = None
        limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
        self._http = httpx.AsyncClient(
            limits=limits, timeout=httpx.Timeout(timeout_s, connect=min(10.0, timeout_s), pool=None)
        )

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Completion:
        """See Engine.generate."""
        body: dict[str, Any] = {
            "model": self._model, "prompt": list(prompt_ids), "max_tokens": params.max_tokens, "temperature": params.temperature,
            "top_p": 1, "seed": params.seed, "logprobs": 1, "stop_token_ids": list(params.stop_token_ids), "return_token_ids": True,
        }  # fmt: skip
        if await self._is_ours():
            body["policy_version"] = self._version
        else:
            body |= {"seed": params.seed & _SEED_BITS, "top_k": -1}
        answer = await self._call("POST", "/completions", body)
        return self._completion(answer)

    async def score(self, token_ids: Sequence[int], temperature: float = 1.0) -> list[float]:
        """See Engine.score. Of vLLM only at temperature 1."""
        if await self._is_ours():
            body = {"token_ids": list(token_ids), "temperature": temperature, "policy_version": self._version}
            return list((await self._call("POST", "/score", body))["logprobs"])
        if temperature != 1.0:
            raise EngineError(f"{self._base} scores at temperature 1 only, {temperature} was asked for")
        body = {
            "model": self._model, "prompt": list(token_ids), "max_tokens": 1, "temperature": 0, "prompt_logprobs": 0,
        }  # fmt: skip
        (choice,) = (await self._call("POST", "/completions", body))["choices"]
        found = choice["prompt_logprobs"][1:]
        return [
            0.0, *(entry[str(token)]["logprob"] for token, entry in zip(token_ids[1:], found, strict=True))
        ]  # fmt: skip

    async def load_weights(self, directory: Path, version: str) -> None:
        """See Engine.load_weights. `directory` must be readable by the server, which must be ours."""
        if not await self._is_ours():
            raise EngineError(f"{self._base} is not a Triplane server: restart it with {directory} to serve {version}")
        await self._call("POST", "/load_weights", {"directory": str(directory.absolute()), "version": version})
        self._version = version

    async def version(self) -> str:
        """See Engine.version. For a server that isn't ours, the version given at construction once it shows that it serves that (else it
        raises StaleVersion), or its model's name when none was given."""
        policy = await self._policy()
        return str(policy["version"]) if self._own else self._version or str(policy["id"])

    async def close(self) -> None:
        """See Engine.close. The server goes on serving others."""
        await self._http.aclose()

    async def _is_ours(self) -> bool:
        if self._own is None:
            await self._policy()
        return bool(self._own)

    async def _policy(self) -> dict[str, Any]:
        answer = await self._call("GET", "/models", None)
        policy: dict[str, Any] = answer["data"][0]
        own = policy.get("owned_by") == OWNER
        if not own:
            policy = next((each for each in answer["data"] if each["id"] == self._model), policy)
            self._check_origin(policy)
        self._own = own
        return policy

    def _check_origin(self, policy: dict[str, Any]) -> None:
        """A foreign server names no version, but what it loaded: vLLM in `root`, the model it was started with."""
        root = str(policy.get("root") or policy["id"])
        wanted = {self._version} | ({str(self._directory.absolute())} if self._directory else set())
        if self._version is not None and not wanted & {str(policy["id"]), root, str(Path(root).absolute())}:
            raise StaleVersion(
                f"{self._base} serves {policy['id']!r} from {root!r}, which can't be shown to be policy {self._version[:12]}: restart it on "
                f"that checkpoint, as in `vllm serve {self._directory or 'DIRECTORY'} --served-model-name {self._model}`, and run this again"
            )

    def _completion(self, answer: dict[str, Any]) -> Completion:
        (choice,) = answer["choices"]
        tokens, logprobs = choice.get("token_ids"), (choice.get("logprobs") or {}).get("token_logprobs")
        if tokens is None or logprobs is None or len(tokens) != len(logprobs):
            raise EngineError(f"{self._base} returned no token ids with logprobs: it must support return_token_ids")
        spans = choice.get("policy_spans")
        if spans is None:
            spans = [(self._version or str(answer["model"]), 0, len(tokens))]
        reason = _REASONS.get(choice["finish_reason"])
        if reason is None:
            raise EngineError(
                f"{self._base} ended a completion with {choice['finish_reason']!r}: this client knows stop, length, abort"
            )
        return Completion(tokens, logprobs, [(str(v), int(start), int(end)) for v, start, end in spans], reason)

    async def _call(self, method: str, path: str, body: dict[str, Any] | None) -> dict[str, Any]:
        url = f"{self._base}{path}"
        for attempt in range(self._retries + 1):
            try:
                response = await self._http.request(method, url, json=body)
                return self._answer(url, response)
            except _FAULTS as error:
                if attempt == self._retries:
                    raise EngineUnreachable(
                        f"{url} can't be reached ({type(error).__name__}, {attempt + 1} attempts): is the server running there?"
                    ) from error
                await asyncio.sleep(FIRST_PAUSE_S * 2**attempt * random.uniform(0.5, 1.5))
            except httpx.TimeoutException as error:
                raise EngineUnreachable(
                    f"{url} did not answer in time ({type(error).__name__}): raise timeout_s"
                ) from error
        raise AssertionError("the loop returns or raises")

    def _answer(self, url: str, response: httpx.Response) -> dict[str, Any]:
        if response.is_success:
            answer: dict[str, Any] = response.json()
            return answer
        try:
            detail = response.json()["error"]
            message, code = str(detail["message"]), detail.get("code")
        except (ValueError, KeyError, TypeError):
            message, code = response.text[:200], None
        if response.status_code == httpx.codes.CONFLICT:
            raise StaleVersion(message)
        if code == "context_length_exceeded" or "maximum context length" in message:
            raise RequestTooLong(message)
        raise EngineError(f"{url} answered {response.status_code}: {message}")
