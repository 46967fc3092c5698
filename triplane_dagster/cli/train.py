"""`triplane train`: the trainer alone, on Parquet files of episodes."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer


def train(
    config: Annotated[Path, typer.Option("--config", "-c", help="YAML file of the run; docs/training.md explains it.")],
) -> None:
    """Train on Parquet files of episodes: supervised, or one iteration of policy gradient.

    The same command continues a run that was killed. Checkpoint, metrics and result are in the run's output folder;
    the last line of stdout is the result as JSON.

    Examples:

        triplane train --config sft.yaml

        triplane train --config rl.yaml
    """
    os.execv(sys.executable, [sys.executable, "-m", "trainer", "--train", str(config)])
