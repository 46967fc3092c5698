"""A gVisor backend on an event loop of its own, and templates for it."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import pytest

from envd.backends.base import BoxSpec
from envd.backends.gvisor.backend import start
from envd.backends.gvisor.boxes import GVisorBackend, GVisorBox
from envd.errors import BackendUnavailable
from envd.sandbox import linux
from envd.types import Limits
from tests.needs import require

T = TypeVar("T")
FILES = {"a.txt": "first\n", "sub/b.txt": "second\n"}
COUNTER = "n=0; while true; do n=$((n+1)); echo $n >/workspace/.n; mv /workspace/.n /workspace/count; sleep 0.02; done"


def require_runsc() -> None:
    """Skip where runsc is not installed; where it is, it must work."""
    require("runsc")


def make_template(directory: Path, files: Mapping[str, str] = FILES) -> Path:
    """As the server's templates are: of the sandboxes' owner, with one modification time."""
    for name, text in files.items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    for path in [directory, *directory.rglob("*")]:
        if linux.sandbox_owner() != os.geteuid():
            os.chown(path, linux.sandbox_owner(), linux.sandbox_owner())
        os.utime(path, (1_000_000_000, 1_000_000_000))
    return directory


class GVisor:
    """One backend and its loop."""

    def __init__(self, directory: Path, pool: int = 0) -> None:
        self.directory = directory
        self.template = make_template(directory / "templates" / "some")
        self.runner = asyncio.Runner()
        self.backend: GVisorBackend = self.runner.run(start(directory, pool))
        self._names = itertools.count()
        self._boxes: list[GVisorBox] = []

    def run(self, job: Callable[[], Awaitable[T]]) -> T:
        """Run a job; what it created and restored is destroyed afterwards."""

        async def whole() -> T:
            try:
                async with asyncio.timeout(120):
                    return await job()
            finally:
                while self._boxes:
                    await self._boxes.pop().destroy()

        return self.runner.run(whole())

    def spec(self, *, limits: Limits = Limits(), **more: Any) -> BoxSpec:
        return BoxSpec(f"box-{next(self._names)}", "some", self.template, limits, **more)

    async def create(self, **more: Any) -> GVisorBox:
        self._boxes.append(await self.backend.create(self.spec(**more)))
        return self._boxes[-1]

    async def restore(self, image: Path, **more: Any) -> GVisorBox:
        self._boxes.append(await self.backend.restore(image, self.spec(**more)))
        return self._boxes[-1]

    def stop(self) -> None:
        self.runner.run(self.backend.stop())
        self.runner.close()


async def shell(box: GVisorBox, command: str, deadline_s: float = 30.0) -> str:
    """What a command prints in the box's shell; it must succeed."""
    (result,) = await box.guest.shell([(command, deadline_s)])
    text = (result.head + result.tail).decode()
    assert result.code == 0, f"{command!r}: {result.code} {text}"
    return text


def reason_of(job: Callable[[], object]) -> str:
    """The words of the BackendUnavailable that this raises."""
    with pytest.raises(BackendUnavailable) as caught:
        job()
    return str(caught.value)
