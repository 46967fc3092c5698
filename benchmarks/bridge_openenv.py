"""OpenEnv's side of the `bridge` benchmark: its WebSocket server with an echo environment, and its own client.

    python -P bridge_openenv.py serve CORE TOKENS      answers `tell`
    python -P bridge_openenv.py measure PORT WIDTH     answers `tokens COUNT` and `short COUNT` with its rate

In the environment of `make test-peers`. Imports nothing of Triplane. The environment is asynchronous, which OpenEnv
serves without a thread for each step; each session is a WebSocket of its own, as OpenEnv has it.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import socket
import sys
import threading
import time
from typing import Any

from pydantic import create_model

_SHORT = "hello"
_TURNS = 32


def _serve(core: int, tokens: int) -> None:
    os.sched_setaffinity(0, {core})
    types = importlib.import_module("openenv.core.env_server.types")
    interfaces = importlib.import_module("openenv.core.env_server.interfaces")
    http_server = importlib.import_module("openenv.core.env_server.http_server")
    uvicorn = importlib.import_module("uvicorn")
    action = create_model("Say", __base__=types.Action, message=(str, ...))
    fields: dict[str, Any] = {"message": (str, ""), "token_ids": (list[int], []), "logprobs": (list[float], [])}
    observation = create_model("Said", __base__=types.Observation, **fields)
    ids, logprobs = list(range(tokens)), [-0.5 - place / 1000 for place in range(tokens)]

    def answer(said: Any) -> Any:
        if said.message == _SHORT:
            return observation(message=said.message)
        return observation(token_ids=ids, logprobs=logprobs)

    async def step_async(self: Any, said: Any, timeout_s: float | None = None, **options: Any) -> Any:
        return answer(said)

    async def reset_async(self: Any, seed: int | None = None, episode_id: str | None = None, **options: Any) -> Any:
        return observation()

    methods = {
        "SUPPORTS_CONCURRENT_SESSIONS": True,
        "reset": lambda self, **options: observation(),
        "reset_async": reset_async,
        "step": lambda self, said, **options: answer(said),
        "step_async": step_async,
        "state": property(lambda self: types.State()),
    }
    echo = type("Echo", (interfaces.Environment,), methods)
    app = http_server.create_fastapi_app(echo, action, observation, max_concurrent_envs=4096)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
    threading.Thread(target=_tell, args=(server, listener.getsockname()[1]), daemon=True).start()
    server.run(sockets=[listener])


def _tell(server: Any, port: int) -> None:
    """Say when the server is ready, then its port and processor seconds."""
    while not server.started:
        time.sleep(0.05)
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"port": port, "cpu_s": time.process_time()}), flush=True)
    server.should_exit = True


async def _measure(port: int, width: int) -> None:
    client = importlib.import_module("openenv.core.generic_client").GenericEnvClient
    print(json.dumps({"ready": True}), flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        what, count = line.split()
        message = _SHORT if what == "short" else what
        sessions = [client(base_url=f"http://127.0.0.1:{port}") for _ in range(width)]
        await asyncio.gather(*(each.connect() for each in sessions))
        await asyncio.gather(*(each.reset() for each in sessions))
        turns = max(_TURNS, int(count) // width)

        async def play(session: Any, message: str, turns: int) -> None:
            for _ in range(turns):
                result = await session.step({"message": message})
                assert result.observation["message" if message == _SHORT else "token_ids"]

        await asyncio.gather(*(play(each, message, 4) for each in sessions))  # warms up
        begin = time.perf_counter()
        await asyncio.gather(*(play(each, message, turns) for each in sessions))
        seconds = time.perf_counter() - begin
        await asyncio.gather(*(each.disconnect() for each in sessions))
        print(json.dumps({"steps": width * (turns + 4), "per_second": width * turns / seconds}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        _serve(int(sys.argv[2]), int(sys.argv[3]))
    else:
        asyncio.run(_measure(int(sys.argv[2]), int(sys.argv[3])))
