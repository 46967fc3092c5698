"""Quotas by key: templates by count and bytes, sandboxes, memory, snapshots; what is refused or removed."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from contracts.pb import envd_operations_pb2 as pb
from contracts.pb import envd_operations_pb2_grpc as rpc
from contracts.rpc import caller
from envd.client import Access, EnvdError, Limits, ToolCall
from envd.connection import SANDBOX_TOKEN
from envd.errors import FileError, QuotaExceeded, RulesDenied, TemplateError
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from envd.server.verifications import Slots
from tests.envd.harness import served

KEYS = ("first-key-of-enough-characters", "second-key-of-enough-characters")
SMALL = Limits(memory_mb=64)
Job = Callable[[OperationsClient, OperationsClient], Awaitable[None]]


@contextmanager
def serving(tmp_path: Path, quotas: str, backend: str = "plain") -> Iterator[Callable[[Job], None]]:
    """Runs jobs with a client of each key. quotas: YAML; empty for the defaults."""
    (tmp_path / "keys").write_text("\n".join(KEYS) + "\n")
    rules = f"quotas: {{{quotas}}}" if quotas else ""
    with LocalEnvd(backend, log_level="error", rules=rules, options=["--key-file", str(tmp_path / "keys")]) as server:

        async def both(job: Job) -> None:
            one, other = (OperationsClient(server.address, Access(key=key)) for key in KEYS)
            async with one, other:
                await job(one, other)

        yield lambda job: asyncio.run(both(job))


def disk_used(address: str) -> int:
    run_dir = Path(address.removeprefix("unix:")).parent
    return sum(path.lstat().st_blocks * 512 for path in (run_dir / "templates").rglob("*"))


async def refusals(client: OperationsClient) -> list[str]:
    return [json.loads(event.detail_json)["quota"] async for event in client.audit() if event.kind == "quota.refused"]


@pytest.mark.slow
def test_templates_take_a_bounded_part_of_the_disk(tmp_path: Path) -> None:
    async def job(client: OperationsClient, other: OperationsClient) -> None:
        kept = await other.put_template({"a": b"kept"})
        digests = []
        for number in range(12):  # incompressible, so that git's copy is as large: 80 MB each on the disk
            digests.append(await client.put_template({f"{part}": os.urandom(20_000_000) for part in (number, "b")}))
            assert await asyncio.to_thread(disk_used, client.address) < 560 << 20
        with pytest.raises(TemplateError, match="call put_template first"):
            await client.create(digests[0])
        for digest, whose in ((digests[-1], client), (kept, other)):  # the newest, and what another key has put
            async with await whose.create(digest, limits=SMALL) as sandbox:
                assert (await sandbox.call(ToolCall("list", {}))).ok

    with serving(tmp_path, "") as run:
        run(job)


def test_a_template_that_is_too_large_is_refused_and_removes_nothing(tmp_path: Path) -> None:
    async def job(client: OperationsClient, other: OperationsClient) -> None:
        kept = await client.put_template({"a": b"kept"})
        for files in ({"a": bytes(600_000)}, {str(number): b"" for number in range(200)}):
            with pytest.raises(
                QuotaExceeded, match=r"no template of 1 MiB .* raise quotas.template_mb in the server's rules"
            ):
                await client.put_template(files)
        async with await client.create(kept, limits=SMALL):
            pass
        assert await refusals(client) == ["template_mb"] * 2

    with serving(tmp_path, "template_mb: 1") as run:
        run(job)


@pytest.mark.parametrize("backend", ["plain", "namespaces"])
def test_a_template_in_use_is_kept_and_the_least_recently_used_goes(tmp_path: Path, backend: str) -> None:
    async def job(client: OperationsClient, other: OperationsClient) -> None:
        one, two = [await client.put_template({"n": str(number).encode()}) for number in range(2)]
        async with await client.create(one, limits=SMALL) as sandbox:
            three = await client.put_template({"n": b"2"})
            with pytest.raises(TemplateError):
                await client.create(two)
            assert (await sandbox.call(ToolCall("exec", {"command": "cat n; echo new > n"}))).ok
            assert b"+new" in await sandbox.diff()
            async with await client.create(three, limits=SMALL):
                with pytest.raises(
                    QuotaExceeded, match=r"2 templates that are in use: end some sandboxes, or raise quotas.templates"
                ):
                    await client.put_template({"n": b"3"})
            await other.put_template({"n": b"4"})
        assert await refusals(client) == ["templates"]
        again = await client.put_template({"n": b"1"})
        assert again == two
        async with await client.create(two, limits=SMALL) as sandbox:  # also where a pool held sandboxes of it
            assert (await sandbox.call(ToolCall("read", {"path": "n"}))).text == "1 1"

    with serving(tmp_path, "templates: 2", backend) as run:
        run(job)


def test_a_pool_lets_go_of_a_template_that_is_removed(tmp_path: Path) -> None:
    async def job(client: OperationsClient) -> None:
        for _ in range(3):
            for number in range(3):
                digest = await client.put_template({"n": str(number).encode()})
                for _ in range(2):
                    async with await client.create(digest, limits=SMALL) as sandbox:
                        answer = await sandbox.call(ToolCall("exec", {"command": "cat n"}))
                        assert answer.text == f"{number}\nexit 0"

    async def run(address: str) -> None:
        async with OperationsClient(address) as client:
            await job(client)

    with LocalEnvd("namespaces", log_level="error", rules="quotas: {templates: 1}", options=["--pool", "2"]) as server:
        asyncio.run(run(server.address))


def test_sandboxes_and_their_memory_are_counted_by_key_until_they_are_gone(tmp_path: Path) -> None:
    async def job(client: OperationsClient, other: OperationsClient) -> None:
        template = await client.put_template({"a": b""})
        made = [await client.create(template, limits=SMALL) for _ in range(3)]
        with pytest.raises(
            QuotaExceeded, match=r"key [0-9a-f]{12} hold 3 sandboxes: end some, or raise quotas.sandboxes"
        ):
            await client.create(template, limits=SMALL)
        with pytest.raises(QuotaExceeded):
            await made[0].fork()
        results = await client.create_many(template, 2, limits=SMALL)
        assert all(isinstance(each, EnvdError) for each in results)
        async with await other.create(template, limits=SMALL):
            await made.pop().close()
            with pytest.raises(QuotaExceeded, match=r"128 of 200 MiB, and this one asks for 100: .* quotas.memory_mb"):
                await client.create(template, limits=Limits(memory_mb=100))
            made.append(await client.create(template, limits=SMALL))
        with pytest.raises(EnvdError):
            await client.create(template, limits=Limits(memory_mb=1), env={"X": "1"}, backend="none")
        for each in made:
            await each.close()
        together = await asyncio.gather(
            *(client.create(template, limits=SMALL) for _ in range(8)), return_exceptions=True
        )
        assert sum(not isinstance(each, BaseException) for each in together) == 3
        assert set(await refusals(other)) == {"sandboxes", "memory_mb"}

    with serving(tmp_path, "sandboxes: 3, memory_mb: 200") as run:
        run(job)


def test_the_same_idempotency_key_of_two_bearer_keys_makes_two_sandboxes(tmp_path: Path) -> None:
    async def job(client: OperationsClient, other: OperationsClient) -> None:
        template = await client.put_template({"a": b""})
        one = await client.create(template, limits=SMALL, idempotency_key="create-1")
        two = await other.create(template, limits=SMALL, idempotency_key="create-1")
        again = await client.create(template, limits=SMALL, idempotency_key="create-1")
        assert one.id == again.id != two.id

    with serving(tmp_path, "") as run:
        run(job)


@pytest.mark.slow
def test_many_calls_of_one_key_make_the_server_forget_no_answer_of_another(tmp_path: Path) -> None:
    async def job(client: OperationsClient, other: OperationsClient) -> None:
        template = await client.put_template({"a": b""})
        one = await client.create(template, limits=SMALL, idempotency_key="create")
        asked = (other.ask("operations.Info", pb.InfoRequest(), key=str(number)) for number in range(4100))
        await asyncio.gather(*asked)
        again = await client.create(template, limits=SMALL, idempotency_key="create")
        assert one.id == again.id

    with serving(tmp_path, "") as run:
        run(job)


def test_uploads_of_one_key_take_no_room_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envd.server.operations.service_files.MAX_UPLOADING", 1 << 20)

    async def job() -> None:
        async with served(tmp_path, *KEYS) as client, OperationsClient(client.address, Access(key=KEYS[1])) as other:
            template = await client.put_template({"a": b""})
            theirs, ours = await client.create(template), await other.create(template)
            metadata = (("authorization", f"Bearer {KEYS[0]}"), (SANDBOX_TOKEN, theirs.handle.token))

            async def unfinished() -> AsyncIterator[pb.UploadChunk]:
                yield pb.UploadChunk(header=pb.FileWriteRequest(sandbox_id=theirs.id, path="a", data=bytes(1000 << 10)))
                await asyncio.sleep(60)

            async with Access().channel(client.address) as channel:
                stub: Any = rpc.FilesStub(channel)  # type: ignore[no-untyped-call, unused-ignore]
                holding = stub.Upload(unfinished(), metadata=metadata)
                await asyncio.sleep(0.5)
                with pytest.raises(FileError, match="EAGAIN"):
                    await theirs.files.upload("more", bytes(100 << 10))
                assert (await ours.files.upload("other", bytes(100 << 10))).size == 100 << 10
                holding.cancel()

    asyncio.run(job())


def test_waiting_verifications_of_one_key_delay_those_of_another_by_one() -> None:
    async def job() -> None:
        slots, began, go_on = Slots(1), list[str](), asyncio.Event()

        async def verify(key: bytes, name: str) -> None:
            caller.known_by(key)
            await slots.acquire()
            began.append(name)
            await go_on.wait()
            slots.release()

        works = [asyncio.ensure_future(verify(b"one", f"one {number}")) for number in range(5)]
        await asyncio.sleep(0)
        gives_up, other = (asyncio.ensure_future(verify(key, "last")) for key in (b"third", b"other"))
        await asyncio.sleep(0)
        gives_up.cancel()
        go_on.set()
        await asyncio.gather(*works, gives_up, other, return_exceptions=True)
        assert began == ["one 0", "one 1", "last", "one 2", "one 3", "one 4"]
        async with asyncio.timeout(1):
            await slots.acquire()  # none is lost

    asyncio.run(job())


def test_snapshots_take_a_bounded_part_of_the_disk_until_they_are_deleted(tmp_path: Path) -> None:
    async def job(client: OperationsClient, other: OperationsClient) -> None:
        template = await client.put_template({"a": os.urandom(3 << 20)})
        sandbox = await client.create(template, limits=SMALL)
        first, _ = await sandbox.snapshot()
        with pytest.raises(
            QuotaExceeded, match=r"hold \d MiB of snapshots, and this one has \d: delete some, or raise"
        ):
            await sandbox.snapshot()
        async with await other.create(await other.put_template({"a": b""}), limits=SMALL) as small:
            for _ in range(8):  # each is charged 1 MiB
                await small.snapshot()
            together = await asyncio.gather(*(small.snapshot() for _ in range(3)), return_exceptions=True)
            assert all(isinstance(each, QuotaExceeded) for each in together)
        await client.delete_snapshot(first)
        second, _ = await sandbox.snapshot()
        await (await client.restore(second)).close()
        await sandbox.close()
        assert await refusals(client) == ["snapshot_mb"] * 4

    with serving(tmp_path, "snapshot_mb: 8") as run:
        run(job)


def test_a_request_brings_no_quotas(tmp_path: Path) -> None:
    async def job(client: OperationsClient, other: OperationsClient) -> None:
        template = await client.put_template({"a": b""})
        with pytest.raises(RulesDenied, match="quotas"):
            await client.create(template, rules="quotas: {sandboxes: 100}")

    with serving(tmp_path, "sandboxes: 3") as run:
        run(job)
