"""Idempotency keys, deadlines, callers that give up."""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Iterator

import grpc
import pytest

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_pb2 as pb
from envd.client import SandboxGone, ToolCall
from envd.connection import IDEMPOTENCY_KEY, SANDBOX_TOKEN
from envd.errors import IdempotencyError
from envd.operations.client import ManagedSandbox, OperationsClient
from envd.server.idempotency import Answers
from tests.envd.harness import FILES, Harness


def shell(command: str) -> ToolCall:
    return ToolCall("exec", {"command": command})


COUNT = shell("echo x >> count; wc -l < count")


def test_a_retry_gets_the_first_answer_and_does_nothing(plain: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        one = await sandbox.batch([COUNT], idempotency_key="k1")
        two = await sandbox.batch([COUNT], idempotency_key="k1")
        three = await sandbox.batch([COUNT], idempotency_key="k2")
        assert (one[0].text, two[0].text, three[0].text) == ("1\nexit 0", "1\nexit 0", "2\nexit 0")
        with pytest.raises(IdempotencyError, match="another request"):
            await sandbox.batch([shell("echo other")], idempotency_key="k1")

    plain.sandbox(job)


def test_a_retry_while_the_first_runs_waits_for_it_also_when_its_caller_has_gone(plain: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        slow = shell("sleep 0.5; echo x >> count; wc -l < count")
        first = asyncio.create_task(sandbox.batch([slow], idempotency_key="k"))
        await asyncio.sleep(0.2)
        first.cancel()
        assert (await sandbox.batch([slow], idempotency_key="k"))[0].text == "1\nexit 0"
        assert (await sandbox.batch([slow], idempotency_key="k"))[0].text == "1\nexit 0"

    plain.sandbox(job)


def test_keys_belong_to_their_sandbox_and_creations_to_the_server(plain: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        template = await client.put_template(FILES)
        same = await asyncio.gather(*(client.create(template, idempotency_key="create-1") for _ in range(4)))
        assert len({sandbox.id for sandbox in same}) == 1
        other = await client.create(template, idempotency_key="create-2")
        assert other.id != same[0].id
        for sandbox in (same[0], other):
            assert (await sandbox.batch([COUNT], idempotency_key="k"))[0].text == "1\nexit 0"
            await sandbox.close()

    plain.client(job)


def test_the_last_answer_can_be_had_again_after_the_end(plain: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        sandbox = await client.create(await client.put_template(FILES))
        await sandbox.files.write("new", b"1\n")
        metadata = ((SANDBOX_TOKEN, sandbox.handle.token), (IDEMPOTENCY_KEY, "finish"))
        request = pb.DeleteRequest(sandbox_id=sandbox.id, want_diff=True)
        diffs = [(await client.sandboxes.Delete(request, metadata=metadata)).diff for _ in range(2)]
        assert diffs[0] == diffs[1] and b"+1" in diffs[0]
        with pytest.raises(SandboxGone):
            await sandbox.finish()

    plain.client(job)


def test_kept_answers_are_bounded_in_number_bytes_and_age() -> None:
    async def job() -> None:
        calls = 0

        async def answer(size: int) -> operations_pb.DiffReply:
            nonlocal calls
            calls += 1
            return operations_pb.DiffReply(diff=bytes(size))

        kept = Answers(most=4, most_bytes=4000, lifetime_s=0.2)
        request = operations_pb.DiffRequest(sandbox_id="s")
        for number in range(10):
            await kept.once(f"k{number}", request, lambda: answer(600))
        assert len(kept) == 4 and calls == 10
        await kept.once("k9", request, lambda: answer(600))
        assert calls == 10
        for number in range(4):
            await kept.once(f"big{number}", request, lambda: answer(990))
        assert len(kept) <= 4 and kept._bytes <= 4000
        await kept.once("huge", request, lambda: answer(100_000))
        with pytest.raises(IdempotencyError, match="too large"):
            await kept.once("huge", request, lambda: answer(100_000))
        await asyncio.sleep(0.3)
        assert len(kept) == 0
        with pytest.raises(IdempotencyError, match="characters"):
            await kept.once("k" * 1000, request, lambda: answer(1))

    asyncio.run(job())


def test_a_failure_is_not_kept() -> None:
    async def job() -> list[object]:
        kept = Answers()
        outcomes: Iterator[Exception | operations_pb.DiffReply] = iter(
            [SandboxGone("first"), operations_pb.DiffReply(diff=b"second")]
        )

        async def work() -> operations_pb.DiffReply:
            outcome = next(outcomes)
            if isinstance(outcome, Exception):
                raise outcome
            return outcome

        request = operations_pb.DiffRequest()
        first = await asyncio.gather(kept.once("k", request, work), return_exceptions=True)
        return [type(first[0]), (await kept.once("k", request, work)).diff]

    assert asyncio.run(job()) == [SandboxGone, b"second"]


def test_what_a_caller_gave_up_on_ends_in_the_sandbox_too(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        count = "n=0; while :; do n=$((n+1)); echo $n >next; mv next count; sleep 0.05; done"
        request = pb.BatchRequest(
            sandbox_id=sandbox.id,
            calls=[pb.ToolCall(name="exec", arguments_json=json.dumps({"command": count}))],
            timeout_s=120,
        )
        for patience_s in (0.5, 5, 50):  # a busy machine may begin late
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await sandbox._client.tools.Batch(request, timeout=patience_s, metadata=sandbox._metadata)
            assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            if "count" in {entry.path for entry in (await sandbox.files.list())[0]}:
                break
        async with asyncio.timeout(30):
            before = await sandbox.files.read("count")
            await asyncio.sleep(1)
            while before != (before := await sandbox.files.read("count")):
                await asyncio.sleep(1)
        assert (await sandbox.call(shell("echo next"))).text == "next\nexit 0", "the sandbox lives on"

    anywhere.sandbox(job)


def test_a_creation_that_nobody_waits_for_leaves_no_sandbox(anywhere: Harness) -> None:
    async def job(client: OperationsClient) -> tuple[int, int]:
        template = await client.put_template(FILES)
        before = (await client.info()).live
        async with OperationsClient(anywhere.address) as leaving:
            creations = [asyncio.create_task(leaving.create(template)) for _ in range(8)]
            await asyncio.sleep(0.002)
            for each in creations:
                each.cancel()
            made = [
                each
                for each in await asyncio.gather(*creations, return_exceptions=True)
                if isinstance(each, ManagedSandbox)
            ]
            for sandbox in made:
                await sandbox.close()
        return before, (await client.info()).live

    before, after = anywhere.client(job)
    assert after == before


def test_a_creation_given_up_while_its_reply_is_on_the_way_leaves_no_sandbox(namespaces: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        template = await client.put_template(FILES)
        times = []
        for _ in range(10):
            began = time.perf_counter()
            await (await client.create(template)).close()
            times.append(time.perf_counter() - began)
        usual, before = statistics.median(times), (await client.info()).live
        async with OperationsClient(namespaces.address) as leaving:
            await leaving.info()
            for round in range(60):
                creating = asyncio.create_task(leaving.create(template))
                await asyncio.sleep(usual * (0.2 + round / 60))
                creating.cancel()
                for made in await asyncio.gather(creating, return_exceptions=True):
                    if isinstance(made, ManagedSandbox):
                        await made.close()
        assert (await client.info()).live == before, "the client's end waited for them"

    namespaces.client(job)
