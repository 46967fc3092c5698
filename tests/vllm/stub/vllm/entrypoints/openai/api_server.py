"""A server that speaks the surface of vLLM 0.32 which our client uses, over our own forward pass: `python -m` as the
real one is started.

Faults are switched on by POST /fault: {"stale": true} ignores loads, {"blind": true} reports no differing tensors,
{"hold": s} delays a generation, {"unmarked": true} leaves versions out, {"nan": true} scores a token as no number,
{"die": true} ends the process without a word. {"seized": [VERSION, CALL, N]} marks the server with VERSION right after
the Nth CALL, {"late": [VERSION, CALL]} lets a mark with VERSION come right after CALL was answered, whoever asks for
what; {"reborn": true} forgets at a final mark what was loaded, as a server started again just before it;
{"routes": TEXT} answers this instead of the routed experts; {"broken": true} answers a generation with 500.
"""

from __future__ import annotations

import base64
import io
import json
import math
import os
import subprocess
import sys

if __name__ == "__main__" and "TRIPLANE_SERVER_GUARD" in os.environ:
    # an engine process in a session of its own, as vLLM's outlives a killed server; its guard ends it
    engine = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"], start_new_session=True)

import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlparse

import numpy as np
import torch

from inference.engines.probes import score_rows
from inference.engines.weights import read_weights

torch.set_num_threads(1)


class Served:
    """The one model."""

    def __init__(self, directory: str) -> None:
        self.fault: dict[str, Any] = {}
        self.version, self.directory, self.mark = "default", directory, ""
        self.waiting, self.landed = threading.Event(), threading.Event()
        self.weights = read_weights(Path(directory))
        self.asleep = set[str]()
        """Parts whose memory is freed."""
        self.paused, self.lock = threading.Event(), threading.Lock()
        self.running, self.calls = 0, list[str]()
        self.salts, self.marks, self.resumed = list[str](), list[str](), list[str]()

    def load(self, directory: str, mark: str) -> None:
        assert "weights" not in self.asleep, "no memory to load into"
        self.directory, self.mark = directory, mark
        if not self.fault.get("stale"):
            self.weights = read_weights(Path(directory))

    def differences(self, directory: str) -> list[dict[str, str]]:
        wanted = read_weights(Path(directory))
        if self.fault.get("blind") or torch.equal(wanted.embedding, self.weights.embedding):
            return []
        return [{"name": "layer 0: experts.w13", "detail": "holds other numbers than the checkpoint"}]

    def logprobs(self, tokens: list[int]) -> list[float]:
        found, _ = score_rows(self.weights, torch.tensor([tokens]))
        values = [float(value) for value in found[0]]
        return [*values[:-1], math.nan] if self.fault.get("nan") else values

    def routes(self, tokens: list[int], start: int) -> str:
        """As vLLM writes them: of all positions but the last, from `start`."""
        chosen = score_rows(self.weights, torch.tensor([tokens]))[1][0].permute(1, 0, 2)[start:-1]
        out = io.BytesIO()
        np.save(out, chosen.numpy().astype(np.uint8))
        return base64.b64encode(out.getvalue()).decode()

    def answered(self, call: str) -> None:
        """What a fault lets happen right after a call."""
        seized = self.fault.get("seized", ["", "no call", 0])
        seized[2] -= call.endswith(seized[1])
        if call.endswith(seized[1]) and seized[2] == 0:
            self.version = seized[0]
        version, after = self.fault.get("late", ("", "no call"))
        if call.endswith(after) and self.waiting.is_set():
            self.waiting.clear()
            self.version = version
            self.landed.set()


class Handler(BaseHTTPRequestHandler):
    served: Served
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        bodies: dict[str, Any] = {
            "/health": {},
            "/is_sleeping": {"is_sleeping": bool(self.served.asleep)},
            "/is_paused": {"is_paused": self.served.paused.is_set()},
            "/weight_info": {"weight_version": self.served.version},
            "/v1/models": {"data": [{"id": "policy", "max_model_len": 256}]},
            "/server_info": {"vllm_config": "device_config=cpu,"},
            "/seen": {
                "waiting": self.served.waiting.is_set(),
                **{name: getattr(self.served, name) for name in ("calls", "salts", "marks", "resumed")},
            },
        }
        self.answer(bodies[urlparse(self.path).path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or b"{}")
        url = urlparse(self.path)
        call = f"{url.path.lstrip('/')} {url.query} {body.get('method', '')}".strip()
        self.served.calls.append(call)
        method = getattr(self, f"post_{url.path.rpartition('/')[2]}")
        found = method(body)
        self.served.answered(" ".join([call, body.get("new_version") or body.get("cache_salt") or ""]).strip())
        if found and body.get("stream"):
            self.stream(found["choices"][0])
        else:
            self.answer(found)

    def post_fault(self, body: dict[str, Any]) -> Any:
        self.served.fault = body
        self.served.landed.clear()
        if body.get("die"):
            os._exit(9)
        return {}

    def post_pause(self, body: dict[str, Any]) -> Any:
        self.served.paused.set()
        while self.served.running and "wait" in self.path:
            time.sleep(0.01)
        return {"status": "paused"}

    def post_resume(self, body: dict[str, Any]) -> Any:
        self.served.resumed.append(self.served.version)
        self.served.paused.clear()
        return {"status": "resumed"}

    def post_sleep(self, body: dict[str, Any]) -> Any:
        """Level 2: weights and cache are gone. As in vLLM the body is empty; without the flag it fails."""
        query = parse_qs(urlparse(self.path).query)
        if "--enable-sleep-mode" not in sys.argv or self.served.fault.get("sleepless"):
            return None
        assert query["level"] == ["2"], "what a test of this client expects"
        self.served.asleep = {"weights", "kv_cache"}
        weights = self.served.weights
        for each in (weights.embedding, weights.norm, *(t for layer in weights.layers for t in vars(layer).values())):
            each.fill_(math.nan)
        return b""

    def post_wake_up(self, body: dict[str, Any]) -> Any:
        """Memory comes back, what it held does not."""
        self.served.asleep -= set(parse_qs(urlparse(self.path).query).get("tags", ["weights", "kv_cache"]))
        return b""

    def post_reset_prefix_cache(self, body: dict[str, Any]) -> Any:
        return {"success": not self.served.fault.get("held")}

    def post_update_weight_version(self, body: dict[str, Any]) -> Any:
        version = body["new_version"]
        self.served.marks.append(version)
        if version == self.served.fault.get("late", [None])[0]:
            self.served.waiting.set()
            self.served.landed.wait(60)
            return {"success": True}
        if self.served.fault.get("reborn") and not version.startswith("unproven:"):
            self.served.mark = ""
        self.served.version = version
        return {"success": True}

    def post_collective_rpc(self, body: dict[str, Any]) -> Any:
        methods: dict[str, Callable[..., Any]] = {
            "triplane_load": self.served.load,
            "triplane_loaded": lambda: self.served.mark,
            "triplane_verify": lambda directory, exact: self.served.differences(directory),
        }
        return {"results": [methods[body["method"]](**body["kwargs"])]}

    def post_generate(self, body: dict[str, Any]) -> Any:
        while self.served.paused.is_set():
            time.sleep(0.01)
        with self.served.lock:
            self.served.running += 1
        try:
            return self.generated(body)
        finally:
            with self.served.lock:
                self.served.running -= 1

    def generated(self, body: dict[str, Any]) -> Any:
        tokens, sampling = body["token_ids"], body["sampling_params"]
        while self.served.asleep:
            time.sleep(0.01)
        self.served.salts.append(body["cache_salt"])
        if self.served.fault.get("broken"):
            return None
        version = self.served.version
        time.sleep(self.served.fault.get("hold", 0))
        made = [(sampling.get("seed", 0) + step) % 90 for step in range(sampling["max_tokens"])]
        content = [{"token_id": token, "logprob": -0.5} for token in made]
        marks = None if self.served.fault.get("unmarked") else [{"version": version, "start": 0, "end": len(made)}]
        choice = {
            "token_ids": made,
            "finish_reason": "length",
            "weight_versions": marks,
            "logprobs": {"content": content},
        }
        if "--enable-return-routed-experts" in sys.argv:
            choice["routed_experts"] = self.served.fault.get("routes") or self.served.routes(
                tokens + made, sampling.get("routed_experts_prompt_start", 0)
            )
        scored = None
        if sampling.get("prompt_logprobs") is not None:
            values = self.served.logprobs(tokens)
            scored = [
                None,
                *({str(token): {"logprob": value}} for token, value in zip(tokens[1:], values, strict=True)),
            ]
        return {"choices": [choice], "prompt_logprobs": scored}

    def stream(self, choice: dict[str, Any]) -> None:
        """Send a choice token by token; the marks come with the last one. Fault `cut`: break off after so many."""
        self.close_connection = True
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        content = choice["logprobs"]["content"]
        for place, token in enumerate(choice["token_ids"]):
            if place == self.served.fault.get("cut"):
                return
            last = place == len(content) - 1
            part = {"index": 0, "token_ids": [token], "logprobs": {"content": [content[place]]}, "finish_reason": None}
            part["weight_versions"] = choice["weight_versions"] if last else None
            part["finish_reason"] = choice["finish_reason"] if last else None
            self.wfile.write(f"data: {json.dumps({'choices': [part]})}\n\n".encode())
            time.sleep(self.served.fault.get("token_s", 0))
        self.wfile.write(b"data: [DONE]\n\n")

    def answer(self, body: Any) -> None:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(500 if body is None else 200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


if __name__ == "__main__":
    flags = dict(zip(sys.argv[1::1], sys.argv[2::1], strict=False))
    Handler.served = Served(flags["--model"])
    ThreadingHTTPServer((flags.get("--host", "127.0.0.1"), int(flags["--port"])), Handler).serve_forever()
