"""Verifications without a server: the zygote's verifier role, asked directly."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from envd.sandbox.diff import workspace_diff
from envd.sandbox.linux import sandbox_owner
from envd.server.templates import Templates
from envd.server.zygotes import Zygote
from envd.types import Limits, Observation, TestOutcome, VerifyResult
from tests.envd.harness import FILES, HIDDEN, TESTS


class Verifying:
    """A verifier of one backend with a directory of its own."""

    def __init__(self, backend: str) -> None:
        self._backend = backend
        self._loop = asyncio.new_event_loop()

    def __enter__(self) -> Self:
        self._run_dir = Path(tempfile.mkdtemp(prefix="envd-t-"))
        self._run_dir.chmod(0o711)
        for name in ("templates", "boxes"):
            (self._run_dir / name).mkdir()
        self._templates = Templates(self._run_dir / "templates", sandbox_owner())
        start = Zygote.start(self._run_dir, self._run_dir.name, self._backend)
        self._zygote = self._loop.run_until_complete(start)
        return self

    @property
    def pid(self) -> int:
        """Process that forks the verifiers."""
        return self._zygote._process.pid

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.run_until_complete(self._zygote.stop())
        self._loop.close()
        shutil.rmtree(self._run_dir, ignore_errors=True)

    def verify(
        self,
        changes: Mapping[str, str],
        *,
        files: Mapping[str, bytes] = FILES,
        hidden: Mapping[str, bytes] = HIDDEN,
        tests: tuple[str, ...] = TESTS,
        diff: bytes | None = None,
        timeout_s: float = 20,
        artifacts: tuple[str, ...] = (),
        product: tuple[str, ...] = (),
    ) -> VerifyResult:
        """The verdict on the template with these files written, or with this diff."""
        found = _diff(files, changes) if diff is None else diff
        return self._loop.run_until_complete(self._verify(files, found, hidden, tests, timeout_s, artifacts, product))

    async def _verify(
        self,
        files: Mapping[str, bytes],
        diff: bytes,
        hidden: Mapping[str, bytes],
        tests: tuple[str, ...],
        timeout_s: float,
        artifacts: tuple[str, ...],
        product: tuple[str, ...],
    ) -> VerifyResult:
        template = await self._templates.put(files)
        header: dict[str, Any] = {
            "op": "verify",
            "diff_bytes": len(diff),
            "hidden": [[path, len(content)] for path, content in sorted(hidden.items())],
            "tests": list(tests),
            "timeout_s": timeout_s,
            "artifacts": artifacts,
            "product": product,
        }
        link = await self._zygote.spawn(template, Limits(), {})
        blob = diff + b"".join(content for _, content in sorted(hidden.items()))
        reply, _ = await link.ask(header, blob, timeout_s=60)
        link.close()
        said = dict(reply["result"])
        outcomes = tuple(TestOutcome(**each) for each in said.pop("outcomes"))
        seen = tuple(Observation(**each) for each in said.pop("observations"))
        return VerifyResult(outcomes=outcomes, observations=seen, **said | {"tampering": tuple(said["tampering"])})


def _diff(files: Mapping[str, bytes], changes: Mapping[str, str]) -> bytes:
    with tempfile.TemporaryDirectory() as scratch:
        before, after = Path(scratch, "a"), Path(scratch, "b")
        contents = {**files, **{path: text.encode() for path, text in changes.items()}}
        for root, tree in ((before, files), (after, contents)):
            for path, content in tree.items():
                target = root / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(content)
                os.utime(target, (1, 1 if root == before else 2))
        return workspace_diff(before, after)
