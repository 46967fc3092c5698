"""Cache events over ZMQ: vLLM's wire format, gaps, restarts, and what no event is believed of."""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from inference.errors import RouterError
from inference.router import Batch, Cleared, Namespace, Removed, Router, Stored
from inference.router.publisher import EventPublisher
from inference.router.residency import Event
from inference.router.subscriber import Subscriptions
from inference.router.wire import WireDecoder, encode

pytest.importorskip("zmq")
msgspec = pytest.importorskip("msgspec")
pytestmark = pytest.mark.anyio
SIZE = 16
PROMPT = list(range(100, 100 + 4 * SIZE))


class Maps(msgspec.Struct, omit_defaults=True, tag=True):
    """vLLM's KVCacheEvent since events are maps."""


class Arrays(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    """vLLM's KVCacheEvent of 0.11 to 0.2x."""


STORED = [
    ("block_hashes", list[Any]),
    ("parent_block_hash", Any),
    ("token_ids", list[int]),
    ("block_size", int),
    ("lora_id", int | None),
    ("medium", str | None),
    ("lora_name", str | None),
    ("extra_keys", list[Any] | None, None),
    ("group_idx", int | None, None),
    ("kv_cache_spec_kind", str | None, None),
    ("kv_cache_spec_sliding_window", int | None, None),
]
REMOVED = [("block_hashes", list[Any]), ("medium", str | None), ("group_idx", int | None, None)]


class Structs:
    """The classes of vllm/distributed/kv_events.py in one of their two forms."""

    def __init__(self, base: type, **options: bool) -> None:
        make: Callable[..., Any] = msgspec.defstruct
        self.stored = make("BlockStored", STORED, bases=(base,), omit_defaults=True, tag=True, **options)
        self.removed = make("BlockRemoved", REMOVED, bases=(base,), omit_defaults=True, tag=True, **options)
        self.cleared = make("AllBlocksCleared", [], bases=(base,), omit_defaults=True, tag=True, **options)
        self.batch = make(
            "KVEventBatch",
            [("ts", float), ("events", list[Any]), ("data_parallel_rank", int | None, None)],
            array_like=True,
            omit_defaults=True,
        )


class Server:
    """Sends payloads as vLLM's ZmqEventPublisher does: (topic, number, payload), and replays on request."""

    def __init__(self, structs: Structs) -> None:
        self.publisher, self.port, self.structs = None, events_port(), structs
        self.sent = 0

    def open(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("inference.router.publisher.encode", self._encoded)
        self.publisher = EventPublisher("127.0.0.1", self.port)

    def _encoded(self, batch: Batch) -> tuple[bytes, bytes]:
        payload = msgspec.msgpack.encode(self.structs.batch(time.time(), list(batch.events), 0))
        return batch.sequence.to_bytes(8, "big"), payload

    def send(self, *events: Any) -> None:
        assert self.publisher is not None
        self.publisher(Batch(self.sent, events))
        self.sent += 1

    def close(self) -> None:
        assert self.publisher is not None
        self.publisher.close()


def events_port() -> int:
    """A port that is free, as the next one is. Below those that Linux gives to connections, which might take it."""
    while True:
        port = random.randrange(20_000, 32_000)
        try:
            with socket.create_server(("127.0.0.1", port)), socket.create_server(("127.0.0.1", port + 1)):
                return port
        except OSError:
            continue


async def reached(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        await asyncio.sleep(0.01)


def followed(port: int, version: str = "v1") -> tuple[Router, Subscriptions]:
    router = Router(Namespace(version))
    subscriptions = Subscriptions(router, port)
    subscriptions.sync({"here": "http://127.0.0.1:1"})
    return router, subscriptions


def cached(router: Router, prompt: list[int] = PROMPT) -> int:
    return router.choose([*prompt, 1], max_tokens=1).cached


def ours(blocks: int, start: int = 0) -> Stored:
    names = [f"b{block}" for block in range(start, blocks)]
    return Stored(names, f"b{start - 1}" if start else None, PROMPT[start * SIZE : blocks * SIZE], SIZE)


@pytest.mark.parametrize("form", ["maps", "arrays"])
async def test_events_in_both_forms_of_vllm_are_read(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    structs = Structs(Maps) if form == "maps" else Structs(Arrays, array_like=True)
    server = Server(structs)
    server.open(monkeypatch)
    router, subscriptions = followed(server.port)
    names, salted, foreign = [bytes([each]) * 32 for each in range(8)], [["v1"], None, None], [["probe"], None, None]
    tokens = PROMPT[: 3 * SIZE]
    server.send(structs.stored(names[:3], None, tokens, SIZE, None, "GPU", None, salted))
    await reached(lambda: cached(router) == 3 * SIZE)
    server.send(structs.removed(names[2:3], "GPU"), structs.removed(names[:1], "CPU"))
    await reached(lambda: cached(router) == 2 * SIZE)
    window = structs.stored(
        names[4:5], names[1], PROMPT[2 * SIZE : 3 * SIZE], SIZE, None, "GPU", None, [None], 1, None, 64
    )
    other = [each + 1 for each in tokens]
    server.send(window, structs.stored(names[5:8], None, other, SIZE, None, "GPU", None, foreign))
    server.send(structs.stored(names[3:4], names[1], PROMPT[2 * SIZE : 3 * SIZE], SIZE, None, "GPU", None, [None], 0))
    await reached(lambda: cached(router) == 3 * SIZE)
    assert cached(router, other) == 0, "another cache salt is another namespace"
    server.send(structs.removed(names[:1], "GPU", 1), structs.cleared())
    await reached(lambda: cached(router) == 0)
    await subscriptions.close()
    server.close()


async def test_a_cache_salt_in_events_of_sglang_is_their_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(Structs(Maps))
    fields = [*STORED[:5], ("medium", str | None, None), ("cache_salt", str | None, None)]
    stored = msgspec.defstruct("BlockStored", fields, bases=(Maps,), omit_defaults=True, tag=True)
    server.open(monkeypatch)
    router, subscriptions = followed(server.port)
    other = [each + 1 for each in PROMPT]
    server.send(stored([-1, -2], None, other[: 2 * SIZE], SIZE, None, "GPU", "v0"))
    server.send(stored([-3], -2, other[2 * SIZE : 3 * SIZE], SIZE, None, "GPU", "v0"))
    server.send(stored([1, 2], None, PROMPT[: 2 * SIZE], SIZE, None, "GPU", "v1"))
    server.send(stored([3], 2, PROMPT[2 * SIZE : 3 * SIZE], SIZE, None, "CPU_PINNED", "v1"))
    await reached(lambda: cached(router) == 2 * SIZE)
    assert cached(router, other) == 0
    await subscriptions.close()
    server.close()


async def test_what_was_published_before_is_replayed() -> None:
    port = events_port()
    publisher = EventPublisher("127.0.0.1", port)
    publisher(Batch(0, [ours(2)]))
    publisher(Batch(1, [ours(4, start=2)]))
    router, subscriptions = followed(port)
    await reached(lambda: cached(router) == 4 * SIZE)
    publisher(Batch(2, [Removed(["b3"])]))
    await reached(lambda: cached(router) == 3 * SIZE)
    assert router.residency.counters.lost == 0
    await subscriptions.close()
    publisher.close()


async def test_a_gap_that_is_not_replayed_empties_the_replica_and_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = events_port()
    publisher = EventPublisher("127.0.0.1", port, steps=1)
    router, subscriptions = followed(port)
    publisher(Batch(0, [ours(2)]))
    await reached(lambda: cached(router) == 2 * SIZE)
    for first in (2, 4):
        publisher(Batch(first, [ours(4, start=2)]))
        await reached(lambda first=first: router.residency.awaited("here") == first + 1)  # type: ignore[misc]
        assert cached(router) == 0
    decision = router.choose([*PROMPT, 1], max_tokens=1)
    router.begin(decision)
    assert cached(router) == 4 * SIZE, "assumed from our own request"
    assert router.residency.counters.lost == 2
    assert [record.message for record in caplog.records].count(
        "here: cache events are lost: its cache counts as empty, and by our own requests; said once"
    ) == 1
    await subscriptions.close()
    publisher.close()


async def test_a_restarted_server_counts_as_empty_and_is_followed_again() -> None:
    port = events_port()
    publisher = EventPublisher("127.0.0.1", port)
    router, subscriptions = followed(port)
    for number in range(3):
        publisher(Batch(number, [ours(number + 1, start=number)]))
    await reached(lambda: cached(router) == 3 * SIZE)
    publisher.close()
    publisher = EventPublisher("127.0.0.1", port)
    publisher(Batch(0, [ours(1)]))
    number = 0

    def again() -> bool:
        nonlocal number
        number += 1  # published until the subscriber has connected again
        publisher(Batch(number, [Removed(["none"])]))
        return cached(router) == SIZE

    await reached(again)
    await subscriptions.close()
    publisher.close()


@pytest.mark.parametrize(
    "wrong",
    [
        Stored(["b2"], "b1", [2**40] * SIZE, SIZE),
        Stored(["b2"], "b1", [[1]] * SIZE, SIZE),  # type: ignore[list-item]
        Stored([["b2"]], "b1", PROMPT[:SIZE], SIZE),  # type: ignore[list-item]
        Stored(["b2"], ["b1"], PROMPT[:SIZE], SIZE),  # type: ignore[arg-type]
        Removed([["b1"]]),  # type: ignore[list-item]
    ],
)
async def test_event_with_impossible_values_ends_the_subscription_only(
    wrong: Event, caplog: pytest.LogCaptureFixture
) -> None:
    port = events_port()
    publisher = EventPublisher("127.0.0.1", port)
    publisher(Batch(0, [ours(2)]))
    router, subscriptions = followed(port)
    await reached(lambda: cached(router) == 2 * SIZE)
    with caplog.at_level(logging.WARNING):
        publisher(Batch(1, [wrong]))
        await reached(lambda: "not followed any more: a message is no batch of cache events" in caplog.text)
    assert cached(router) == 0
    await subscriptions.close()
    publisher.close()


def test_sequence_number_of_another_size_is_refused() -> None:
    _, payload = encode(Batch(0, [Cleared()]))
    with pytest.raises(RouterError, match="no batch of cache events"):
        WireDecoder().batch(b"\xff" * 40, payload)


async def test_blocks_of_another_size_end_the_subscription_only(caplog: pytest.LogCaptureFixture) -> None:
    port = events_port()
    publisher = EventPublisher("127.0.0.1", port)
    publisher(Batch(0, [ours(2)]))
    router, subscriptions = followed(port)
    await reached(lambda: cached(router) == 2 * SIZE)
    with caplog.at_level(logging.WARNING):
        publisher(Batch(1, [Stored(["wide"], None, PROMPT[:32], 32)]))
        await reached(lambda: "not followed any more" in caplog.text)
    assert cached(router) == 0
    assert "set the router's block_tokens" in caplog.text
    router.begin(router.choose([*PROMPT, 1], max_tokens=1))
    assert cached(router) == 4 * SIZE
    publisher(Batch(2, [Cleared()]))
    await subscriptions.close()
    publisher.close()
