"""Cache events as vLLM and SGLang publish them: three frames a message, (topic, sequence number, MessagePack batch).

A batch is [seconds, events, data-parallel rank]. An event is a map with its name under `type`, or, as earlier versions
of vLLM wrote it, an array that begins with its name; both forms are read. The block hashes are the engine's own,
numbers or bytes.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from contracts.errors import ConfigError
from inference.errors import RouterError
from inference.router.fingerprint import Namespace
from inference.router.residency import Batch, Cleared, Event, Removed, Stored

END = (-1).to_bytes(8, "big", signed=True)
"""Sequence number of the frame that ends a replay."""
_FIELDS = {
    "BlockStored": (
        *("block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"),
        *("extra_keys", "group_idx", "kv_cache_spec_kind", "kv_cache_spec_sliding_window"),
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}
"""Names of the values of an event that is an array, after its own name."""
_USES = {"events": "cache events", "redis": "routers that share a Redis server"}
_NUMBER = struct.Struct(">Q")
"""A sequence number."""
_INVALID = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error)
"""Raised by reading what is no batch of events."""
_WHOLE = ("full_attention", "mla_attention")
"""Kinds of attention whose blocks hold a whole prefix."""


def require(module: str, extra: str = "events") -> Any:
    """Import a package of an extra. Raises ConfigError where it is not installed."""
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ConfigError(
            f"{_USES[extra]} need the package {module.partition('.')[0]}: pip install 'triplane[{extra}]'"
        ) from None


class WireDecoder:
    """Decodes the messages of one replica.

    Blocks in other memory than the GPU's, and of attention that sees only a part of the prompt, are left out.
    """

    def __init__(self) -> None:
        self._decode = require("msgspec.msgpack").decode
        self._partial: set[int] = set()
        """Groups of layers whose blocks don't hold a whole prefix."""

    def batch(self, sequence: bytes, payload: bytes) -> Batch:
        """Decode one message. Raises RouterError for what is none."""
        try:
            _, events, *_ = self._decode(payload)
            found = [self._event(_fields(each)) for each in events]
            (number,) = _NUMBER.unpack(sequence)
        except _INVALID as error:
            raise RouterError(f"a message is no batch of cache events: {type(error).__name__}: {error}") from None
        return Batch(number, [each for each in found if each is not None])

    def _event(self, fields: Mapping[str, Any]) -> Event | None:
        kind, group = fields["type"], fields.get("group_idx")
        if kind == "AllBlocksCleared":
            return Cleared()
        if kind == "BlockStored" and group is not None:
            whole = fields.get("kv_cache_spec_kind") in (None, *_WHOLE)
            if not whole or fields.get("kv_cache_spec_sliding_window") is not None:
                self._partial.add(group)
        if group in self._partial or fields.get("medium") not in (None, "GPU"):
            return None
        if kind == "BlockRemoved":
            return Removed(_hashes(fields["block_hashes"]))
        if kind != "BlockStored":
            return None
        blocks, parent = _hashes(fields["block_hashes"]), fields["parent_block_hash"]
        if parent is not None:
            _hashes([parent])
        tokens = np.array(fields["token_ids"], np.int32)
        if tokens.ndim != 1:
            raise TypeError("token_ids is no list of integers")
        root = None if parent is not None else _namespace(fields.get("extra_keys"), fields.get("cache_salt"))
        return Stored(blocks, parent, tokens, fields["block_size"], root)


def encode(batch: Batch) -> tuple[bytes, bytes]:
    """Sequence number and payload of a batch, as vLLM writes them. Extra keys are left out: none of ours has any."""
    payload: bytes = require("msgspec.msgpack").encode([time.time(), [_encoded(each) for each in batch.events]])
    return batch.sequence.to_bytes(8, "big"), payload


def _fields(event: Any) -> Mapping[str, Any]:
    if isinstance(event, Mapping):
        return event
    name, *values = event
    return {"type": name, **dict(zip(_FIELDS.get(name, ()), values, strict=False))}


def _hashes(found: Any) -> list[int | bytes | str]:
    """Block hashes of an event. Raises TypeError for other values."""
    if not isinstance(found, list) or not all(isinstance(each, int | bytes | str) for each in found):
        raise TypeError("block hashes are no numbers or bytes")
    return found


def _namespace(extra: Sequence[Sequence[Any] | None] | None, salt: str | None) -> int | None:
    """Namespace of a chain by the extra keys of its blocks (vLLM) or its cache salt (SGLang); None if the server sends
    neither.
    """
    if salt is not None:
        return Namespace(salt).value
    if extra is None:
        return None
    keys = list(extra[0] or ()) if extra else []
    if all(isinstance(key, str) for key in keys) and len(keys) < 2:
        return Namespace(keys[0] if keys else "").value
    return Namespace("", salt=repr(keys)).value


def _encoded(event: Event) -> dict[str, Any]:
    if isinstance(event, Cleared):
        return {"type": "AllBlocksCleared"}
    if isinstance(event, Removed):
        return {"type": "BlockRemoved", "block_hashes": list(event.blocks), "medium": "GPU"}
    return {
        "type": "BlockStored",
        "block_hashes": list(event.blocks),
        "parent_block_hash": event.parent,
        "token_ids": np.asarray(event.tokens).tolist(),
        "block_size": event.block_tokens,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
    }
