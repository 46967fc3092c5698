"""What a request to the router begins with, as integers that can be compared: its token ids, or its text."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from inference.errors import BadRequest

_DEFAULT = 256
"""Tokens that are expected of a request that names no limit."""
_MOST = 2**31
"""Upper bound of the tokens that are expected of a request, so that the sum of a server's loads stays exact."""
_WORD = 4
"""Bytes of text that stand for a token."""


@dataclass(frozen=True)
class Asked:
    """What the router knows of a request."""

    prompt: npt.NDArray[np.int32]
    """[n] token ids, or text in words of 4 bytes."""
    max_tokens: int
    """Most tokens to sample."""
    version: str | None = None
    """Policy version that the server must serve (`policy_version`), else it refuses the request."""


def asked(content: bytes) -> Asked:
    """Read the body of a request for a completion or a chat. Raises BadRequest for what is none."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"the body is not JSON: {error}") from None
    if not isinstance(body, dict):
        raise BadRequest("the body is no JSON object: send one with `prompt` or `messages`")
    found = next((body[name] for name in ("token_ids", "prompt") if name in body), None)
    if found is None and not isinstance(body.get("messages"), list):
        raise BadRequest("the body has neither `prompt`, `token_ids` nor a list `messages`: send one of them")
    sampling = body.get("sampling_params")
    limits = {**(sampling if isinstance(sampling, dict) else {}), **body}
    limit = limits.get("max_completion_tokens") or limits.get("max_tokens")
    most = min(limit, _MOST) if isinstance(limit, int) and limit > 0 else _DEFAULT
    version = body.get("policy_version")
    named = version if isinstance(version, str) else None
    if _is_tokens(found):
        try:
            return Asked(np.array(found, np.int32), most, named)
        except OverflowError:
            raise BadRequest("the prompt has an entry that is not a token id: send integers in [0, 2**31)") from None
    if isinstance(found, str):
        return Asked(_words(found), most, named)
    parts = found if found is not None else [*_listed(body.get("tools")), *body["messages"]]
    return Asked(_words("\n".join(json.dumps(part, sort_keys=True) for part in _listed(parts))), most, named)


def _is_tokens(prompt: Any) -> bool:
    return isinstance(prompt, list) and bool(prompt) and all(type(token) is int for token in prompt)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value] if value is not None else []


def _words(text: str) -> npt.NDArray[np.int32]:
    """Texts with a common beginning have words with a common beginning."""
    raw = text.encode(errors="replace")  # lone surrogates, which servers refuse
    padded = raw + b"\0" * (-len(raw) % _WORD)
    return (np.frombuffer(padded, "<u4") & 0x7FFFFFFF).astype(np.int32)
