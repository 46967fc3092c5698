"""Writer of messages to an S3 bucket that does not delay the end of its process, as that of dagster-pipes does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from io import StringIO
from typing import Any

from dagster_pipes import PipesS3MessageWriter, PipesS3MessageWriterChannel


class Writer(PipesS3MessageWriter):
    """Uploads what was said every `interval` seconds, and the rest at the end."""

    def make_channel(self, params: Mapping[str, Any]) -> _Uploads:
        """The channel to the place that the launcher's parameters name."""
        return _Uploads(self._client, params["bucket"], params["key_prefix"], interval=self.interval)


class _Uploads(PipesS3MessageWriterChannel):
    @contextmanager
    def buffered_upload_loop(self) -> Iterator[None]:
        """Upload in a thread."""
        closing = threading.Event()
        thread = threading.Thread(target=self._upload, args=(closing,), daemon=True)
        thread.start()
        try:
            yield
        finally:
            closing.set()
            thread.join(timeout=60)

    def _upload(self, closing: threading.Event) -> None:
        index, last = 1, False
        while not last:
            last = closing.wait(self._interval)
            said = [json.dumps(message) for message in self.flush_messages()]
            if said:
                self.upload_messages_chunk(StringIO("\n".join(said)), index)
                index += 1
