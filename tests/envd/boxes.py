"""Boxes of the namespaces backend, by the backend's own interface: no server, no client."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from envd.backends.base import Box, BoxSpec
from envd.backends.namespaces import backend as namespaces
from envd.backends.namespaces.backend import NamespacesBackend
from envd.sandbox.linux import sandbox_owner
from envd.types import Limits

T = TypeVar("T")
FILES = {"calc.py": b"x = 1\n", "package/one.py": b"1\n", "package/two.py": b"2\n"}


def template(run_dir: Path, name: str = "template", files: dict[str, bytes] = FILES) -> Path:
    """A template as the server would have stored it."""
    root = run_dir / "templates" / name
    root.mkdir()
    for path, content in files.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_bytes(content)
    for each in [root, *root.rglob("*")]:
        os.chown(each, sandbox_owner(), sandbox_owner())
    return root


def spec(run_dir: Path, limits: Limits | None = None, name: str = "test", **fields: object) -> BoxSpec:
    """Of a box on that template, which is made where it is not there."""
    where = run_dir / "templates/template"
    if not where.exists():
        template(run_dir)
    return BoxSpec(name, "template", where, limits or Limits(), **fields)  # type: ignore[arg-type]


def with_namespaces(run_dir: Path, job: Callable[[NamespacesBackend], Awaitable[T]], pool: int = 0) -> T:
    """Run a coroutine with the backend."""

    async def run() -> T:
        backend = await namespaces.start(run_dir, pool=pool)
        try:
            async with asyncio.timeout(60):
                return await job(backend)
        finally:
            await backend.stop()

    return asyncio.run(run())


async def sh(box: Box, command: str, deadline_s: float = 20) -> str:
    """What a command says in a box's shell, and how it ends."""
    (result,) = await box.guest.shell([(command, deadline_s)])
    return result.head.decode(errors="replace") + f"exit {result.code}"


def in_sandbox(run_dir: Path, *commands: str, read_only: bool = False) -> list[str]:
    """What commands say in one box."""

    async def job(backend: NamespacesBackend) -> list[str]:
        box = await backend.create(spec(run_dir, read_only=read_only))
        try:
            return [await sh(box, command) for command in commands]
        finally:
            await box.destroy()

    return with_namespaces(run_dir, job)


def of_this_run(run_dir: Path) -> list[str]:
    """Groups and processes that name a run directory."""
    groups = [top for top, _, _ in os.walk("/sys/fs/cgroup") if f"/{run_dir.name}" in top]
    said = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    return groups + [line for line in said.splitlines() if run_dir.name in line]
