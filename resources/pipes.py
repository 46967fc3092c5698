"""Messages between a launched process and its Dagster run: through local files, or through an S3 bucket.

run --context--> process --messages--> run        triplane-pipes/<random>/ in the bucket, removed when the process has
                                                  ended
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import dagster as dg

from contracts.owned import owned_directory, sweep_abandoned
from resources.channel import PIPES_BUCKET, Channel
from resources.errors import LaunchFailed

_PREFIX = "triplane-pipes-"
"""Prefix of the folders that carry a child's context and messages."""


def open_channel(bucket: str) -> AbstractContextManager[Channel]:
    """Open the channel of one process. bucket: "" means $TRIPLANE_PIPES_BUCKET, or files if it is not set.

    Raises LaunchFailed.
    """
    bucket = bucket or os.environ.get(PIPES_BUCKET, "")
    if not bucket:
        return _file_channel()
    try:
        from resources.pipes_s3 import bucket_channel  # needs boto3, which local runs do not load
    except ImportError as error:
        raise LaunchFailed(
            f"messages through bucket {bucket} need {error.name}: pip install 'triplane[aws]', or unset {PIPES_BUCKET}"
        ) from None
    return bucket_channel(bucket)


def sweep_channels() -> None:
    """Remove folders left by killed launchers. Call this also in runs that never launch anything."""
    sweep_abandoned(Path(tempfile.gettempdir()), _PREFIX)


@contextmanager
def _file_channel() -> Iterator[Channel]:
    sweep_channels()
    with owned_directory(_PREFIX) as folder:
        injector, reader = (
            dg.PipesFileContextInjector(f"{folder}/context"),
            dg.PipesFileMessageReader(f"{folder}/messages"),
        )
        yield Channel(injector, reader, ended=lambda: None)
