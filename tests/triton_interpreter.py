"""Triton is imported under its interpreter, by whichever test comes first, so that kernels run on this CPU.

Triton decides for good at its import whether its own library is interpreted, and many packages import it (torch's
compiler, so transformers). TRITON_INTERPRET is set for that moment only: what a test runs, and processes that it
starts, see it where tests/kernels sets it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

import pytest


class InterpretedTriton(MetaPathFinder):
    """Finds `triton` as Python does, and sets TRITON_INTERPRET while it is executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(fullname, path) if fullname == "triton" else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def interpreted(module: ModuleType) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("TRITON_INTERPRET", "1")
                execute(module)

        spec.loader.exec_module = interpreted  # type: ignore[method-assign]
        return spec
