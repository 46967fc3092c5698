"""Errors that only a client has, and the server's by the name that it sends.

A server's error is raised as the class of `inference.bridge.errors` or `inference.errors` with that name.
"""

from __future__ import annotations

import grpc

from contracts.rpc.connecting import ERROR_NAME
from inference import errors as inference_errors
from inference.bridge import errors
from inference.bridge.errors import BridgeError
from inference.errors import InferenceError


class AccessDenied(BridgeError):
    """The bridge asks for a key or a certificate that this client did not send."""


class BridgeUnreachable(BridgeError):
    """The bridge did not answer for `give_up_after_s` seconds. What was begun there goes on until its lease ends."""


class TokensChanged(BridgeError):
    """The bridge has another token, or another log-probability, than this client has seen."""


class RecordCorrupt(BridgeError):
    """The record of an ended episode does not have the digest that the bridge sent with it."""


_OURS = {kind.__name__: kind for kind in (AccessDenied,)}
_BY_CODE = {grpc.StatusCode.UNAUTHENTICATED: AccessDenied, grpc.StatusCode.PERMISSION_DENIED: AccessDenied}
_TRANSIENT_CODES = {grpc.StatusCode.UNAVAILABLE}
_FINAL_CODES = {
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
}
TRANSIENT = (grpc.StatusCode.UNAVAILABLE.value[0], errors.TooManySteps.__name__)
"""Status code, and name, of failures after which the same command is sent again."""


def error_of(name: str, words: str, code: grpc.StatusCode | None = None) -> InferenceError:
    """The error that a server names, or that follows from a status code where it names none."""
    kind = _OURS.get(name) or getattr(errors, name, None) or getattr(inference_errors, name, None)
    if not (isinstance(kind, type) and issubclass(kind, InferenceError)):
        kind = BridgeError if code is None else _BY_CODE.get(code, BridgeError)
        words = f"{name}: {words}" if name else words
    return kind(words)


def raise_final(status: grpc.aio.AioRpcError, address: str) -> None:
    """Raise the error of a status that another try does not change."""
    code, name = status.code(), str(dict(status.trailing_metadata() or ()).get(ERROR_NAME, ""))
    if code not in _TRANSIENT_CODES and (name or code in _FINAL_CODES):
        raise error_of(name, f"{status.details() or code.name} (the bridge at {address})", code) from status


def unreachable(address: str, seconds: float, reason: str) -> BridgeUnreachable:
    """The error of a bridge that did not answer for so long. reason: what the last try came to."""
    return BridgeUnreachable(
        f"the bridge at {address} did not answer for {seconds:g} s ({reason}): check that `python -m inference bridge`"
        " runs there, then go on with the same episodes"
    )
