"""How a trainer of these tests starts its policy server and publishes weights to it. Needs the standard library."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import TracebackType
from typing import Any, Self

ROOT = Path(__file__).parents[2]


class PolicyServer:
    """The server's process, and the checkpoints that it was given."""

    def __init__(self, python: str, folder: Path) -> None:
        """python: of the environment with Triplane."""
        self._python, self._folder = python, folder
        self.address = f"unix:{folder / 'bridge.sock'}"
        self.version = ""
        """Policy version that it serves."""
        self._count = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._count:
            self._process.kill()
            self._process.communicate()

    def publish(self, model: Any) -> None:
        """Serve the weights of a transformers model from now on; starts the server at first."""
        self._count += 1
        directory, self.version = self._folder / f"policy-{self._count}", f"v{self._count}"
        model.save_pretrained(directory)
        if self._count == 1:
            socket = self.address.removeprefix("unix:")
            self._process = subprocess.Popen(
                [self._python, "-m", "tests.trainers.policy_server", str(directory), self.version, socket],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        else:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{directory} {self.version}\n")
            self._process.stdin.flush()
            shutil.rmtree(self._folder / f"policy-{self._count - 1}")
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        assert answer == self.version, f"the policy server answered {answer!r} to {self.version}"
