"""Logs of a training's pods, kept in the store when a Job ends:

    logs/training/<action key>/<restarts>-<first 8 digits of the Job's uid>/<pod>.log      at most 1 MiB of its end

They belong to no artifact: nothing reads them but people, and they may be deleted at any time.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from contracts.errors import StoreError
from contracts.store import Store
from resources.kubernetes.client import Api, ApiFault
from resources.kubernetes.manifests import RESTARTS
from resources.kubernetes.watching import PodRecord, Watched
from resources.training_logs import logs_folder

LOG_BYTES = 1 << 20
"""What is kept of a pod's log, from its end."""
_READERS = 8


class PodLogs:
    """The logs of one Job, read while its pods exist."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._read: dict[str, bytes] = {}
        self._faults: dict[str, str] = {}

    def read(self, records: list[PodRecord], patience_s: float) -> None:
        """Read the logs of pods that have started and still exist; a longer log replaces an earlier one."""
        wanted = [record for record in records if record.started and not record.gone]
        with ThreadPoolExecutor(_READERS) as pool:
            for record, found in zip(wanted, pool.map(lambda each: self._fetch(each, patience_s), wanted), strict=True):
                if isinstance(found, str):
                    self._faults[record.uid] = found
                elif len(found) >= len(self._read.get(record.uid, b"")):
                    self._read[record.uid] = found

    def keep(self, watched: Watched, store: Store | None, key: str) -> str:
        """Write the logs to the store. Returns where they are, or why they are not; never raises."""
        if store is None:
            return "no store for the logs"
        meta = watched.training["metadata"]
        folder = f"{logs_folder(key)}/{meta['annotations'].get(RESTARTS, '0')}-{meta['uid'][:8]}"
        try:
            for record in watched.records:
                store.create(f"{folder}/{record.name}.log", self._content(record))
        except (StoreError, OSError) as error:
            return f"logs could not be kept: {error}"
        return f"logs: {store.url}/{folder}"

    def _content(self, record: PodRecord) -> bytes:
        found = self._read.get(record.uid)
        if found is not None:
            return found
        if not record.started:
            return b"(the pod never started)\n"
        said = self._faults.get(record.uid, "the pod was gone before its log was read")
        return f"(no log: {said})\n".encode()

    def _fetch(self, record: PodRecord, patience_s: float) -> bytes | str:
        try:
            return self._api.log(record.name, LOG_BYTES, patience_s)
        except ApiFault as fault:
            return str(fault)
