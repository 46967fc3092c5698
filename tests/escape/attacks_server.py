"""Attacks on the server by its clients: sizes, slowness, guessed ids and tokens, sandbox rules, repeated keys,
environments.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
import time
from dataclasses import replace
from typing import Any

import grpc

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_operations_pb2_grpc as rpc
from contracts.pb import envd_pb2 as pb
from envd.client import Handle, Limits, ToolCall
from envd.connection import IDEMPOTENCY_KEY, SANDBOX_TOKEN
from envd.messages import limits_message
from envd.server.malformed import STALLED_S
from tests.escape.arena import Arena, attempt
from tests.escape.attack import CONTAINED, SMALL, Attack

_UNBOUNDED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


async def oversize(arena: Arena) -> str:
    before, said = arena.host.server_bytes(), []
    async with grpc.aio.insecure_channel(arena.address, options=_UNBOUNDED) as channel:
        for method, request in (
            ("Files/Write", operations_pb.FileWriteRequest(sandbox_id="x", data=bytes(65 << 20))),
            ("Sandboxes/PutTemplate", pb.PutTemplateRequest(files={"a": bytes(65 << 20)})),
            ("Tools/Batch", pb.BatchRequest(sandbox_id="x", calls=[pb.ToolCall(arguments_json="x" * (65 << 20))])),
        ):
            try:
                await channel.unary_unary(f"/triplane.envd.v1.{method}")(request.SerializeToString(), timeout=30)
                said.append(f"BREACH {method}")
            except grpc.aio.AioRpcError as error:
                said.append(f"refused {method}: {error.code().name}")
    grown = (arena.host.server_bytes() - before) >> 20
    return "\n".join([*said, f"{'BREACH' if grown > 200 else 'bounded'}: it grew by {grown} MiB"])


async def malformed(arena: Arena) -> str:
    said = []
    names = [
        f"{service.full_name}/{method.name}"
        for protocol in (pb, operations_pb)
        for service in protocol.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    ]
    async with grpc.aio.insecure_channel(arena.address, options=_UNBOUNDED) as channel:
        for name in [*names, "triplane.envd.v1.Sandboxes/Nothing", "../Sandboxes/Info"]:
            for data in (b"\xff" * 40, os.urandom(200)):
                try:
                    await channel.unary_unary(f"/{name}")(data, timeout=10)
                    said.append(f"answered {name}")
                except grpc.aio.AioRpcError as error:
                    said.append(f"refused {name}: {error.code().name}")
    refused = sum(each.startswith("refused") for each in said)
    return f"refused {refused} of {len(said)}; {'; '.join(each for each in said if not each.startswith('refused'))}"


async def deep_json(arena: Arena) -> str:
    sandbox = await arena.sandbox()
    said = []
    metadata = ((SANDBOX_TOKEN, sandbox.handle.token),)
    for text in (
        "[" * 100_000,
        '{"a":' * 50_000,
        "1" * 5000,
        '{"path": NaN}',
        "[]",
        "null",
        '{"path": 1e999}',
        '{"timeout_s": 1e400, "command": "true"}',
    ):
        request = pb.BatchRequest(
            sandbox_id=sandbox.id, calls=[pb.ToolCall(name="read", arguments_json=text)], timeout_s=5
        )
        try:
            reply = await arena.client.tools.Batch(request, metadata=metadata, timeout=20)
            said.append(f"{'BREACH' if reply.results[0].ok else 'refused'} {reply.results[0].text[:60]}")
        except grpc.aio.AioRpcError as error:
            said.append(f"refused {error.code().name} {(error.details() or '')[:60]}")
    many = pb.BatchRequest(
        sandbox_id=sandbox.id, calls=[pb.ToolCall(name="list", arguments_json="{}")] * 20_000, timeout_s=5
    )
    reply = await arena.client.tools.Batch(many, metadata=metadata, timeout=60)
    said.append(f"{sum(each.ok for each in reply.results)} of 20,000 calls were run")
    return "\n".join(said)


async def slow_clients(arena: Arena) -> str:
    """Connections that say nothing, half a preface, streams that are opened and never read."""
    sandbox = await arena.sandbox()
    await sandbox.call(ToolCall("exec", {"command": "head -c 10000000 /dev/urandom >big"}))
    before = arena.host.server_bytes()
    path = arena.address.removeprefix("unix:")
    sockets = []
    for data in [b"", b"PRI * HTTP/2.0\r\n", b"GET / HTTP/1.1\r\n\r\n", os.urandom(100)] * 25:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(path)
        try:
            sock.send(data)
        except OSError:
            pass
        sockets.append(sock)
    metadata = ((SANDBOX_TOKEN, sandbox.handle.token),)
    narrow = grpc.aio.insecure_channel(arena.address, options=[("grpc.http2.bdp_probe", 0)])  # takes 64 KiB a stream
    stub: Any = rpc.FilesStub(narrow)  # type: ignore[no-untyped-call]
    request = operations_pb.PathRequest(sandbox_id=sandbox.id, path="big")
    downloads = [stub.Download(request, metadata=metadata) for _ in range(50)]
    for each in downloads:
        await each.read()
    follows = [arena.client.operations.Audit(operations_pb.AuditRequest(follow=True)) for _ in range(50)]
    for each in follows:
        await each.read()
    took = await arena.neighbour.look()
    deadline = time.monotonic() + 3 * STALLED_S
    while time.monotonic() < deadline:  # how long a write waits is looked at when it has begun
        if any([event.kind == "client.stalled" async for event in arena.client.audit(sandbox_id=sandbox.id)]):
            break
        await asyncio.sleep(1)
    grown = (arena.host.server_bytes() - before) >> 20
    for each in [*downloads, *follows]:
        each.cancel()
    await narrow.close()
    for sock in sockets:
        sock.close()
    return f"{'BREACH' if grown > 300 else 'bounded'}: it grew by {grown} MiB; the neighbour answered in {took:.3f} s"


async def half_uploads(arena: Arena) -> str:
    """Uploads that begin and never end: what they hold is bounded, and they end with their clients."""
    sandbox = await arena.sandbox()
    metadata = ((SANDBOX_TOKEN, sandbox.handle.token),)
    before, calls = arena.host.server_bytes(), []
    for n in range(40):
        call = arena.client.files.Upload(metadata=metadata)
        await call.write(
            operations_pb.UploadChunk(header=operations_pb.FileWriteRequest(sandbox_id=sandbox.id, path=f"u{n}"))
        )
        calls.append(call)

    async def stopped(call: Any) -> bool:
        try:
            for _ in range(20):
                async with asyncio.timeout(2):
                    await call.write(operations_pb.UploadChunk(data=bytes(1 << 20)))
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError, TimeoutError):
            return True
        return False

    refused = sum(await asyncio.gather(*map(stopped, calls)))
    grown = (arena.host.server_bytes() - before) >> 20
    took = await arena.neighbour.look()
    for call in calls:
        call.cancel()
    return (
        f"{'BREACH' if grown > 768 else 'bounded'}: refused {refused} of 40, it grew by {grown} MiB; the neighbour"
        f" answered in {took:.3f} s"
    )


async def guessing(arena: Arena) -> str:
    target, said = await arena.sandbox(), set()
    await target.files.write("secret.txt", b"x")
    tokens = [
        "",
        "x",
        target.handle.token[:-1],
        target.handle.token + "x",
        target.id,
        "\u00e9",
        *(secrets.token_urlsafe(24) for _ in range(50)),
    ]
    for token in tokens:
        thief = arena.client.attach(Handle(target.id, token)) if token.isascii() else None
        if thief is not None:
            said.add(await attempt("token", thief.files.read("secret.txt")))
    for identity in (
        "",
        "box-1",
        "../x",
        "*",
        "A" * 22,
        "A" * 100_000,
        *(secrets.token_urlsafe(16) for _ in range(100)),
    ):
        said.add(
            (await attempt("id", arena.client.attach(Handle(identity, target.handle.token)).files.read("secret.txt")))[
                :30
            ]
        )
    thief = arena.client.attach(Handle(target.id, "x"))
    for name in ("fork", "snapshot", "hibernate", "pause", "finish", "diff", "status"):
        said.add(await attempt(name, getattr(thief, name)()))
    await thief.close()
    return "\n".join(sorted(said))


async def tokens_listed(arena: Arena) -> str:
    """What anybody may ask holds no sandbox's token."""
    texts = [repr(await arena.client.list()), repr(await arena.client.info())]
    texts += [event.detail_json async for event in arena.client.audit()]
    found = [text for text in texts if arena.neighbour.sandbox.handle.token in text or arena.host.secret in text]
    return f"{'BREACH' if found else 'no token'} in {len(texts)} answers"


async def foreign_key(arena: Arena) -> str:
    """The idempotency key of a neighbour's call, without its token, gives none of its answers."""
    target = await arena.sandbox()
    await target.files.write("secret.txt", arena.neighbour.secret.encode())
    key = secrets.token_hex(8)
    await target.batch([ToolCall("read", {"path": "secret.txt"})], idempotency_key=key)
    mine = await arena.sandbox()
    answer = (await mine.batch([ToolCall("read", {"path": "secret.txt"})], idempotency_key=key))[0]
    request = pb.BatchRequest(
        sandbox_id=target.id,
        calls=[pb.ToolCall(name="read", arguments_json=json.dumps({"path": "secret.txt"}))],
        timeout_s=10,
    )
    try:
        reply = await arena.client.tools.Batch(
            request, metadata=((SANDBOX_TOKEN, "x"), (IDEMPOTENCY_KEY, key)), timeout=20
        )
        stolen = reply.results[0].text
    except grpc.aio.AioRpcError as error:
        stolen = f"refused {error.code().name}"
    bad = arena.neighbour.secret in answer.text + stolen
    return f"{'BREACH' if bad else 'own answers only'}: {answer.text!r} {stolen!r}"


async def beyond_rules(arena: Arena) -> str:
    said = []
    for words in (
        "resources:\n  maximum: {memory_mb: 1}\n",
        "isolation: machine\nresources: {maximum: {live: 0}}\n",
        "network: {allow: [{host: '169.254.169.254'}]}\n",
        "resources: {maximum: {live: 0}}\n",
        "tools: {allow: [exec]}\nnetwork: {allow: [{host: '*.example.com'}]}\n",
    ):
        said.append(
            await attempt(
                words[:20].replace("\n", " "),
                arena.client.create(
                    arena.template, rules=words, limits=Limits(memory_mb=128, pids=32, cpu=1, disk_mb=16)
                ),
            )
        )
    return "\n".join(said)


async def rules_bombs(arena: Arena) -> str:
    said = []
    for words in (
        "a: &a [1]\n" + "".join(f"b{n}: &b{n} [{'*a, ' * 9}*a]\n" for n in range(9)),
        "!!python/object/apply:os.system ['touch /tmp/escaped']",
        "x: " * 4000,
        "[" * 8000,
        "version: 1\nversion: 2\n",
        "isolation: none\x00",
        "filesystem: {hidden: ['" + "*" * 5000 + "x']}",
    ):
        said.append(await attempt("rules", arena.client.create(arena.template, rules=words)))
    return "\n".join([*said, *(["BREACH a file outside"] if arena.host.escaped_files() else [])])


async def denied_tools(arena: Arena) -> str:
    sandbox = await arena.sandbox(rules="tools: {allow: [read]}\n")
    said = []
    for call in (
        ToolCall("exec", {"command": "id"}),
        ToolCall("write", {"path": "x", "content": ""}),
        ToolCall("nothing", {}),
    ):
        result = await sandbox.call(call)
        said.append(f"{'BREACH' if result.ok else 'refused'} {call.name}: {result.text}")
    said.append(await attempt("start", sandbox.processes.start(["id"])))
    return "\n".join(said)


async def environment(arena: Arena) -> str:
    """Variables that steer programs must act in the sandbox only, and impossible names are refused."""
    said = []
    for env in (
        {"": "x"},
        {"A=B": "x"},
        {"A\0B": "x"},
        {"A": "x" * 300_000},
        {f"A{n}": "x" * 100 for n in range(3000)},
    ):
        said.append(await attempt("environment", arena.client.create(arena.template, env=env)))
    steering = {
        "LD_PRELOAD": "/workspace/evil.so",
        "PYTHONPATH": "/workspace",
        "BASH_ENV": "/workspace/evil.sh",
        "PATH": "/workspace:/usr/bin:/bin",
        "LD_LIBRARY_PATH": "/workspace",
        "PS4": "$(touch /tmp/escaped)",
    }
    sandbox = await arena.sandbox(env=steering)
    for name in ("ls", "tar", "git", "rg", "python3", "cat"):
        await sandbox.files.write(name, b"#!/bin/sh\necho BREACH\n", mode=0o755)
    result = await sandbox.call(ToolCall("list", {}))
    diff = await sandbox.diff()
    said.append(f"{'BREACH' if 'BREACH' in result.text else 'own program'} list; diff of {len(diff)} bytes")
    return "\n".join([*said, *(["BREACH a file outside"] if arena.host.escaped_files() else [])])


async def hostile_numbers(arena: Arena) -> str:
    sandbox, said = await arena.sandbox(), []
    metadata = ((SANDBOX_TOKEN, sandbox.handle.token),)
    identity, huge = sandbox.id, 2**63 - 1
    asks = [
        (
            arena.client.files.Read,
            operations_pb.FileReadRequest(sandbox_id=identity, path="attempts.py", offset=huge, length=huge),
        ),
        (arena.client.files.Read, operations_pb.FileReadRequest(sandbox_id=identity, path="attempts.py", offset=-1)),
        (arena.client.processes.Signal, operations_pb.ProcessSignalRequest(sandbox_id=identity, process=1, signal=9)),
        (
            arena.client.processes.Signal,
            operations_pb.ProcessSignalRequest(sandbox_id=identity, process=2**32 - 1, signal=-5),
        ),
        (
            arena.client.processes.Start,
            operations_pb.ProcessStartRequest(sandbox_id=identity, arguments=["true"], timeout_s=float("nan")),
        ),
        (arena.client.processes.Start, operations_pb.ProcessStartRequest(sandbox_id=identity, arguments=[])),
        (
            arena.client.processes.Start,
            operations_pb.ProcessStartRequest(sandbox_id=identity, arguments=["cat"], ring_bytes=2**32 - 1),
        ),
        (
            arena.client.processes.Start,
            operations_pb.ProcessStartRequest(sandbox_id=identity, arguments=["true"], directory="/proc/1/root"),
        ),
        (arena.client.tools.Batch, pb.BatchRequest(sandbox_id=identity, timeout_s=float("inf"))),
        (arena.client.tools.Batch, pb.BatchRequest(sandbox_id=identity, timeout_s=-1)),
        (
            arena.client.files.List,
            operations_pb.FileListRequest(sandbox_id=identity, path=".", depth=2**32 - 1, limit=2**32 - 1),
        ),
    ]
    for method, request in asks:
        try:
            await method(request, metadata=metadata, timeout=arena.patience_s)
            said.append(f"answered {type(request).__name__}")
        except grpc.aio.AioRpcError as error:
            said.append(f"refused {type(request).__name__}: {error.code().name}")
    for limits in (
        Limits(memory_mb=-1),
        Limits(pids=2**31 - 1),
        Limits(cpu=float("nan")),
        Limits(disk_mb=2**62),
        Limits(lifetime_s=float("inf")),
    ):
        said.append(await attempt("limits", arena.client.create(arena.template, limits=limits)))
    alive = (await sandbox.call(ToolCall("exec", {"command": "echo alive"}), timeout_s=30)).text
    unknown = [each for each in said if "UNKNOWN" in each or "INTERNAL" in each]
    return "\n".join([*said, f"{'BREACH' if unknown else 'no fault'} {unknown}, then {alive!r}"])


async def abandoned(arena: Arena) -> str:
    """Clients that give up in the middle of every kind of call leave no process, and no sandbox beyond its lifetime."""
    before = {each.id for each in await arena.client.list()}
    request = pb.CreateRequest(template=arena.template, limits=limits_message(replace(SMALL, lifetime_s=5)))
    for delay_s in (0.0, 0.002, 0.01, 0.05):
        for _ in range(3):
            making = arena.client.sandboxes.Create(request)
            await asyncio.sleep(delay_s)
            making.cancel()
    sandbox = await arena.sandbox()
    for _ in range(5):
        calling = asyncio.ensure_future(sandbox.call(ToolCall("exec", {"command": "sleep 76543"}), timeout_s=100))
        await asyncio.sleep(0.1)
        calling.cancel()
    left = await arena.left_of(["76543"])
    deadline = time.monotonic() + 15
    while (
        True
    ):  # one whose reply was sent lives as long as its lifetime: gRPC tells no server that a reply was not taken
        unknown = {each.id for each in await arena.client.list()} - before - {sandbox.id}
        if not unknown or time.monotonic() > deadline:
            break
        await asyncio.sleep(0.2)
    return f"{'BREACH' if left or unknown else 'nothing left'} {left} {unknown}"


ATTACKS = (
    Attack(
        "grpc-oversize",
        "grpc",
        "messages of 65 MiB",
        r"refused Files/Write: RESOURCE_EXHAUSTED[\s\S]*bounded",
        act=oversize,
        audit=("request.refused",),
    ),
    Attack(
        "grpc-malformed",
        "grpc",
        "random bytes to every method, and methods that do not exist",
        r"refused \d\d",
        act=malformed,
        audit=("request.refused",),
    ),
    Attack(
        "grpc-deep-json",
        "grpc",
        "arguments nested 100,000 deep, numbers out of range, 20,000 calls in one batch",
        r"refused[\s\S]*\n(1?\d?\d|2[0-4]\d|25[0-6]) of 20,000",
        act=deep_json,
        audit=("request.refused",),
    ),
    Attack(
        "grpc-slow-clients",
        "grpc",
        "100 silent connections, 50 downloads and 50 audit streams that nobody reads",
        r"bounded",
        act=slow_clients,
        audit=("client.stalled",),
    ),
    Attack(
        "grpc-half-uploads",
        "grpc",
        "40 uploads of 20 MiB that never end",
        r"bounded",
        act=half_uploads,
        audit=("limit.disk", "request.refused"),
    ),
    Attack(
        "grpc-numbers",
        "grpc",
        "offsets, sizes, signals, timeouts and limits out of every range",
        r"no fault",
        act=hostile_numbers,
        audit=("request.refused",),
    ),
    Attack(
        "grpc-abandoned",
        "grpc",
        "clients that give up in the middle of creating and running",
        r"nothing left",
        act=abandoned,
        audit=("call.abandoned",),
    ),
    Attack(
        "id-guessing",
        "access",
        "guessed ids and tokens, parts of the right one, every method",
        r"refused token",
        act=guessing,
        audit=("auth.denied",),
    ),
    Attack(
        "token-listed",
        "access",
        "tokens and secrets searched for in what anybody may ask",
        r"no token",
        act=tokens_listed,
        unseen=CONTAINED,
        mark="Operations/List",
    ),
    Attack(
        "idempotency-key-stolen",
        "access",
        "a neighbour's idempotency key repeated",
        r"own answers only",
        act=foreign_key,
        audit=("auth.denied",),
    ),
    Attack(
        "rules-beyond",
        "rules",
        "requests beyond what the rules allow",
        r"refused network",
        act=beyond_rules,
        audit=("policy.denied",),
    ),
    Attack(
        "rules-bombs",
        "rules",
        "rules with aliases, Python objects, depth and duplicate keys",
        r"refused rules",
        act=rules_bombs,
        audit=("request.refused",),
    ),
    Attack(
        "tools-denied",
        "rules",
        "tools and processes that the rules do not allow",
        r"refused exec[\s\S]*refused start",
        act=denied_tools,
        audit=("tool.denied",),
    ),
    Attack(
        "environment",
        "rules",
        "impossible variables; PATH, LD_PRELOAD, BASH_ENV and PYTHONPATH set against the server's own programs",
        r"refused environment[\s\S]*own program",
        act=environment,
        audit=("request.refused",),
    ),
)
