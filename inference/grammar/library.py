"""The xgrammar package, which only experiments with a grammar need."""

from __future__ import annotations

from typing import Any

from inference.errors import EngineError


def xgrammar() -> Any:
    """The module. Raises EngineError if it is not installed."""
    try:
        import xgrammar as module
    except ImportError as error:
        raise EngineError(f"a grammar needs xgrammar ({error}): pip install 'triplane[grammar]'") from None
    return module
