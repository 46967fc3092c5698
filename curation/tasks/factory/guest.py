"""Run the program `inside` over a repository in a sandbox and return its result."""

from __future__ import annotations

import asyncio
import base64
import json
import re
import zlib
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath
from typing import Any

from contracts.digests import digest_of
from contracts.errors import InfraFault, TriplaneError
from contracts.retries import backoff_s
from contracts.runtimes import ARCHIVE
from contracts.tasks import files_digest
from curation.errors import TaskError
from curation.tasks.factory.environment import Surroundings, test_paths
from curation.tasks.factory.functions import is_test_file
from curation.tasks.importing.trees import LEFT_OUT, Tree
from envd.client import Limits, SandboxClient, SandboxGone, ToolCall

PROGRAM = Path(__file__).with_name("inside.py").read_text()
IDLE_S = 5.0
"""Seconds in all for which tests may only wait, as in a deadlock: longer ones make no task."""
_DIRECTORY = ".triplane-factory"
_ATTEMPTS = 3
_BACKOFF_S = 0.5
_ENDED_BADLY = (3, 4)
"""Exit codes of pytest for an internal error and for wrong options."""
_OFF = (
    "cacheprovider terminal junitxml pastebin stepwise faulthandler setuponly setupplan doctest unraisableexception"
    " threadexception"
)
OPTIONS = (
    *("-c", "/dev/null", "--rootdir", "/workspace", "--import-mode=importlib", "-o", "addopts="),
    *("--continue-on-collection-errors", "--capture=no"),
    *(part for name in _OFF.split() for part in ("-p", f"no:{name}")),
)
"""Options with which the verifier runs tests (envd/sandbox/runner.py); conftest files count where there are any."""


class Guest:
    """Runs specifications in sandboxes over one tree, in its surroundings. slots: sandboxes at once."""

    def __init__(
        self, client: SandboxClient, tree: Tree, around: Surroundings, *, slots: int = 4, memory_mb: int = 1024
    ) -> None:
        self._client, self._tree, self._around = client, tree, around
        self._slots = asyncio.Semaphore(slots)
        self._limits = Limits(memory_mb=memory_mb, pids=1024, cpu=1.0, disk_mb=256, lifetime_s=3600)
        self._template: asyncio.Task[str] | None = None

    async def run(self, spec: dict[str, Any], *, timeout_s: float, env: dict[str, str] | None = None) -> dict[str, Any]:
        """Result of the program for this specification.

        Raises TaskError if the repository's code ends the program, InfraFault if envd keeps failing.
        """
        spec = {
            "options": [*OPTIONS, *self._around.environment.options],
            "files": test_files(self._tree),
            "workers": 1,
            "idle_s": IDLE_S,
            **spec,
        }
        async with self._slots:
            fault: TriplaneError | None = None
            for attempt in range(_ATTEMPTS):
                if fault is not None:
                    await asyncio.sleep(backoff_s(attempt, _BACKOFF_S))
                try:
                    return await self._once(spec, timeout_s, env or {})
                except TaskError:
                    raise
                except TriplaneError as error:
                    self._template, fault = None, error
            if isinstance(fault, SandboxGone):
                raise TaskError(f"the tests end the sandbox that they run in ({fault}): find the one that kills others")
            raise InfraFault(f"{fault}: check the envd server, then run the same command again") from fault

    async def _once(self, spec: dict[str, Any], timeout_s: float, env: dict[str, str]) -> dict[str, Any]:
        template = await self._put()
        names = [f"{_DIRECTORY}/{name}" for name in ("inside.py", "spec.json", "result")]
        runtime = self._around.environment.runtime
        async with await self._client.create(template, limits=self._limits, env=env, runtime=runtime) as sandbox:
            await sandbox.batch(
                [
                    ToolCall("write", {"path": names[0], "content": PROGRAM}),
                    ToolCall("write", {"path": names[1], "content": json.dumps(spec)}),
                ]
            )
            # outside of the workspace, so that tests which walk over it find what the repository holds
            command = (
                f"mv {_DIRECTORY} /tmp/.factory && mkdir /tmp/.factory/home && HOME=/tmp/.factory/home"
                " python /tmp/.factory/inside.py /tmp/.factory/spec.json /tmp/.factory/result </dev/null 2>&1"
                f"; mkdir -p /workspace/{_DIRECTORY} && cp /tmp/.factory/result /workspace/{names[2]}"
            )
            said = await sandbox.call(
                ToolCall("exec", {"command": command, "timeout_s": timeout_s}), timeout_s=timeout_s
            )
            found = _result(await sandbox.finish(), names[2])
        if found is None or found["exit"] in _ENDED_BADLY:
            text = " ".join(said.text.split())[-300:]
            ended = f"did not end within {timeout_s:.0f} s" if said.timed_out else f"ended their process ({text})"
            raise TaskError(f"the tests {ended}: see that `pytest` runs to its end in the repository")
        return found

    async def _put(self) -> str:
        if self._template is None or (self._template.done() and self._template.exception() is not None):
            self._template = asyncio.create_task(self._send())
        return await asyncio.shield(self._template)

    async def _send(self) -> str:
        archive = await asyncio.to_thread(self._around.runtime.path, ARCHIVE)
        await self._client.put_runtime(self._around.environment.runtime, archive)
        return await self._client.put_template(self._tree)

    @property
    def digest(self) -> str:
        """Digest of what determines results beside the specification: the program, the tree and its surroundings."""
        files = files_digest(self._tree | {_DIRECTORY: PROGRAM.encode()})
        values = self._around.environment.to_values()
        return digest_of([files, values]) if values else files


def test_files(tree: Tree) -> list[str]:
    """Files of tests that pytest would collect."""
    found = [
        path
        for path in sorted(tree)
        if is_test_file(path)
        and not any(part in LEFT_OUT or part.startswith(".") for part in PurePosixPath(path).parts[:-1])
    ]
    wanted = test_paths(tree)
    patterns = [pattern for each in wanted for pattern in (each, f"{each}/*")]
    return [path for path in found if any(fnmatchcase(path, each) for each in patterns)] or found


def _result(diff: bytes, path: str) -> dict[str, Any] | None:
    """Result in a diff that adds its file, or None."""
    match = re.search(rb"^\+\+\+ b/" + re.escape(path.encode()) + rb"\n@@[^\n]*\n\+([A-Za-z0-9+/=]+)$", diff, re.M)
    if match is None:
        return None
    try:
        found: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(match[1])))
    except (ValueError, zlib.error):
        return None
    return found
