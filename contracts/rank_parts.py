"""Tensors of one artifact, written by several ranks, each from its own machine, and committed by rank 0.

    every rank:  stage_parts   its tensors, as files on its own disk
                 put_parts     declare the files to all ranks -> put them into the attempt of rank 0 -> wait for all
    rank 0:      compare the attempt with the declarations -> name the files in the writer; its caller commits

The ranks need no common disk. They share the store, and an `Exchange` through which only declarations pass. Until rank
0 writes the manifest, there is no artifact.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from contracts.artifacts import ArtifactWriter
from contracts.digests import canonical_json, has_sha256
from contracts.errors import InfraFault, SchemaError, StoreError, describe
from contracts.failpoints import failpoint
from contracts.store import Store
from contracts.tensor_files import Form, read_header
from contracts.tensor_parts import Part, ReadTensor, cut_parts, name_stored, part_names, write_part

POLL_S = 1.0
"""Longest time between two reports of a rank that works, in seconds."""
_FIRST_POLL_S = 0.02
_STOP_S = 20.0
"""Time for the file that a rank is storing when another one fails, in seconds."""
_BUSY, _DONE, _FAILED = "busy", "done", "failed: "

Exchange = Callable[[str], Sequence[str]]
"""Collective call: what every rank passed, by rank. Raises if a rank ends or does not answer in time."""
_Result = TypeVar("_Result")


@dataclass(frozen=True)
class RankParts:
    """Files of one rank, in a folder of its machine."""

    folder: Path
    rank: int
    ranks: int
    parts: list[Part]


@dataclass(frozen=True)
class _Declared:
    """What a rank will put."""

    attempt: str
    """Folder in the store; rank 0 decides."""
    parts: list[Part]


def stage_parts(
    folder: Path,
    rank: int,
    ranks: int,
    forms: Mapping[str, Form],
    read: ReadTensor,
    metadata: Mapping[str, str] | None = None,
) -> RankParts:
    """Write the tensors of one rank. forms: whole tensors that no other rank writes; may be empty."""
    cuts = [cut for cut in cut_parts(forms) if cut]
    parts = [
        write_part(folder / f"rank-{rank}-{number}.safetensors", cut, read, metadata)
        for number, cut in enumerate(cuts, start=1)
    ]
    failpoint("rank-staged")
    return RankParts(folder, rank, ranks, parts)


def put_parts(
    out: ArtifactWriter | None,
    store: Store,
    name: str,
    staged: RankParts,
    forms: Mapping[str, Form],
    exchange: Exchange,
) -> None:
    """Put the parts of all ranks into one attempt, as the file `name` or the parts of it. Every rank must call this.

    out: the artifact's writer, on rank 0 alone. forms: every tensor of the artifact. Raises SchemaError if the parts
    are not whole, not as declared, or not exactly `forms`; InfraFault if another rank fails; what `exchange` raises.
    """
    attempt = "" if out is None else out.open_attempt()
    found = exchange(_declaration(name, attempt, staged))
    every = [_read_declaration(words, rank, staged.ranks, name) for rank, words in enumerate(found)]
    parts = [part for each in every for part in each.parts]
    _require_forms(name, every, forms)
    files = part_names(name, len(parts))
    first = sum(len(each.parts) for each in every[: staged.rank])
    placed = _Placing(store, every[0].attempt, staged, files[first : first + len(staged.parts)])
    try:
        in_step(placed.run, exchange, staged.rank, placed.stop)
    except BaseException:
        placed.take_back()
        raise
    if out is not None:
        _require_stored(store, attempt, dict(zip(files, parts, strict=True)))
        failpoint("ranks-gathered")
        name_stored(out, name, parts)


def in_step(
    work: Callable[[], _Result], exchange: Exchange, rank: int, stop: Callable[[], None] | None = None
) -> _Result:
    """Result of `work`, when the work of every rank is done. Every rank must call this. stop: asks `work` to end, if
    another rank failed; it gets some seconds for that.

    The ranks report to each other meanwhile, so that a rank may take longer than they wait for a lost one. Raises the
    error of `work`, InfraFault if that of another rank fails, and what `exchange` raises.
    """
    worker = _Worker(work)
    worker.start()
    try:
        return _result(worker, exchange)
    except BaseException:
        if stop is not None:
            stop()
            worker.over.wait(_STOP_S)
        raise


def _result(worker: _Worker[_Result], exchange: Exchange) -> _Result:
    poll = _FIRST_POLL_S
    while True:
        worker.over.wait(poll)
        poll = min(2 * poll, POLL_S)
        every = exchange(worker.state)
        if worker.error is not None:
            raise worker.error
        for other, state in enumerate(every):
            if state.startswith(_FAILED):
                raise InfraFault(f"rank {other} of {len(every)} {state}")
        if all(state == _DONE for state in every):
            return worker.results[0]


class _Worker(threading.Thread, Generic[_Result]):
    """Work of one rank beside its reports."""

    def __init__(self, work: Callable[[], _Result]) -> None:
        super().__init__(name="rank-parts", daemon=True)
        self._work = work
        self.results: list[_Result] = []
        self.error: BaseException | None = None
        self.state = _BUSY
        self.over = threading.Event()
        """Set at the end. Unlike `join`, a wait for it may be interrupted by a signal and repeated."""

    def run(self) -> None:
        try:
            self.results.append(self._work())
            self.state = _DONE
        except BaseException as error:  # noqa: BLE001 - `in_step` raises it in its own thread
            self.error = error
            self.state = f"{_FAILED}{describe(error) if isinstance(error, OSError) else error}"
        finally:
            self.over.set()


class _Placing:
    """Puts the files of one rank into an attempt."""

    def __init__(self, store: Store, attempt: str, staged: RankParts, files: Sequence[str]) -> None:
        self._store, self._attempt, self._staged, self._files = store, attempt, staged, files
        self._placed: list[str] = []
        self._whole, self._stopped = False, False

    def run(self) -> None:
        """Put all files, and give up the staged ones."""
        for part, file in zip(self._staged.parts, self._files, strict=True):
            if self._stopped:
                return
            path, key = self._staged.folder / part.file, f"{self._attempt}/{file}"
            _verify(path, part)
            if not self._store.create_file(key, path, move=True):
                raise StoreError(f"{self._store.url} already has {key}: another process uses this attempt; run again")
            self._placed.append(key)
            failpoint("rank-part-stored")
        self._whole = True

    def stop(self) -> None:
        """Put no further file."""
        self._stopped = True

    def take_back(self) -> None:
        """Remove the files, unless rank 0 may have been told that all are there: then it decides."""
        if not self._whole:
            with suppress(StoreError):  # unreachable: `store gc` removes them later
                for key in self._placed:
                    self._store.delete(key)


def _declaration(name: str, attempt: str, staged: RankParts) -> str:
    own = {"rank": staged.rank, "ranks": staged.ranks, "name": name, "attempt": attempt}
    return canonical_json({**own, "parts": [asdict(part) for part in staged.parts]}).decode()


def _read_declaration(words: str, rank: int, ranks: int, name: str) -> _Declared:
    try:
        body: dict[str, Any] = json.loads(words)
        if (body["rank"], body["ranks"], body["name"]) != (rank, ranks, name):
            raise SchemaError(
                f"rank {rank} of {ranks} declares {body['name']} of rank {body['rank']} of {body['ranks']}, not its own"
                f" {name}: launch again"
            )
        parts = [
            Part(
                part["file"],
                part["size"],
                part["sha256"],
                {tensor: (dtype, tuple(shape), digest) for tensor, (dtype, shape, digest) in part["tensors"].items()},
            )
            for part in body["parts"]
        ]
        return _Declared(body["attempt"], parts)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"the declaration of rank {rank} of {ranks} is damaged ({error!r}): launch again") from None


def _verify(path: Path, part: Part) -> None:
    """Raise SchemaError unless the file holds exactly the declared bytes and tensors."""
    if Path(part.file).name != part.file or not path.is_file():
        raise SchemaError(f"{path} is declared by its rank but missing: launch the ranks again")
    if path.stat().st_size != part.size or not has_sha256(path, part.sha256):
        raise SchemaError(f"{path} does not hold the bytes that its rank declared: launch the ranks again")
    declared = {name: (dtype, shape) for name, (dtype, shape, _) in part.tensors.items()}
    if {name: place.form for name, place in read_header(path).items()} != declared:
        raise SchemaError(f"{path} does not hold the tensors that its rank declared: launch the ranks again")


def _require_forms(name: str, every: Sequence[_Declared], forms: Mapping[str, Form]) -> None:
    """Raise SchemaError unless the ranks together declare exactly `forms`."""
    owners: dict[str, int] = {}
    found: dict[str, Form] = {}
    for rank, declared in enumerate(every):
        for part in declared.parts:
            for tensor, (dtype, shape, _) in part.tensors.items():
                if tensor in owners:
                    raise SchemaError(f"{name}: tensor {tensor} is of two ranks, {owners[tensor]} and {rank}")
                owners[tensor], found[tensor] = rank, (dtype, shape)
    for tensor in forms:
        if tensor not in found:
            raise SchemaError(f"{name}: no rank wrote tensor {tensor}: assign every tensor to a rank")
        if found[tensor] != forms[tensor]:
            raise SchemaError(f"{name}: tensor {tensor} is {found[tensor]}, expected {forms[tensor]}")
    surplus = sorted(set(found) - set(forms))
    if surplus:
        raise SchemaError(f"{name} holds tensors that were not asked for: {', '.join(surplus[:3])}")


def _require_stored(store: Store, attempt: str, parts: Mapping[str, Part]) -> None:
    """Raise StoreError unless the attempt holds exactly the files of the ranks. The store checked their bytes."""
    sizes = {entry.key.removeprefix(f"{attempt}/"): entry.size for entry in store.entries(f"{attempt}/")}
    for file, part in parts.items():
        if file not in sizes:
            raise StoreError(f"{store.url} lost {attempt}/{file}, which a rank put there: run again")
        if sizes[file] != part.size:
            raise StoreError(
                f"{attempt}/{file} has {sizes[file]} bytes in the store, its rank put {part.size}: run again"
            )
    surplus = sorted(set(sizes) - set(parts))
    if surplus:
        raise StoreError(f"{attempt} in {store.url} holds {surplus[0]}, which no rank declared: run again")
