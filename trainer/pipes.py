"""Messages to Dagster if it launched this process: through a local file, or through an S3 bucket.

The launcher selects one by environment variables. A bucket needs no shared disk; pods use it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainer.errors import TrainingError

if TYPE_CHECKING:
    from dagster_pipes import PipesContext

PIPES_VARIABLE = "DAGSTER_PIPES_CONTEXT"
UPLOAD_S = 0.5
"""Seconds between two uploads of messages; each upload is one object."""


@contextmanager
def open_pipes() -> Iterator[PipesContext | None]:
    """Open Dagster's channel, which is closed at the end of the block; None if Dagster did not launch this process.

    Raises TrainingError.
    """
    if PIPES_VARIABLE not in os.environ:
        yield None
        return
    with _open() as context:
        yield context


def _open() -> PipesContext:
    from dagster_pipes import PipesMappingParamsLoader, open_dagster_pipes

    bucket = PipesMappingParamsLoader(os.environ).load_messages_params().get("bucket")
    return open_dagster_pipes() if bucket is None else _open_bucket(bucket)


def _open_bucket(bucket: str) -> PipesContext:
    from botocore.exceptions import BotoCoreError, ClientError
    from dagster_pipes import PipesS3ContextLoader, open_dagster_pipes

    from contracts.s3client import code_of, connect
    from trainer.pipes_s3 import Writer

    client = connect(conditional=False)
    try:
        return open_dagster_pipes(
            context_loader=PipesS3ContextLoader(client),
            message_writer=Writer(client, interval=UPLOAD_S),
        )
    except (ClientError, BotoCoreError) as error:
        raise TrainingError(
            f"bucket {bucket} for messages to the launcher can't be read ({code_of(error)}): "
            "check AWS_ENDPOINT_URL, the network and the credentials of this process"
        ) from None
