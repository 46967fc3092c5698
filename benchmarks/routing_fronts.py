"""What stands before the replicas in the `routing` benchmark: our router, those of PyPI, or hashing in the client.

    tests/trainer/requirements-peers.txt --make test-peers--> .venv-peers/bin/{vllm-router,smg}

All get the same requests, in text. Routers that hash a header get a group's name in it; ours gets session and group.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from benchmarks.routing_load import Conversation
from contracts.errors import TriplaneError
from contracts.processes import end_process

PATIENCE_S = 60.0
_STOP_S = 10.0


def _no_headers(talk: Conversation) -> dict[str, str]:
    return {}


@dataclass(frozen=True)
class Front:
    """One way from a request to a replica."""

    name: str
    command: Callable[[Sequence[str], int, int], list[str]] | None = None
    """Command line of a router from the replicas' URLs, its port and a spare one; None: the client hashes."""
    headers: Callable[[Conversation], Mapping[str, str]] = _no_headers
    """Of each request."""
    ready: str = "/readiness"
    """Path of the readiness check, which reports the number of healthy replicas."""


def _route(urls: Sequence[str], port: int, spare: int) -> list[str]:
    replicas = [part for url in urls for part in ("--replica", url)]
    return [sys.executable, "-m", "inference", "route", *replicas, "--listen", f"127.0.0.1:{port}"]


def _ours(talk: Conversation) -> dict[str, str]:
    return {"x-session": talk.name, "x-group": talk.key} if talk.named else {}


ROUTE, HASHING = Front("route", _route, _ours, "/health"), Front("hashing")


def peers(folder: Path) -> list[Front]:
    """The routers whose programs are in `folder`, each with both of its cache-aware policies."""

    def front(name: str, program: Sequence[str], policy: str, header: str = "") -> Front:
        def command(urls: Sequence[str], port: int, spare: int) -> list[str]:
            at = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(spare)]
            return [str(folder / program[0]), *program[1:], "--worker-urls", *urls, "--policy", policy, *at]

        return Front(name, command, (lambda talk: {header: talk.key}) if header else _no_headers)

    smg = ("smg", "launch")
    return [
        front("vllm_cache_aware", ("vllm-router",), "cache_aware"),
        front("vllm_consistent_hash", ("vllm-router",), "consistent_hash", "x-session-id"),
        front("smg_cache_aware", smg, "cache_aware"),
        front("smg_consistent_hashing", smg, "consistent_hashing", "x-smg-routing-key"),
    ]


@contextmanager
def running(front: Front, urls: Sequence[str]) -> Iterator[str | None]:
    """URL of the front's router before the replicas; None if it has none. Raises TriplaneError if it doesn't start."""
    if front.command is None:
        yield None
        return
    port, spare = free_ports(2)
    with started(front.command(urls, port, spare)) as process:
        url = f"http://127.0.0.1:{port}"
        await_reply(f"{url}{front.ready}", process, lambda found: found.get("healthy_workers", len(urls)) == len(urls))
        yield url


@contextmanager
def started(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended with the context."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        end_process(process, _STOP_S)


def await_reply(
    url: str, process: subprocess.Popen[bytes], fits: Callable[[dict[str, Any]], bool] = lambda found: True
) -> None:
    """Wait until a URL answers with JSON that fits. Raises TriplaneError."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            reply = httpx.get(url, timeout=PATIENCE_S)
            if reply.is_success and fits(reply.json()):
                return
        except httpx.TransportError:
            pass
        if process.poll() is not None or time.monotonic() > deadline:
            raise TriplaneError(f"{url} did not come up: run {' '.join(map(str, process.args))}")  # type: ignore[arg-type]
        time.sleep(0.05)


def free_ports(count: int) -> list[int]:
    """Ports that nothing listens at."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports
