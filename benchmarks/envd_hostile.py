"""Malformed and hostile requests for every method of an envd server, generated from its protocol descriptors.

All random choices use the given `random.Random`, so that a seed reproduces them and hypothesis can shrink them.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from google.protobuf import message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_pb2 as pb
from envd.connection import IDEMPOTENCY_KEY, SANDBOX_TOKEN
from envd.tools import ALL_TOOLS
from envd.types import Handle

METHODS: Mapping[str, MethodDescriptor] = {
    f"/{service.full_name}/{method.name}": method
    for protocol in (pb, operations_pb)
    for service in protocol.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
"""Every method by its gRPC path."""
_DEEP = 50_000
_PATHS = (
    "",
    ".",
    "..",
    "/",
    "//",
    "../" * 40 + "etc/passwd",
    "/etc/shadow",
    "/proc/self/mem",
    "/proc/1/root",
    "/dev/zero",
    "app.py",
    "app.py/x",
    "a\0b",
    "a\nb",
    "x" * 5000,
    "d/" * 2500 + "f",
    "\x1b[2J\x1b]0;x\x07",
    "\u202egnp.py",
    "\ud7ff\U0010ffff",
    "%2e%2e%2f",
    "~root",
    "$(id)",
    "-rf",
    ".git/config",
    ".git/hooks/post-checkout",
    "/workspace/../../etc",
    "COM1",
    " ",
    "link",
)
_WORDS = (
    *_PATHS,
    "namespaces",
    "gvisor",
    "plain",
    "no-such-backend",
    "unix:/nowhere",
    "127.0.0.1:1",
    "[::1]:0",
    "dns:///x",
    "(" * 200,
    "(a+)+$",
    "[",
    "a{99999}",
    "version: 1",
    "limits: {memory_mb: .inf}",
    "a: &a [*a]",
    "!!python/object/apply:os.system [id]",
    "{" * 3000,
    "- " * 5000,
)
_NUMBERS = (0, 1, -1, 2, 7, 255, 1 << 15, (1 << 31) - 1, -(1 << 31), 1 << 32, (1 << 63) - 1, -(1 << 63), (1 << 64) - 1)
_REALS = (0.0, -0.0, 1e-300, -1.0, 0.01, 1.5, 1e9, 1e308, float("inf"), float("-inf"), float("nan"))


@dataclass(frozen=True)
class Hostile:
    """One request in wire format; streaming methods get all of `messages`."""

    path: str
    messages: tuple[bytes, ...]
    metadata: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Known:
    """Resources that an attacker may use: its own sandboxes, and a template."""

    handles: Sequence[Handle]
    template: str


def hostile_request(chance: random.Random, known: Known, path: str | None = None) -> Hostile:
    """Random bytes, a damaged message, or a well-formed message with hostile values; with a valid, a wrong or no
    token.
    """
    path = path or chance.choice(sorted(METHODS))
    method = METHODS[path]
    handle = chance.choice(list(known.handles))
    many = chance.randint(0, 4) if path.endswith(("/Upload", "/Receive")) else 1
    messages = tuple(_encoded(chance, method.input_type, known, handle) for _ in range(many))
    return Hostile(path, messages, _metadata(chance, handle))


def _encoded(chance: random.Random, kind: Descriptor, known: Known, handle: Handle) -> bytes:
    way = chance.random()
    if way < 0.15:
        return chance.randbytes(chance.choice((0, 1, 3, 50, 5000)))
    data = hostile_message(chance, kind, known, handle).SerializeToString()
    return _damaged(chance, data) if way < 0.35 else data


def _damaged(chance: random.Random, data: bytes) -> bytes:
    found = bytearray(data[:100_000])
    for _ in range(chance.randint(1, 8)):
        if found:
            found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found[: chance.randint(0, len(found))] if chance.random() < 0.3 else found)


def hostile_message(chance: random.Random, kind: Descriptor, known: Known, handle: Handle, depth: int = 0) -> Message:
    """Well-formed message with hostile values; sometimes with a valid sandbox and template, to reach deeper code."""
    message: Message = message_factory.GetMessageClass(kind)()
    for field in kind.fields:
        if chance.random() < 0.25 or depth > 3:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            _fill_map(chance, getattr(message, field.name), field)
        elif field.is_repeated:
            for _ in range(chance.choice((0, 1, 2, 3, 40))):
                if field.message_type is not None:
                    child = hostile_message(chance, field.message_type, known, handle, depth + 1)
                    getattr(message, field.name).add().CopyFrom(child)
                else:
                    getattr(message, field.name).append(_value(chance, field, known, handle))
        elif field.message_type is not None:
            getattr(message, field.name).CopyFrom(hostile_message(chance, field.message_type, known, handle, depth + 1))
        else:
            setattr(message, field.name, _value(chance, field, known, handle))
    if isinstance(message, pb.BatchRequest):
        message.sandbox_id, message.timeout_s = handle.id, chance.choice((0.0, 0.2, 1.0, -1.0, float("nan")))
    if isinstance(message, pb.VerifyRequest) and chance.random() < 0.9:
        message.timeout_s = 0.5
    return message


def _fill_map(chance: random.Random, target: object, field: FieldDescriptor) -> None:
    entry = field.message_type
    assert entry is not None
    value = entry.fields_by_name["value"]
    number = chance.choice((0, 1, 3, 3, 3, 5000 if chance.random() < 0.01 else 50))
    for at in range(number):
        key = chance.choice(_PATHS) if number < 10 else f"k{at}"
        target[key] = _bytes(chance)[:100] if value.type == FieldDescriptor.TYPE_BYTES else chance.choice(_WORDS)  # type: ignore[index]


def _value(chance: random.Random, field: FieldDescriptor, known: Known, handle: Handle) -> object:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        if field.type == FieldDescriptor.TYPE_BYTES:
            return _bytes(chance)
        return _text(chance, field.name, known, handle)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return chance.random() < 0.5
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return chance.choice(_REALS)
    low, high = _RANGES[field.cpp_type]
    return min(max(chance.choice(_NUMBERS), low), high)


_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(1 << 31), (1 << 31) - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(1 << 63), (1 << 63) - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, (1 << 32) - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, (1 << 64) - 1),
}


def _text(chance: random.Random, name: str, known: Known, handle: Handle) -> str:
    if name in ("sandbox_id", "sandbox_ids") and chance.random() < 0.7:
        return handle.id
    if name == "tokens" and chance.random() < 0.3:
        return handle.token
    if name == "template" and chance.random() < 0.6:
        return known.template
    if name == "name" and chance.random() < 0.8:
        return chance.choice([*ALL_TOOLS, "fly"])
    if name == "arguments" and chance.random() < 0.4:
        return chance.choice(("true", "cat", "/bin/sh", "yes", "-c", "sleep 1000"))
    if name == "path" and chance.random() < 0.3:
        return "app.py"
    if name == "arguments_json":
        return _json(chance)
    return chance.choice(_WORDS)


def _json(chance: random.Random) -> str:
    word = chance.choice(_PATHS).encode("unicode_escape").decode().replace("\\", "\\\\").replace('"', '\\"')
    return chance.choice(
        (
            "",
            "null",
            "[]",
            "{",
            '{"path": 1}',
            "NaN",
            "1e999",
            "[" * _DEEP,
            '{"a":' * _DEEP,
            '{"path": "app.py", "path": null}',
            "1" * 5000,
            f'{{"path": "{word}"}}',
            f'{{"path": "{word}", "content": "x"}}',
            f'{{"path": "app.py", "old": "{word}", "new": ""}}',
            f'{{"command": "{word}"}}',
            '{"command": "kill -9 -1"}',
            '{"command": "yes"}',
            '{"command": "exec 1>&- 2>&-; sleep 100"}',
            f'{{"pattern": "{word}"}}',
            '{"pattern": "(a+)+$"}',
            '{"query": "add two numbers"}',
            '{"path": "app.py", "line": -1, "new": ""}',
            '{"path": "app.py", "start": 999999999999999999999999, "end": -5}',
            '{"path": "\\ud800"}',
            '{"path": "\\u0000"}',
        )
    )


def _bytes(chance: random.Random) -> bytes:
    return chance.choice(
        (b"", b"\0", b"x" * 10, b"\xff\xfe", b"diff --git a/../x b/../x\n", bytes(100_000), chance.randbytes(64))
    )


def _metadata(chance: random.Random, handle: Handle) -> tuple[tuple[str, str], ...]:
    found = []
    way = chance.random()
    if way < 0.75:
        found.append((SANDBOX_TOKEN, handle.token))
    elif way < 0.95:
        found.append((SANDBOX_TOKEN, chance.choice(("", "x", handle.token[:-1], handle.id, "A" * 5000))))
    if chance.random() < 0.2:
        found.append((IDEMPOTENCY_KEY, chance.choice(("", "k", str(chance.randrange(500)), "k" * 201, "../x"))))
    return tuple(found)
