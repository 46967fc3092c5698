"""Keeps Dagster's own event log off the terminal: it is in the UI, and bars show progress. TRIPLANE_DEBUG=1 lets it through."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet_dagster() -> Iterator[None]:
    """Silence Dagster in this block. Exceptions still say everything."""
    if os.environ.get("TRIPLANE_DEBUG"):
        yield
        return
    from dagster import BetaWarning, PreviewWarning

    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", BetaWarning)
            warnings.simplefilter("ignore", PreviewWarning)
            yield
    finally:
        logging.disable(before)
