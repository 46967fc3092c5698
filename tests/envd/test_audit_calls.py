"""The trail of calls: each call of a client is an event, without secrets, and no number of them pushes out a denial."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_pb2 as pb
from envd.client import EnvdError, ToolCall
from envd.errors import ServerUnavailable
from envd.local import LocalEnvd
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.server import audit
from envd.server.audit import AuditLog
from envd.server.observing import Stream
from envd.server.operations.trail import Trail, about
from envd.server.serve import Options, _observers

SECRET = "s3cret-that-nobody-may-read"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


async def calls_of_every_kind(client: OperationsClient) -> ManagedSandbox:
    template = await client.put_template({"a.py": f"x = '{SECRET}'\n".encode()})
    sandbox = await client.create(template, env={"KEY": SECRET}, labels={"team": "x"})
    await sandbox.call(ToolCall("exec", {"command": "echo \x1b[2J hello"}))
    write = ToolCall("write", {"path": "b.txt", "content": SECRET})
    edit = ToolCall("edit", {"path": "b.txt", "old": SECRET, "new": SECRET + "!"})
    await sandbox.batch([write, edit, ToolCall("search", {"pattern": "^x", "path": "a.py"})])
    await sandbox.files.write("dir/c.txt", SECRET.encode())
    await sandbox.files.move("dir/c.txt", "d.txt")
    assert [piece async for piece in sandbox.files.download("d.txt")]
    await sandbox.files.upload("up.txt", SECRET.encode())
    with pytest.raises(grpc.aio.AioRpcError):
        await client.files.Upload(iter([operations_pb.UploadChunk(data=b"no header")]))
    started = await sandbox.processes.start(["cat", "-"], env={"KEY": SECRET}, stdin=True)
    await sandbox.processes.stdin(started.process, SECRET.encode())
    await sandbox.processes.close_stdin(started.process)
    assert [event async for event in sandbox.processes.connect(started.process)]
    with contextlib.suppress(EnvdError):
        await sandbox.files.read("not there")
    with contextlib.suppress(EnvdError):
        await sandbox.files.read("../../etc/passwd")
    call = asyncio.ensure_future(sandbox.call(ToolCall("exec", {"command": "sleep 30"})))
    await asyncio.sleep(0.5)
    call.cancel()
    hidden = {"test_a.py": f"def test_a(): '{SECRET}'\n".encode()}
    await client.verify(template, await sandbox.diff(), hidden, ["test_a.py::test_a"])
    await sandbox.close()
    return sandbox


def test_each_call_is_told_with_its_end_and_without_secrets(tmp_path: Path) -> None:
    path = tmp_path / "audit"

    async def job(address: str) -> tuple[ManagedSandbox, list[Any]]:
        async with OperationsClient(address) as client:
            sandbox = await calls_of_every_kind(client)
            return sandbox, [event async for event in client.audit()]

    with LocalEnvd("plain", options=["--audit-calls", "--audit-log", str(path)]) as server:
        sandbox, events = asyncio.run(job(server.address))
    trail, others = lines(tmp_path / "audit.calls"), lines(path)
    assert [event.number for event in events] == list(range(1, len(events) + 1)), "memory merges both, without gaps"
    numbers = sorted(line["number"] for line in trail + others)
    assert numbers == list(range(1, len(numbers) + 1)), "one numbering over both files"
    assert {line["kind"] for line in trail} == {"call.begun", "call.made"}
    kinds = {line["kind"] for line in others}
    assert {"path.escape", "call.abandoned"} <= kinds and not kinds & audit.TRAIL
    whole = (tmp_path / "audit.calls").read_text() + path.read_text()
    assert SECRET not in whole and sandbox.handle.token not in whole and "\x1b" not in whole

    made = [line["detail"] | {"sandbox": line["sandbox"]} for line in trail if line["kind"] == "call.made"]
    begun = {line["number"]: line["detail"] for line in trail if line["kind"] == "call.begun"}
    told = {
        (each["method"], each["code"], json.dumps(begun.get(each.get("begun"), each).get(key)))
        for each in made
        for key in ("calls", "arguments", "path", "source", "tests", "files")
        if key in begun.get(each.get("begun"), each)
    }
    assert told >= {
        ("Sandboxes/PutTemplate", "OK", "1"),
        ("Tools/Batch", "OK", '["exec echo \\u001b[2J hello"]'),
        ("Tools/Batch", "OK", '["write b.txt", "edit b.txt", "search a.py ^x"]'),
        ("Files/Write", "OK", '"dir/c.txt"'),
        ("Files/Move", "OK", '"dir/c.txt"'),
        ("Files/Download", "OK", '"d.txt"'),
        ("Files/Upload", "OK", '"up.txt"'),
        ("Processes/Start", "OK", '["cat", "-"]'),
        ("Files/Read", "NOT_FOUND", '"not there"'),
        ("Tools/Batch", "CANCELLED", '["exec sleep 30"]'),
        ("Verifier/Verify", "OK", "1"),
    }
    own = {"Tools", "Files", "Processes"}
    assert all((each["sandbox"] == sandbox.id) == (each["method"].partition("/")[0] in own) for each in made[:8])
    assert all(0 <= each["seconds"] < 60 for each in made)


def test_what_a_killed_server_had_begun_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "audit"

    async def job(server: LocalEnvd) -> None:
        assert server._process is not None
        async with OperationsClient(server.address) as client:
            sandbox = await client.create(await client.put_template({"a": b""}))
            running = asyncio.ensure_future(
                sandbox.call(ToolCall("exec", {"command": "touch made-by-the-attack; sleep 60"}))
            )
            while not any(each.path == "made-by-the-attack" for each in (await sandbox.files.list("."))[0]):
                await asyncio.sleep(0.05)
            os.kill(server._process.pid, signal.SIGKILL)
            with pytest.raises(ServerUnavailable):
                await running

    with LocalEnvd("plain", options=["--audit-calls", "--audit-log", str(path)]) as server:
        asyncio.run(job(server))
    trail = lines(tmp_path / "audit.calls")
    (number,) = [line["number"] for line in trail if "made-by-the-attack" in json.dumps(line["detail"])]
    assert next(line["kind"] for line in trail if line["number"] == number) == "call.begun"
    assert number not in [line["detail"].get("begun") for line in trail]
    assert max(line["number"] for line in trail) > max(line["number"] for line in lines(path))
    again = AuditLog(path)  # without a trail: the numbers go on above its own all the same
    event = again.record("limit.pids", "a")
    again.close()
    assert event is not None and event.number == max(line["number"] for line in trail) + 1


def test_without_options_nothing_watches_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    sandboxes: Any = None
    assert _observers(Options(), sandboxes, contextlib.AsyncExitStack()) == [], "so there is no interceptor"


def test_no_number_of_calls_pushes_out_a_denial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(audit, "KEEP_CALLS", 50)
    log = AuditLog(tmp_path / "audit", calls=True, max_bytes=20_000)
    log.record("policy.denied", "a", reason="one")
    for number in range(2000):
        log.record("call.made", "a", method="Tools/Batch", calls=[f"exec {number}"], code="OK")
    log.record("tool.denied", "a", tool="exec")
    assert [event.kind for event in log.since() if event.kind != "call.made"] == ["policy.denied", "tool.denied"]
    assert [event.number for event in log.since(1000)] == list(range(1952, 2003)), "the newest calls, none only counted"
    log.close()
    assert [line["kind"] for line in lines(tmp_path / "audit")] == ["policy.denied", "tool.denied"]
    assert sorted(path.name for path in tmp_path.glob("audit.calls.[0-9]")) == [f"audit.calls.{n}" for n in (1, 2, 3)]


def batch(*calls: tuple[str, Any]) -> pb.BatchRequest:
    return pb.BatchRequest(sandbox_id="x", calls=[pb.ToolCall(name=n, arguments_json=a) for n, a in calls])


def test_what_is_told_is_bounded_and_every_call_of_a_batch_is_in_it() -> None:
    many = about("Tools/Batch", batch(*[("exec", json.dumps({"command": f"{n} " + "y" * 1000})) for n in range(256)]))
    assert len(many["calls"]) <= 32 and sum(text.count("exec") for text in many["calls"]) == 256
    assert len(json.dumps(many)) < 4096
    (one,) = about("Tools/Batch", batch(("exec", json.dumps({"command": "z" * 10_000}))))["calls"]
    assert 400 < len(one) <= 512
    for text, words in (
        ("[" * 100_000, "no JSON"),
        ("[]", "no object"),
        ('{"content": "x"}', "exec"),
        ("x" * 2_000_000, "characters"),
    ):
        (said,) = about("Tools/Batch", batch(("exec", text)))["calls"]
        assert words in said and len(said) < 80
    arguments = about("Processes/Start", operations_pb.ProcessStartRequest(arguments=["a" * 9000] * 100))["arguments"]
    assert len(arguments) <= 32 and all(len(each) <= 512 for each in arguments)


def test_secrets_of_requests_are_not_told() -> None:
    header = operations_pb.ReceiveHeader(
        sandbox_id="id", token=SECRET, env={"A": SECRET}, template="t", template_files={"a": SECRET.encode()}
    )
    stream = Stream(aiter_of())
    stream.first = operations_pb.SnapshotChunk(header=header, data=SECRET.encode())
    requests: dict[str, Any] = {
        "Operations/Receive": stream,
        "Operations/Migrate": operations_pb.MigrateRequest(sandbox_id="id", target="host:1", target_key=SECRET),
        "Operations/Restore": operations_pb.RestoreRequest(snapshot_id=SECRET),
        "Operations/DeleteBatch": operations_pb.DeleteBatchRequest(sandbox_ids=["a"], tokens=[SECRET]),
        "Processes/Stdin": operations_pb.ProcessStdinRequest(sandbox_id="id", process=1, data=SECRET.encode()),
        "Files/Write": operations_pb.FileWriteRequest(sandbox_id="id", path="p", data=SECRET.encode()),
    }
    for method, request in requests.items():
        assert SECRET not in repr(about(method, request)), method
    assert about("Operations/Migrate", requests["Operations/Migrate"]) == {"target": "host:1"}
    assert about("Files/Write", requests["Files/Write"]) == {"path": "p", "data_bytes": len(SECRET)}


async def aiter_of() -> Any:
    return
    yield


class Called:
    """As much of a gRPC context as tells who calls."""

    def peer(self) -> str:
        return "ipv4:10.1.2.3:50123"


def test_who_called_is_told_by_address_and_other_services_are_not() -> None:
    log = AuditLog()

    async def calls() -> None:  # in a task of its own, as gRPC's are
        trail = Trail(log)
        trail.begin("Operations/Info", operations_pb.InfoRequest(), Called())("OK")
        trail.begin("Health/Check", operations_pb.InfoRequest(), Called())("OK")
        trail.begin("Files/Upload", None, Called())("UNAUTHENTICATED")

    asyncio.run(calls())
    events = [(event.kind, json.loads(event.detail_json)) for event in log.since()]
    assert [(kind, said["method"], said["peer"]) for kind, said in events] == [
        ("call.made", "Operations/Info", "10.1.2.3"),
        ("call.made", "Files/Upload", "10.1.2.3"),
    ]
