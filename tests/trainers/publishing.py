"""How a trainer of these tests starts its bridge and publishes weights to it."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from inference.bridge.client import Bridge

ROOT = Path(__file__).parents[2]
_WAIT_S = 60.0


class PolicyServer:
    """A bridge in a process of its own, and the checkpoints that it was given."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        """command: starts a bridge, without its address and policy."""
        self._command, self._environment, self._folder = command, environment, folder
        self.address = f"unix:{folder / 'bridge.sock'}"
        self.version = ""
        """Policy version that it serves."""
        self._count = 0
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.communicate()

    def publish(self, model: Any) -> None:
        """Serve the weights of a transformers model from now on; starts the bridge at first."""
        self._count += 1
        directory, self.version = self._folder / f"policy-{self._count}", f"v{self._count}"
        model.save_pretrained(directory)
        new, file = self._folder / "policy.new", self._folder / "policy"
        new.write_text(f"{directory}\n{self.version}\n")
        new.rename(file)
        if self._process is None:
            self._process = self._started(file)
            return
        with Bridge(self.address) as bridge:
            deadline = time.monotonic() + _WAIT_S
            while bridge.info().versions[0] != self.version:
                assert time.monotonic() < deadline, f"{self.version} is not served after {_WAIT_S:g} s"
                time.sleep(0.02)
        shutil.rmtree(self._folder / f"policy-{self._count - 1}")

    def _started(self, file: Path) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [*self._command, "--policy-file", str(file), "--listen", self.address],
            cwd=ROOT,
            env={**self._environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        answer = process.stdout.readline()
        assert answer.startswith(f"policy {self.version} at "), f"the bridge said {answer!r}"
        return process
