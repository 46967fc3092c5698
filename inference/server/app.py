"""HTTP application: routes for one engine.

request JSON -> pydantic model -> engine -> OpenAI-shaped answer, or a stream of events with parts of it (streaming)
any TriplaneError -> {"error": {message, type, code}}

A server that can't serve the live policy is withdrawn: /health and new completions return 503 until weights are loaded.
Requests in flight finish. Before its first policy, /health returns 200 and everything else 503. Once its engine has
failed, everything returns 503, and `serve` ends. /ready tells whether to send requests (`readiness`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from contracts.chat import ChatTokenizer
from contracts.errors import TriplaneError, describe
from inference.engines.base import Completion, Engine, SamplingParams
from inference.engines.openai import OWNER
from inference.errors import BadRequest, NoPolicyYet, StaleVersion, Withdrawn
from inference.fleet.probe import VERSION
from inference.server.api import ChatRequest, CompletionRequest, LoadRequest, ScoreRequest, WithdrawRequest
from inference.server.bodies import read_json
from inference.server.chat import prompt_tokens
from inference.server.choices import ChatParts, CompletionParts, chat_choice, completion_choice
from inference.server.readiness import Readiness
from inference.server.replies import disconnected, error_reply, explain
from inference.server.spans import spans_of
from inference.server.streaming import begin_events

CHAT_TOKENS = 1024
Opener = Callable[[Path, str], Engine]
"""Opens the engine for the first policy: directory, version -> engine."""
_Body = TypeVar("_Body", bound=BaseModel)
_Reply = dict[str, Any] | AsyncGenerator[dict[str, Any]]
"""An answer, or the parts of one that is streamed."""


class Application:
    """Handlers that share one engine and one tokenizer."""

    def __init__(self, opener: Opener, model: str) -> None:
        """Without a policy until `open`."""
        self._opener, self._model = opener, model
        self._opened: Engine | None = None
        self._tokenizer: ChatTokenizer | None = None
        """That of the served policy. None: its directory has none, and requests have token ids only."""
        self.readiness = Readiness()

    def starlette(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/health", self._health),
            Route("/ready", self._ready),
            Route("/version", self._version),
            Route("/v1/models", self._models),
            Route("/v1/completions", _json(CompletionRequest, self._complete), methods=["POST"]),
            Route("/v1/chat/completions", _json(ChatRequest, self._chat), methods=["POST"]),
            Route("/v1/score", _json(ScoreRequest, self._score), methods=["POST"]),
            Route("/v1/load_weights", _json(LoadRequest, self._load), methods=["POST"]),
            Route("/v1/withdraw", _json(WithdrawRequest, self._withdraw), methods=["POST"]),
        ]
        handlers = {TriplaneError: explain, Exception: explain}
        return Starlette(routes=routes, middleware=spans_of(routes), exception_handlers=handlers)

    async def open(self, directory: Path, version: str) -> None:
        """Serve the first policy. Raises TriplaneError."""
        tokenizer = await asyncio.to_thread(_read_tokenizer, directory)
        self._opened = await asyncio.to_thread(self._opener, directory, version)
        self._tokenizer = tokenizer
        self.readiness.waiting = None

    async def swap(self, directory: Path, version: str) -> None:
        """Serve another policy from now on, and end a withdrawal.

        Raises TriplaneError; the current policy then stays.
        """
        tokenizer = await asyncio.to_thread(_read_tokenizer, directory)
        await self._engine.load_weights(directory, version)
        self._tokenizer = tokenizer
        self.readiness.withdrawn = None

    async def version(self) -> str | None:
        """Served policy version; None before the first one. Raises EngineStopped once the engine has failed."""
        return None if self._opened is None else await self._opened.version()

    async def close(self) -> None:
        """Close the engine."""
        if self._opened is not None:
            await self._opened.close()

    @property
    def _engine(self) -> Engine:
        return self._require_engine()

    def _require_engine(self) -> Engine:
        if self._opened is None:
            raise NoPolicyYet(f"{self.readiness.reason(None)}: retry when /ready answers 200")
        return self._opened

    async def _health(self, request: Request) -> JSONResponse:
        if self.readiness.withdrawn is not None:
            return JSONResponse({"status": "withdrawn", "reason": self.readiness.withdrawn}, status_code=503)
        await self.version()
        return JSONResponse({"status": "ok"})

    async def _ready(self, request: Request) -> JSONResponse:
        served = await self.version()
        body = {"policy": served, "live": self.readiness.live}
        reason = self.readiness.reason(served)
        return JSONResponse(body if reason is None else body | {"reason": reason}, 200 if reason is None else 503)

    async def _version(self, request: Request) -> JSONResponse:
        return JSONResponse({"version": await self._engine.version()})

    async def _models(self, request: Request) -> JSONResponse:
        entry = {"id": self._model, "object": "model", "owned_by": OWNER, "version": await self._engine.version()}
        return JSONResponse({"object": "list", "data": [entry]})

    async def _complete(self, body: CompletionRequest, pin: str | None) -> _Reply:
        prompt, tokenizer = body.prompt, self._tokenizer
        if isinstance(prompt, str):
            prompt = self._text().encode_text(prompt)
        params = await self._params(body.max_tokens, tuple(body.stop_token_ids), body)
        if body.stream:
            return self._parts("text_completion", prompt, params, body, pin, CompletionParts(body, tokenizer))
        made = await self._generate(prompt, params, pin)
        text = tokenizer.decode(made.token_ids) if tokenizer else ""
        choice = completion_choice(body, text, made.token_ids, made.logprobs, made.spans)
        choice["finish_reason"] = made.finish_reason
        if body.return_token_ids and isinstance(body.prompt, str):
            choice["prompt_token_ids"] = prompt
        return self._envelope("text_completion", choice, len(prompt), len(made.token_ids))

    async def _chat(self, body: ChatRequest, pin: str | None) -> _Reply:
        tokenizer = self._text()
        prompt = prompt_tokens(tokenizer, body.messages, body.tools)
        count = body.max_completion_tokens or body.max_tokens or CHAT_TOKENS
        params = await self._params(count, (tokenizer.end_of_turn, tokenizer.pad), body)
        if body.stream:
            return self._parts("chat.completion.chunk", prompt, params, body, pin, ChatParts(body, tokenizer))
        made = await self._generate(prompt, params, pin)
        choice = chat_choice(body, tokenizer, made)
        return self._envelope("chat.completion", choice, len(prompt), len(made.token_ids))

    async def _parts(
        self,
        kind: str,
        prompt: list[int],
        params: SamplingParams,
        body: CompletionRequest | ChatRequest,
        pin: str | None,
        parts: CompletionParts | ChatParts,
    ) -> AsyncGenerator[dict[str, Any]]:
        """Parts of an answer, while it is sampled."""
        if pin is not None:
            raise BadRequest(
                f"the header {VERSION} pins whole answers, which are proven at their end: send stream=false, or leave"
                " the header out"
            )
        made, answer = 0, self._envelope(kind, {}, 0, 0)
        del answer["usage"]
        async with aclosing(self._engine.stream(prompt, params)) as pieces:
            async for piece in pieces:
                made += len(piece.token_ids)
                yield answer | {"choices": [parts.choice(piece)]}
        if body.stream_options is not None and body.stream_options.include_usage:
            yield answer | {"choices": [], "usage": _usage(len(prompt), made)}

    async def _score(self, body: ScoreRequest, pin: str | None) -> dict[str, Any]:
        before = await self._check_version(body.policy_version, pin)
        logprobs = await self._engine.score(body.token_ids, body.temperature)
        if await self._engine.version() != before:
            raise StaleVersion(f"policy {before} was replaced while it scored: repeat the call")
        return {"object": "score", "logprobs": logprobs, "policy_version": before}

    async def _load(self, body: LoadRequest, pin: str | None) -> dict[str, Any]:
        await self.swap(Path(body.directory), body.version)
        return {"object": "policy", "version": body.version}

    async def _withdraw(self, body: WithdrawRequest, pin: str | None) -> dict[str, Any]:
        self.readiness.withdrawn = body.reason
        return {"object": "policy", "version": await self._engine.version(), "withdrawn": body.reason}

    async def _generate(self, prompt: list[int], params: SamplingParams, pin: str | None) -> Completion:
        completion = await self._engine.generate(prompt, params)
        others = {version for version, _, _ in completion.spans} - {pin}
        if pin is not None and others:
            raise StaleVersion(f"policy {pin} was asked for, but {', '.join(sorted(others))} sampled: ask elsewhere")
        return completion

    async def _params(
        self, count: int, stops: tuple[int, ...], body: CompletionRequest | ChatRequest
    ) -> SamplingParams:
        """Parameters for a request. Raises Withdrawn and StaleVersion if it can't be served."""
        if self.readiness.withdrawn is not None:
            raise Withdrawn(
                f"this server is withdrawn ({self.readiness.withdrawn}): use another one, or load the live policy here"
            )
        if isinstance(body, CompletionRequest):
            await self._check_version(body.policy_version)
        seed = secrets.randbits(63) if body.seed is None else body.seed
        return SamplingParams(body.temperature, count, seed, stops)

    async def _check_version(self, *wanted: str | None) -> str:
        """The served version. Raises StaleVersion if another one is wanted."""
        serving = await self._engine.version()
        for each in wanted:
            if each is not None and each != serving:
                raise StaleVersion(
                    f"policy {each} was requested, but {serving} is served: load it with /v1/load_weights"
                )
        return serving

    def _text(self) -> ChatTokenizer:
        if self._tokenizer is None:
            self._require_engine()
            raise BadRequest("the policy's directory has no tokenizer.json: send token ids to /v1/completions")
        return self._tokenizer

    def _envelope(self, kind: str, choice: dict[str, Any], prompt: int, made: int) -> dict[str, Any]:
        return {
            "id": f"cmpl-{secrets.token_hex(8)}",
            "object": kind,
            "created": int(time.time()),
            "model": self._model,
            "choices": [choice],
            "usage": _usage(prompt, made),
        }


def _read_tokenizer(directory: Path) -> ChatTokenizer | None:
    try:
        return ChatTokenizer.from_directory(directory) if (directory / "tokenizer.json").is_file() else None
    except OSError as error:
        raise BadRequest(f"the policy's directory can't be read: {describe(error)}") from error


def _usage(prompt: int, made: int) -> dict[str, int]:
    return {"prompt_tokens": prompt, "completion_tokens": made, "total_tokens": prompt + made}


def _json(
    model: type[_Body], handler: Callable[[_Body, str | None], Awaitable[_Reply]]
) -> Callable[[Request], Awaitable[Response]]:
    """Route that validates the body of its requests, and that a reply is of the policy version that they are pinned to
    (header `X-Policy-Version`).
    """

    async def route(request: Request) -> Response:
        pin = request.headers.get(VERSION) or None
        try:
            body = model.model_validate_json(await read_json(request))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"]) or "the body"
            return error_reply(400, f"{where}: {first['msg']}", "invalid_request")

        async def replied() -> Response:
            reply = await handler(body, pin)
            if not isinstance(reply, dict):
                return await begin_events(reply)
            return JSONResponse(reply, headers=None if pin is None else {VERSION: pin})

        work = asyncio.ensure_future(replied())
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                return error_reply(499, "the client disconnected", "cancelled")
            return await work
        finally:
            work.cancel()
            gone.cancel()

    return route
