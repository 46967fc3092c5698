"""A server that speaks SGLang's native HTTP API over our own forward pass, with faults on demand.

It follows 0.5.23: pause, update, version marks of spans, stop tokens of the model, ends of aborted requests.
test_sglang_interface.py compares what the client sends with the fields of the real package.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from inference.engines import SamplingParams
from inference.engines.builtin import BuiltinEngine

GETS = ("/ready", "/server_info", "/model_info")
WIDEST = 1024
"""Value of SGLang's option `--sampling-mask-max-tokens`."""
LONGEST = 200
"""`max_req_input_len` of the server."""


@dataclass
class SglangServer:
    """State of one server, and the faults that tests switch on."""

    directory: Path
    port: int = 0
    version: str = "default"
    end_of_sequence: int | None = None
    """Token of the model's config at which the server stops on its own."""
    hold_s: float = 0.0
    """Seconds before each request is sampled."""
    stale: bool = False
    """Report an update and load nothing."""
    deterministic: bool = True
    forges: bool = False
    """Whether the support of the second token lacks that token."""
    calls: list[tuple[str, Any]] = field(default_factory=list)
    """(path, body) of every POST."""

    def __post_init__(self) -> None:
        self._engine = self._opened(self.directory)
        self._running = asyncio.Event()
        self._running.set()
        self._in_flight: set[asyncio.Task[Any]] = set()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def restart(self) -> None:
        """As after a crash: the first weights, without a mark."""
        self._engine, self.version = self._opened(self.directory), "default"

    def app(self) -> Starlette:
        routes = {
            "/ready": self._ready,
            "/server_info": self._server_info,
            "/model_info": self._model_info,
            "/generate": self._generate,
            "/pause_generation": self._pause,
            "/continue_generation": self._continue,
            "/update_weights_from_disk": self._update,
            "/update_weight_version": self._name,
        }
        return Starlette(
            routes=[Route(path, call, methods=["GET" if path in GETS else "POST"]) for path, call in routes.items()]
        )

    def _opened(self, directory: Path) -> BuiltinEngine:
        return BuiltinEngine(directory, "served", threads=1)

    async def _body(self, request: Request) -> Any:
        body = await request.json()
        self.calls.append((request.url.path, body))
        return body

    async def _ready(self, request: Request) -> Response:
        return Response(status_code=200 if self._running.is_set() else 503)

    async def _server_info(self, request: Request) -> Response:
        return JSONResponse(
            {
                "max_req_input_len": LONGEST,
                "sampling_mask_max_tokens": WIDEST,
                "enable_deterministic_inference": self.deterministic,
                "version": "0.5.23",
            }
        )

    async def _model_info(self, request: Request) -> Response:
        return JSONResponse({"model_path": str(self.directory), "weight_version": self.version})

    async def _generate(self, request: Request) -> Response:
        body = await self._body(request)
        if body.get("return_sampling_mask") and not 1 <= body["sampling_params"]["top_k"] <= WIDEST:
            return JSONResponse({"error": {"message": "return_sampling_mask requires a finite top_k"}}, 400)
        await self._running.wait()
        task = asyncio.create_task(self._answer(body))
        self._in_flight.add(task)
        try:
            return JSONResponse(await task)
        except asyncio.CancelledError:
            return JSONResponse(
                {
                    "output_ids": [],
                    "meta_info": {"finish_reason": {"type": "abort", "message": "Abort"}, "weight_versions": []},
                }
            )
        finally:
            self._in_flight.discard(task)

    async def _answer(self, body: dict[str, Any]) -> dict[str, Any]:
        engine, version, ids = self._engine, self.version, body["input_ids"]
        await asyncio.sleep(self.hold_s)
        sampling = body["sampling_params"]
        info: dict[str, Any] = {"weight_version": version, "finish_reason": {"type": "length", "length": 0}}
        tokens: list[int] = []
        if body.get("logprob_start_len") == 0:
            scored = await engine.score(ids)
            info["input_token_logprobs"] = [
                [score if place else None, token, None]
                for place, (score, token) in enumerate(zip(scored, ids, strict=True))
            ]
        if sampling["max_new_tokens"]:
            own = () if self.end_of_sequence is None else (self.end_of_sequence,)
            stops = () if sampling["ignore_eos"] else (*sampling["stop_token_ids"], *own)
            most = min(sampling["max_new_tokens"], LONGEST + 5 - len(ids))
            drawn = {"top_p": sampling["top_p"], "grammar": sampling.get("structural_tag")}
            params = SamplingParams(sampling["temperature"], most, sampling["sampling_seed"], stops, **drawn)
            made = await engine.generate(ids, params)
            tokens, logprobs = made.token_ids, made.logprobs
            if made.supports is not None and made.log_mass is not None:
                size = json.loads((self.directory / "config.json").read_text())["vocab_size"]
                masks = made.supports.masks(np.arange(len(tokens)), size)
                info["output_token_sampling_mask"] = [np.flatnonzero(mask).tolist() for mask in masks]
                info["output_token_sampling_logprobs"] = logprobs
                if params.grammar is None:  # a grammar masks the logits that these are of
                    logprobs = [own + mass for own, mass in zip(logprobs, made.log_mass, strict=True)]
            if params.restricted and not params.temperature:
                info["output_token_sampling_mask"] = [[token] for token in tokens]
                info["output_token_sampling_logprobs"] = [0.0] * len(tokens)
            if self.forges:
                info["output_token_sampling_mask"][1] = [tokens[1] ^ 1]
            info["output_token_logprobs"] = [[each, token, None] for each, token in zip(logprobs, tokens, strict=True)]
            stopped = made.finish_reason == "stop"
            info["finish_reason"] = {"type": "stop", "matched": tokens[-1]} if stopped else {"type": "length"}
        info["weight_versions"] = [{"version": version, "start": 0, "end": len(tokens)}]
        return {"output_ids": tokens, "meta_info": info}

    async def _pause(self, request: Request) -> Response:
        assert (await self._body(request))["mode"] == "abort"
        self._running.clear()
        for task in list(self._in_flight):
            task.cancel()
        return JSONResponse({"status": "ok"})

    async def _continue(self, request: Request) -> Response:
        await self._body(request)
        self._running.set()
        return JSONResponse({"status": "ok"})

    async def _update(self, request: Request) -> Response:
        body = await self._body(request)
        if not (Path(body["model_path"]) / "config.json").exists():
            return JSONResponse({"success": False, "message": "Failed to get model config"}, status_code=400)
        if not self.stale:
            self._engine = self._opened(Path(body["model_path"]))
        self.version = body["weight_version"]
        return JSONResponse({"success": True, "message": "Succeeded to update model weights."})

    async def _name(self, request: Request) -> Response:
        self.version = (await self._body(request))["new_version"]
        return JSONResponse({"success": True})


@contextmanager
def serving(directory: Path) -> Iterator[SglangServer]:
    """A server of the checkpoint in `directory`, in a thread of this process."""
    state = SglangServer(directory)
    server = uvicorn.Server(uvicorn.Config(state.app(), port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.02)
        assert thread.is_alive(), "the server ended"
    state.port = server.servers[0].sockets[0].getsockname()[1]
    try:
        yield state
    finally:
        server.should_exit = True
        thread.join()
