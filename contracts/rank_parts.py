"""Tensors of one artifact, staged by N ranks and committed by one. Plain files on a disk that all of them share.

    <folder>/rank-<k>.owner                owner name of the rank's process, written first
    <folder>/rank-<k>-<i>.safetensors      its parts
    <folder>/part-<k>.json                 their tensors, sizes and digests: written last, at once

    rank k:        stage_parts
    one of them:   stage_parts -> gather_parts (waits, verifies) -> contracts.tensor_parts.add_parts -> commit

`folder` is new for each launch: the launcher makes it with `contracts.store.scratch_directory` and passes it to the
ranks. So a rank of an earlier launch never writes into a later one, and a dead launcher's folder is swept.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from contracts.digests import canonical_json, has_sha256
from contracts.errors import InfraFault, SchemaError
from contracts.failpoints import failpoint
from contracts.owned import fate_of_owner, owned_name
from contracts.tensor_files import Form, read_header
from contracts.tensor_parts import Part, ReadTensor, cut_parts, write_part

POLL_S = 0.05


def stage_parts(
    folder: Path,
    rank: int,
    ranks: int,
    forms: Mapping[str, Form],
    read: ReadTensor,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write the tensors of one rank. forms: whole tensors that no other rank writes; may be empty."""
    (folder / f"rank-{rank}.owner").write_text(owned_name())
    cuts = [cut for cut in cut_parts(forms) if cut]
    parts = [
        write_part(folder / f"rank-{rank}-{number}.safetensors", cut, read, metadata)
        for number, cut in enumerate(cuts, start=1)
    ]
    failpoint("rank-staged")
    partial = folder / f"part-{rank}.json.partial"
    partial.write_bytes(canonical_json({"rank": rank, "ranks": ranks, "parts": [asdict(part) for part in parts]}))
    partial.replace(folder / f"part-{rank}.json")


def gather_parts(folder: Path, ranks: int, forms: Mapping[str, Form], timeout_s: float) -> list[Part]:
    """Wait for the parts of all ranks and return them, in order of rank.

    forms: every tensor of the artifact. Raises InfraFault if a rank has died or is not done in time, SchemaError if
    the parts are not whole, not as declared, or not exactly `forms`.
    """
    deadline = time.monotonic() + timeout_s
    for rank in range(ranks):
        _await_rank(folder, rank, ranks, deadline, timeout_s)
    parts: list[Part] = []
    owners: dict[str, str] = {}
    for rank in range(ranks):
        for part in _read_rank(folder, rank, ranks):
            _verify(folder / part.file, part)
            for tensor in part.tensors:
                if tensor in owners:
                    raise SchemaError(f"{folder}: tensor {tensor} is in two parts, {owners[tensor]} and {part.file}")
                owners[tensor] = part.file
            parts.append(part)
    _require_forms(
        folder, {name: (tensor[0], tensor[1]) for part in parts for name, tensor in part.tensors.items()}, forms
    )
    failpoint("ranks-gathered")
    return parts


def _await_rank(folder: Path, rank: int, ranks: int, deadline: float, timeout_s: float) -> None:
    done, owner = folder / f"part-{rank}.json", folder / f"rank-{rank}.owner"
    while not done.is_file():
        # the owner is asked first: a rank that ended between the two questions is done
        gone = owner.is_file() and fate_of_owner(owner.read_text()) == "gone"
        if done.is_file():
            return
        if gone:
            raise InfraFault(f"rank {rank} of {ranks} died before its parts were written to {folder}: see its log")
        if time.monotonic() > deadline:
            raise InfraFault(
                f"rank {rank} of {ranks} did not write its parts to {folder} within {timeout_s:g} s: see its log"
            )
        time.sleep(POLL_S)


def _read_rank(folder: Path, rank: int, ranks: int) -> list[Part]:
    path = folder / f"part-{rank}.json"
    try:
        body: dict[str, Any] = json.loads(path.read_bytes())
        if (body["rank"], body["ranks"]) != (rank, ranks):
            raise SchemaError(
                f"{path} is of rank {body['rank']} of {body['ranks']}, not {rank} of {ranks}: launch again"
            )
        return [
            Part(
                part["file"],
                part["size"],
                part["sha256"],
                {name: (dtype, tuple(shape), digest) for name, (dtype, shape, digest) in part["tensors"].items()},
            )
            for part in body["parts"]
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SchemaError(f"{path} is damaged ({error!r}): launch the ranks again") from None


def _verify(path: Path, part: Part) -> None:
    """Raise SchemaError unless the file holds exactly the declared bytes and tensors."""
    if Path(part.file).name != part.file or not path.is_file():
        raise SchemaError(f"{path} is declared by its rank but missing: launch the ranks again")
    if path.stat().st_size != part.size or not has_sha256(path, part.sha256):
        raise SchemaError(f"{path} does not hold the bytes that its rank declared: launch the ranks again")
    declared = {name: (dtype, shape) for name, (dtype, shape, _) in part.tensors.items()}
    if {name: place.form for name, place in read_header(path).items()} != declared:
        raise SchemaError(f"{path} does not hold the tensors that its rank declared: launch the ranks again")


def _require_forms(folder: Path, found: Mapping[str, Form], forms: Mapping[str, Form]) -> None:
    for name in forms:
        if name not in found:
            raise SchemaError(f"{folder}: no rank wrote tensor {name}: assign every tensor to a rank")
        if found[name] != forms[name]:
            raise SchemaError(f"{folder}: tensor {name} is {found[name]}, expected {forms[name]}")
    surplus = sorted(set(found) - set(forms))
    if surplus:
        raise SchemaError(f"{folder} holds tensors that were not asked for: {', '.join(surplus[:3])}")
