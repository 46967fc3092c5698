"""States of sandboxes through the services: pause, hibernate, fork, snapshot, restore; and what calls in other states
say.
"""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from contracts.pb import envd_operations_pb2 as operations_pb
from contracts.pb import envd_pb2 as pb
from envd.client import EnvdError, Limits, SandboxGone, ToolCall
from envd.errors import RulesDenied, TemplateError, Unsupported, WrongState
from envd.operations.client import ManagedSandbox, OperationsClient
from tests.envd.harness import FILES, FIX, Harness, served

READ = ToolCall("read", {"path": "calc.py"})


def shell(command: str) -> ToolCall:
    return ToolCall("exec", {"command": command})


def test_what_is_paused_stands_still_and_goes_on(namespaces: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        if "pause" not in (await sandbox._client.info()).backends[0].features:
            pytest.skip("this machine has no way to pause namespaces sandboxes")
        await sandbox.call(shell("i=0; while true; do echo $((i++)) > tick; sleep 0.01; done &"))
        assert (await sandbox.pause()).state == "paused"
        assert (await sandbox.pause()).state == "paused", "pausing twice is harmless"
        with pytest.raises(WrongState, match="Resume"):
            await sandbox.call(READ)
        with pytest.raises(WrongState, match="Resume"):
            await sandbox.files.read("tick")
        assert (await sandbox.resume()).state == "running"
        before = int(await sandbox.files.read("tick") or b"0")
        await asyncio.sleep(0.5)
        assert int(await sandbox.files.read("tick") or b"0") > before, "the background process goes on"

    namespaces.sandbox(job)


def test_a_command_that_was_running_at_a_pause_is_answered_after_it(namespaces: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        if "pause" not in (await sandbox._client.info()).backends[0].features:
            pytest.skip("this machine has no way to pause namespaces sandboxes")
        running = asyncio.create_task(sandbox.call(shell("sleep 0.5; echo done")))
        await asyncio.sleep(0.2)
        await sandbox.pause()
        await asyncio.sleep(0.7)
        assert not running.done()
        await sandbox.resume()
        assert (await running).text == "done\nexit 0"

    namespaces.sandbox(job)


def test_what_a_backend_cannot_do_is_refused_by_name(plain: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        with pytest.raises(Unsupported, match="plain backend can't pause"):
            await sandbox.pause()
        assert (await sandbox.call(READ)).ok

    plain.sandbox(job)


def test_a_hibernated_sandbox_comes_back_with_its_files_under_its_id(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        await sandbox.call(FIX)
        await sandbox.files.write("data/binary", bytes(range(256)))
        used_s = (await sandbox.status()).cpu_s
        status = await sandbox.hibernate()
        assert (status.state, status.lost, status.memory_bytes) == ("hibernated", ("processes",), 0)
        assert status.cpu_s >= used_s, "what it used before counts on"
        assert (await sandbox.hibernate()).state == "hibernated"
        for call in (sandbox.call(READ), sandbox.diff(), sandbox.processes.list()):
            with pytest.raises(WrongState, match="Resume"):
                await call
        again = await sandbox.resume()
        assert (again.state, again.id, again.host_name) == ("running", sandbox.id, status.host_name)
        assert "a + b" in (await sandbox.call(READ)).text
        assert await sandbox.files.read("data/binary") == bytes(range(256))
        assert (await sandbox.call(shell("cat /proc/sys/kernel/hostname | wc -l"))).ok

    anywhere.sandbox(job)


def test_a_fork_is_independent_and_has_a_name_of_its_own(anywhere: Harness) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        await sandbox.call(FIX)
        copy = await sandbox.fork()
        await copy.files.write("only", b"copy")
        await sandbox.files.write("only", b"original")
        assert (await copy.files.read("only"), await sandbox.files.read("only")) == (b"copy", b"original")
        assert copy.id != sandbox.id and copy.handle.token != sandbox.handle.token
        assert (await copy.status()).host_name != (await sandbox.status()).host_name
        assert b"a + b" in await copy.diff()
        await copy.close()
        assert (await sandbox.call(READ)).ok

    anywhere.sandbox(job)


def test_a_hibernated_sandbox_can_be_forked_and_kept(anywhere: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        sandbox = await client.create(await client.put_template(FILES))
        await sandbox.call(FIX)
        await sandbox.hibernate()
        copy = await sandbox.fork()
        snapshot, _ = await sandbox.snapshot()
        restored = await client.restore(snapshot)
        for each in (copy, restored):
            assert "a + b" in (await each.call(READ)).text
        assert (await sandbox.status()).state == "hibernated"
        for each in (copy, restored, sandbox):
            await each.close()
        await client.delete_snapshot(snapshot)

    anywhere.client(job)


def test_a_snapshot_is_restored_as_often_as_asked_for_and_until_it_is_deleted(anywhere: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        sandbox = await client.create(await client.put_template(FILES), env={"KEPT": "yes"}, labels={"a": "b"})
        await sandbox.call(FIX)
        snapshot, lost = await sandbox.snapshot()
        assert lost == ("processes",)
        await sandbox.call(ToolCall("write", {"path": "calc.py", "content": "later"}))
        one, two = await asyncio.gather(client.restore(snapshot), client.restore(snapshot, limits=Limits(lifetime_s=9)))
        for each in (one, two):
            assert "a + b" in (await each.call(READ)).text
            assert (await each.call(shell("echo $KEPT"))).text == "yes\nexit 0"
        assert (await two.status()).expires_in_s < 9.1 and (await one.status()).labels == {"a": "b"}
        await client.delete_snapshot(snapshot)
        await client.delete_snapshot(snapshot)
        for unknown in (snapshot, "../../../../etc", "x" * 24):
            with pytest.raises(EnvdError, match="no snapshot"):
                await client.restore(unknown)
        for each in (one, two, sandbox):
            await each.close()

    anywhere.client(job)


def test_a_state_is_not_changed_while_a_command_runs_longer_than_that_may_take(
    plain: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def job(sandbox: ManagedSandbox) -> None:
        running = asyncio.create_task(sandbox.call(shell("sleep 1; echo done")))
        await asyncio.sleep(0.2)
        started = time.monotonic()
        copy = await sandbox.fork()  # waits for the command
        assert time.monotonic() - started > 0.5 and (await running).text == "done\nexit 0"
        await copy.close()

    plain.sandbox(job)


def test_states_of_all_sandboxes_are_listed_by_their_labels(anywhere: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        template = await client.put_template(FILES)
        made = await client.create_many(template, 3, labels={"run": "listing"})
        odd = await client.create(template, labels={"run": "listing", "odd": "1"})
        sandboxes = [each for each in made if isinstance(each, ManagedSandbox)]
        assert len(sandboxes) == 3
        assert {each.id for each in await client.list({"run": "listing"})} == {each.id for each in [*sandboxes, odd]}
        assert [each.id for each in await client.list({"odd": "1"})] == [odd.id]
        for each in [*sandboxes, odd]:
            await each.close()
        assert await client.list({"run": "listing"}) == []

    anywhere.client(job)


def test_a_snapshot_that_nobody_waits_for_is_not_kept(tmp_path: Path) -> None:
    def there() -> list[str]:
        return [each.name for each in tmp_path.glob("state/*/snapshots/*") if not each.name.startswith(".held-")]

    async def job() -> None:
        async with served(tmp_path) as client:
            sandbox = await client.create(await client.put_template(FILES))
            await sandbox.files.upload("large", random.Random(0).randbytes(30 << 20))
            identity, _ = await sandbox.snapshot()
            assert there() == [identity]
            keeping = asyncio.ensure_future(sandbox.snapshot())
            while len(there()) == 1:
                await asyncio.sleep(0.001)
            keeping.cancel()
            async with asyncio.timeout(20):
                while there() != [identity]:
                    await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            assert there() == [identity]

    asyncio.run(job())


def test_a_batch_that_is_refused_gives_the_errors_that_one_creation_gives(plain: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        template = await client.put_template(FILES)
        found = await client.create_many(template, 2, rules="version: 1\nisolation: machine\n")
        assert [type(each) for each in found] == [RulesDenied] * 2 and "isolation" in str(found[0])
        assert [type(each) for each in await client.create_many("0" * 64, 1)] == [TemplateError]
        first, again = [await client.create_many(template, 2, idempotency_key="a batch") for _ in range(2)]
        assert [each.id for each in first if isinstance(each, ManagedSandbox)] == [
            each.id for each in again if isinstance(each, ManagedSandbox)
        ]
        for each in first:
            assert isinstance(each, ManagedSandbox)
            await each.close()

    plain.client(job)


def test_a_batch_names_what_failed_and_starts_the_others(plain: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        good = pb.CreateRequest(template=await client.put_template(FILES))
        bad = pb.CreateRequest(template="0" * 64)
        reply = await client.operations.CreateBatch(operations_pb.CreateBatchRequest(requests=[good, bad, good]))
        assert [bool(each.error) for each in reply.results] == [False, True, False]
        assert "put_template" in reply.results[1].error and reply.results[1].code == 9
        made = [each.created for each in reply.results if each.HasField("created")]
        await client.operations.DeleteBatch(
            operations_pb.DeleteBatchRequest(
                sandbox_ids=[each.sandbox_id for each in made], tokens=[each.token for each in made]
            )
        )
        assert not {each.sandbox_id for each in made} & {each.id for each in await client.list()}

    plain.client(job)


def test_a_sandbox_that_ended_by_itself_is_gone_and_says_so(namespaces: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        sandbox = await client.create(await client.put_template(FILES), limits=Limits(lifetime_s=0.4))
        await asyncio.sleep(0.8)
        with pytest.raises(SandboxGone, match="lifetime"):
            await sandbox.resume()
        assert sandbox.id not in {each.id for each in await client.list()}

    namespaces.client(job)


@pytest.mark.slow
def test_snapshots_outlive_a_killed_server_and_its_leftovers_go(tmp_path: Path) -> None:
    kept, state = tmp_path / "kept", tmp_path / "state"
    address = f"unix:{tmp_path}/s"
    command = [sys.executable, "-m", "envd", "serve", "--listen", address, "--backend", "plain", "--log-level", "error"]
    command += ["--snapshot-dir", str(kept), "--state-dir", str(state)]

    async def first() -> str:
        async with OperationsClient(address) as client:
            sandbox = await client.create(await client.put_template(FILES), env={"KEPT": "yes"})
            await sandbox.call(FIX)
            snapshot, _ = await sandbox.snapshot()
            await sandbox.hibernate()
            return snapshot

    async def second(snapshot: str) -> None:
        async with OperationsClient(address) as client:
            assert await client.list() == []
            async with await client.restore(snapshot) as sandbox:
                assert "a + b" in (await sandbox.call(READ)).text
                assert b"a + b" in await sandbox.diff()
                assert (await sandbox.call(shell("echo $KEPT"))).text == "yes\nexit 0"

    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    snapshot = asyncio.run(first())
    assert len(list(kept.iterdir())) == 2, "the snapshot, and what the server holds for the hibernated one"
    server.kill()
    server.wait()
    server = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        asyncio.run(second(snapshot))
        (held,) = kept.glob(".held-*")
        assert not list(held.iterdir()) and (kept / snapshot).is_dir()
        twin = subprocess.run(
            [*command[:5], f"unix:{tmp_path}/t", *command[6:]], capture_output=True, text=True, timeout=60, check=False
        )
        assert twin.returncode == 1 and "--state-dir" in twin.stderr and "Traceback" not in twin.stderr
    finally:
        server.terminate()
        server.wait()
    assert [path.name for path in kept.iterdir()] == [snapshot] and not state.exists()
