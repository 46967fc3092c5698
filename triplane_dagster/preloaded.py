"""Imports of a step pool's pod: what steps import late, because most processes of the graph don't need it.

Nothing here may start a thread or open a connection: steps are forked from the process that imports this.
"""

from __future__ import annotations

import gc

import pyarrow.dataset  # noqa: F401 - reading datasets
import torch  # noqa: F401 - training, and the built-in engine

import inference.engines.builtin
import inference.router.router  # noqa: F401
from triplane_dagster.definitions import defs

defs.get_repository_def()
gc.freeze()  # steps don't search through all of this for garbage, nor copy its pages to do so
