"""Stub vLLM servers and weights services as processes, as pods of a fleet would run them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from tests.http_client import HTTP
from tests.ports import free_port
from tests.vllm.conftest import HERE, ROOT

START_S = 60.0


def until(reached: Callable[[], bool], timeout_s: float = START_S) -> None:
    deadline = time.monotonic() + timeout_s
    while not reached():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def is_healthy(url: str) -> bool:
    """Whether a server passes its health check; not if it can't be reached."""
    try:
        return HTTP.get(f"{url}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def environment(**more: str) -> dict[str, str]:
    path = ":".join(str(each) for each in (HERE / "stub", ROOT, ROOT / "kernels"))
    return {**os.environ, "PYTHONPATH": path, **more}


class StubServer:
    """A server that starts on `directory`, unproven, whenever it is started."""

    def __init__(self, directory: Path, host: str = "127.0.0.1", port: int = 0, flags: tuple[str, ...] = ()) -> None:
        self.directory, self.host, self.port, self.flags = directory, host, port or free_port(host), flags
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        module = "vllm.entrypoints.openai.api_server"
        place = ["--model", str(self.directory), "--host", self.host, "--port", str(self.port)]
        self.process = subprocess.Popen([sys.executable, "-m", module, *place, *self.flags], env=environment(), cwd="/")

    def wait(self) -> None:
        until(self.answers)

    def answers(self) -> bool:
        assert self.process is not None and self.process.poll() is None, "it ended"
        return is_healthy(self.url)

    def is_running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def tell(self, **fault: Any) -> None:
        HTTP.post(f"{self.url}/fault", json=fault, timeout=30)

    def mark(self, version: str) -> None:
        HTTP.post(f"{self.url}/update_weight_version", json={"new_version": version}, timeout=30)

    def version(self) -> str:
        return str(HTTP.get(f"{self.url}/weight_info", timeout=30).json()["weight_version"])

    def asked(self) -> list[str]:
        """Salts of the requests that were no probes."""
        salts = HTTP.get(f"{self.url}/seen", timeout=30).json()["salts"]
        return [salt for salt in salts if not salt.startswith("probe of")]

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()


class WeightsServer:
    """`python -m inference weights`."""

    def __init__(self, folder: Path, store: str, host: str = "127.0.0.1", port: int = 0, *options: str) -> None:
        self.folder, self.host, self.port = folder, host, port or free_port(host)
        listen = f"{host}:{self.port}"
        self.command = [sys.executable, "-m", "inference", "weights", "--listen", listen, "--folder", str(folder)]
        self.command += ["--store", store, *options]
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    def start(self) -> None:
        self.process = subprocess.Popen(self.command, env=environment(), cwd=ROOT)

    def wait(self) -> None:
        def answers() -> bool:
            assert self.process is not None and self.process.poll() is None, "it ended"
            return is_healthy(self.url)

        until(answers)

    def pull(self, bearer: str | None = None, **body: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {bearer}"} if bearer else {}
        return HTTP.post(f"{self.url}/pull", json=body, headers=headers, timeout=90)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
