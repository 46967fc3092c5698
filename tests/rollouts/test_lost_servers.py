"""Rollouts and verdicts over several envd servers: spread evenly, and played again when a server is lost."""

from __future__ import annotations

import asyncio
import signal
import socket
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from envd_servers import Server
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped, unused-ignore]
from rollouts_script import POLICY, GraderByDiff, ScriptedEngine, call, make_plan, make_tasks, one_file_task

from contracts.artifacts import Artifact
from contracts.chat import ChatTokenizer, ToolCallText
from contracts.episodes import Outcome, Slot
from contracts.errors import InfraFault
from contracts.store import LocalStore
from curation.verify import Verifier
from envd.client import Limits, SandboxClient, ServerLost, ToolCall
from envd.errors import AccessDenied, ServerDraining, ServerUnavailable
from envd.fleet import FleetClient, open_client
from envd.operations.client import OperationsClient
from inference.rollouts.config import RolloutConfig
from inference.rollouts.episode import Player, play_episode
from inference.rollouts.merge import merge_groups
from inference.rollouts.worker import run_shard
from inference.rollouts.workspace import Workspaces
from resources.sandboxes import SandboxesResource
from resources.sandboxes_config import SandboxesConfig
from tests.ports import free_port

pytestmark = pytest.mark.slow

TURNS = 4
FILES = {"m.py": b"def f(): return 1\n"}
FIX = b"""diff --git a/m.py b/m.py
--- a/m.py
+++ b/m.py
@@ -1,2 +1,2 @@
-def f(): return 1
+def f(): return 2
 # 0
"""


@pytest.fixture(scope="module")
def started() -> Iterator[list[Server]]:
    with ExitStack() as stack:
        folders = [stack.enter_context(tempfile.TemporaryDirectory(prefix="envd")) for _ in range(3)]
        servers = [Server(Path(folder)) for folder in folders]
        for each in servers:
            stack.callback(each.kill)
        yield servers


@pytest.fixture
def servers(started: list[Server]) -> list[Server]:
    """Three running servers without a sandbox; those that a test killed or left with sandboxes are started again."""
    spoiled = [each for each in started if not each.is_running() or asyncio.run(live(each))]
    for each in spoiled:
        each.kill()
    with ThreadPoolExecutor() as pool:
        list(pool.map(Server.start, spoiled))
    return started


def joined(servers: Sequence[Server]) -> str:
    return ",".join(each.address for each in servers)


def over(servers: Sequence[Server], work: Callable[[FleetClient], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with FleetClient(joined(servers)) as client:
            return await work(client)

    return asyncio.run(run())


def slow_fix(turn: int, seed: int) -> Sequence[ToolCallText] | str:
    """Reads and sleeps for some turns, then edits the right way for half of the seeds."""
    new = "def f(): return 2" if seed % 2 else "def f(): return 3"
    turns: list[Sequence[ToolCallText] | str] = [[call("exec", command="sleep 0.1; cat m.py")]] * TURNS
    return [*turns, [call("edit", path="m.py", line=1, new=new)], "done"][turn]


def sample(address: str, store: LocalStore, tokenizer: ChatTokenizer, during: Callable[[], None]) -> Artifact:
    """Rollouts of 8 groups. during: called once some episodes are in flight."""
    tasks = make_tasks(8)
    plan = make_plan(tasks, 8, group_size=4, concurrency=16, refill=True, max_turn_tokens=300, max_tokens=3000)

    async def disturb() -> None:
        await asyncio.sleep(1)
        await asyncio.to_thread(during)

    async def run() -> None:
        async with open_client(address) as client:
            disturbing = asyncio.create_task(disturb())
            await run_shard(
                plan,
                0,
                engine=ScriptedEngine(tokenizer, slow_fix, delay_s=0.1),
                sandboxes=client,
                tokenizer=tokenizer,
                tasks=tasks,
                store=store,
                grader=GraderByDiff(),
            )
            await disturbing

    asyncio.run(run())
    return merge_groups(plan, store)


async def live(server: Server) -> int:
    async with OperationsClient(server.address) as client:
        return (await client.info()).live


def test_sandboxes_and_verifications_are_spread_evenly(servers: list[Server]) -> None:
    async def work(client: FleetClient) -> None:
        template = await client.put_template(FILES)
        boxes = await asyncio.gather(*(client.create(template) for _ in range(12)))
        assert [await live(each) for each in servers] == [4, 4, 4]
        await asyncio.gather(*(box.close() for box in boxes if box.server.address == servers[0].address))
        assert client.loads[servers[0].address] == 0
        further = await asyncio.gather(*(client.create(template) for _ in range(4)))
        assert {box.server.address for box in further} == {servers[0].address}
        await asyncio.gather(*(box.close() for box in (*boxes, *further)))
        assert set(client.loads.values()) == {0} and [await live(each) for each in servers] == [0, 0, 0]

    over(servers, work)


def test_a_server_killed_in_mid_rollout_changes_no_digest_and_scores_nothing_0(
    servers: list[Server], tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    undisturbed = sample(servers[0].address, LocalStore(tmp_path / "a"), tokenizer, lambda: None)
    disturbed = sample(joined(servers), LocalStore(tmp_path / "b"), tokenizer, servers[1].kill)
    assert disturbed.ref.digest == undisturbed.ref.digest
    assert disturbed.meta["infra_errors"] == 0
    rows = disturbed.table("episodes.parquet").to_pylist()
    assert {row["outcome"] for row in rows} == {"completed"} and len(rows) >= 32
    retries = disturbed.table("telemetry.parquet").column("retries").to_pylist()
    assert sum(retries) > 0, "the kill met episodes in flight"


@pytest.mark.parametrize("profile", ["throughput", "deterministic"])
@pytest.mark.parametrize("when", ["between calls", "during a call"])
def test_an_episode_whose_server_is_lost_is_played_on_another_and_not_blamed_on_its_agent(
    profile: str, when: str, servers: list[Server], tokenizer: ChatTokenizer
) -> None:
    killed: list[str] = []

    async def work(client: FleetClient) -> Any:
        def script(turn: int, seed: int) -> Sequence[ToolCallText] | str:
            if turn == 1 and not killed:
                (address,) = (address for address, load in client.loads.items() if load)
                killed.append(address)
                victim = next(each for each in servers if each.address == address)
                if when == "between calls":
                    victim.kill()
                else:
                    asyncio.get_running_loop().call_later(0.3, victim.kill)
                    return [call("exec", command="sleep 2")]
            return [[call("read", path="m.py")], [call("read", path="m.py")], "done"][turn]

        settings = RolloutConfig.model_validate({"max_tokens": 4000, "max_turn_tokens": 600, "profile": profile})
        workspaces = Workspaces(client, Limits(), settings.episode_timeout_s)
        engine = ScriptedEngine(tokenizer, script)
        player = Player(engine, workspaces, tokenizer, settings, POLICY.digest, "k", asyncio.Semaphore(1))
        return await play_episode(player, one_file_task(0), Slot("test", "0001", "g", "task-000", 0, 5), "g")

    episode = over(servers, work)
    assert (episode.outcome, episode.failure) == (Outcome.COMPLETED, None)
    assert episode.telemetry["retries"] == 1


def test_a_server_that_comes_back_is_used_again(servers: list[Server]) -> None:
    async def work(client: FleetClient) -> None:
        template = await client.put_template(FILES)
        boxes = [await client.create(template) for _ in range(3)]
        servers[1].kill()
        lost = next(box for box in boxes if box.server.address == servers[1].address)
        with pytest.raises(ServerLost, match="lost the envd server"):
            await lost.call(ToolCall("exec", {"command": "true"}))
        others = [await client.create(template) for _ in range(4)]
        assert servers[1].address not in {box.server.address for box in others}
        await asyncio.to_thread(servers[1].start)
        async with asyncio.timeout(30):
            while (await client.create(template)).server.address != servers[1].address:
                await asyncio.sleep(0.2)

    over(servers, work)


def test_a_call_on_a_machine_that_vanished_without_a_word_fails_within_seconds(servers: list[Server]) -> None:
    """A stopped process keeps its connections open and answers nothing, like a machine without power."""

    async def work(client: FleetClient) -> None:
        sandbox = await client.create(await client.put_template(FILES))
        silent = next(each for each in servers if each.address == sandbox.server.address)
        assert silent.process is not None
        silent.process.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(ServerLost):
            await sandbox.call(ToolCall("exec", {"command": "true"}), timeout_s=120)
        assert time.monotonic() - began < 40
        again = await client.create(await client.put_template(FILES))
        assert again.server.address != silent.address
        silent.kill()

    over(servers, work)


def test_a_verification_whose_server_is_lost_runs_on_another(servers: list[Server]) -> None:
    task = one_file_task(0)

    async def work(client: FleetClient) -> None:
        verifier = Verifier(client, None)
        servers[0].kill()
        verdicts = await asyncio.gather(*(verifier.grade(task, diff) for diff in (FIX, b"")))
        assert [verdict.solved for verdict in verdicts] == [True, False]
        assert all(verdict.exit == "completed" for verdict in verdicts)

    over(servers, work)


def test_all_servers_lost_is_one_error_that_names_them(servers: list[Server], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envd.fleet.client.WAIT_S", 2.0)

    async def work(client: FleetClient) -> None:
        template = await client.put_template(FILES)
        for each in servers:
            each.kill()
        with pytest.raises(ServerUnavailable) as raised:
            await client.create(template)
        assert all(each.address in str(raised.value) for each in servers) and "none of the 3" in str(raised.value)
        assert "\n" not in str(raised.value)
        with pytest.raises(InfraFault, match="none of the 3 envd servers"):
            await Workspaces(client, Limits(), 60).start(one_file_task(0))

    over(servers, work)


def test_episodes_wait_for_the_only_server_while_it_is_started_again(
    servers: list[Server], tokenizer: ChatTokenizer, tmp_path: Path
) -> None:
    """A list of one name is usual on a cluster of one node."""

    def restart() -> None:
        servers[0].kill()
        time.sleep(3)
        servers[0].start()

    undisturbed = sample(servers[1].address, LocalStore(tmp_path / "a"), tokenizer, lambda: None)
    disturbed = sample(f"{servers[0].address},{servers[0].address}", LocalStore(tmp_path / "b"), tokenizer, restart)
    assert disturbed.ref.digest == undisturbed.ref.digest and disturbed.meta["infra_errors"] == 0


def test_a_server_that_still_starts_is_waited_for(servers: list[Server]) -> None:
    for each in servers:
        each.kill()

    async def work(client: FleetClient) -> None:
        starting = asyncio.create_task(asyncio.to_thread(servers[2].start))
        template = await client.put_template(FILES)
        assert (await client.create(template)).server.address == servers[2].address
        await starting

    over(servers, work)


async def _named(monkeypatch: pytest.MonkeyPatch, addresses: list[str]) -> None:
    """Have the name `envd.test` stand for these hosts."""
    known = socket.getaddrinfo

    def answer(host: Any, port: Any, *args: Any, **options: Any) -> Any:
        if host != "envd.test":
            return known(host, port, *args, **options)
        if not addresses:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, port)) for each in addresses]

    monkeypatch.setattr(socket, "getaddrinfo", answer)


def test_a_name_stands_for_all_its_addresses_and_is_resolved_again_when_a_server_is_lost(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    port = free_port()
    hosts = ["127.0.0.1", "127.0.0.2"]
    servers = [Server(tmp_path / host, listen=f"{host}:{port}") for host in (*hosts, "127.0.0.3")]

    async def run() -> None:
        await _named(monkeypatch, hosts)
        async with open_client(f"dns:envd.test:{port}") as client:
            assert isinstance(client, FleetClient)
            template = await client.put_template(FILES)
            boxes = [await client.create(template) for _ in range(4)]
            assert set(client.loads) == {f"{host}:{port}" for host in hosts} and set(client.loads.values()) == {2}
            servers[0].kill()
            hosts[:] = ["127.0.0.2", "127.0.0.3"]
            lost = next(box for box in boxes if box.server.address == servers[0].address)
            with pytest.raises(ServerLost):
                await lost.status()
            async with asyncio.timeout(30):
                while (await client.create(template)).server.address != servers[2].address:
                    await asyncio.sleep(0.1)
            assert servers[0].address not in client.loads

    try:
        for each in servers:
            each.start()
        asyncio.run(run())
    finally:
        for each in servers:
            each.kill()


def test_one_address_is_an_ordinary_client() -> None:
    for address in ("unix:/tmp/s", "host:7400", "127.0.0.1:7400"):
        assert type(open_client(address)) is SandboxClient
    assert type(open_client("a:1,b:1")) is type(open_client("dns:envd:7400")) is FleetClient


@pytest.mark.parametrize("address", ["a:1,", ",", "dns:envd", "dns::7400", "a:1,dns:envd:70000"])
def test_an_entry_that_is_not_an_address_is_refused_by_name(address: str) -> None:
    form = r"list of envd servers .*(is not an address|has an empty entry).*write .*dns:NAME:PORT.*or unix:/path"
    with pytest.raises(Exception, match=form):
        open_client(address)


def test_an_experiment_without_an_address_uses_the_servers_that_the_environment_names(
    servers: list[Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRIPLANE_ENVD", joined(servers))

    async def run() -> None:
        async with SandboxesResource().client(SandboxesConfig()) as client:
            template, used = await client.put_template(FILES), set[str]()
            async with asyncio.timeout(60):
                while used != {each.address for each in servers}:  # one that is slow to connect joins later
                    used.add((await client.create(template)).server.address)
                    await asyncio.sleep(0.1)

    asyncio.run(run())


def test_a_draining_server_takes_nothing_new_and_lets_what_runs_end(servers: list[Server], tmp_path: Path) -> None:
    draining = Server(tmp_path, "--drain", "60")
    draining.start()

    async def work(client: FleetClient) -> None:
        template = await client.put_template(FILES)
        boxes = [await client.create(template) for _ in range(2)]
        here = next(box for box in boxes if box.server.address == draining.address)
        assert draining.process is not None
        draining.process.terminate()
        await here.call(ToolCall("exec", {"command": "sleep 1"}))
        async with OperationsClient(draining.address) as single:
            with pytest.raises(ServerDraining, match="draining and takes nothing new"):
                await single.create(await single.put_template(FILES))
            with pytest.raises(ServerDraining):
                await single.verify(template, b"", {}, ["t.py::t"])
            assert await health(draining.address) == "NOT_SERVING"
        others = [await client.create(template) for _ in range(4)]
        assert {box.server.address for box in others} == {servers[0].address}
        result = await here.call(ToolCall("exec", {"command": "cat m.py"}))
        assert result.ok and "return 1" in result.text and draining.process.poll() is None
        await here.close()
        assert await asyncio.to_thread(draining.process.wait, 20) == 0

    try:
        over([draining, servers[0]], work)
    finally:
        draining.kill()


def test_a_drain_is_bounded_and_what_still_runs_is_lost_to_infrastructure(
    servers: list[Server], tmp_path: Path
) -> None:
    draining = Server(tmp_path, "--drain", "1")
    draining.start()

    async def work(client: FleetClient) -> None:
        template = await client.put_template(FILES)
        boxes = [await client.create(template) for _ in range(2)]
        here = next(box for box in boxes if box.server.address == draining.address)
        assert draining.process is not None
        draining.process.terminate()
        with pytest.raises(ServerLost):
            await here.call(ToolCall("exec", {"command": "sleep 8"}))
        assert await asyncio.to_thread(draining.process.wait, 20) == 0

    try:
        over([draining, servers[0]], work)
    finally:
        draining.kill()


def test_sandboxes_that_can_be_moved_go_on_elsewhere_when_their_server_drains(
    servers: list[Server], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Namespaces moves files only, so the client is told that this is enough; gVisor and machines move processes."""
    monkeypatch.setattr("envd.fleet.member.can_move", lambda backend: "migrate" in backend.features)
    draining = Server(tmp_path, "--drain", "60")
    draining.start()

    async def work(client: FleetClient) -> None:
        template = await client.put_template(FILES)
        boxes = [await client.create(template) for _ in range(6)]
        here = [box for box in boxes if box.server.address == draining.address]
        for number, box in enumerate(here):
            await box.call(ToolCall("write", {"path": "a.txt", "content": f"box {number}\n"}))
        running = asyncio.create_task(here[0].call(ToolCall("exec", {"command": "sleep 2; echo done"})))
        await asyncio.sleep(0.2)
        assert draining.process is not None
        draining.process.terminate()
        assert await asyncio.to_thread(draining.process.wait, 30) == 0, "it ends as soon as nothing is left"
        assert (await running).ok
        for number, box in enumerate(here):
            assert box.server.address == servers[0].address
            assert f"box {number}" in (await box.call(ToolCall("read", {"path": "a.txt"}))).text
        assert client.loads[servers[0].address] == 6
        await asyncio.gather(*(box.close() for box in boxes))
        assert await live(servers[0]) == 0

    try:
        over([draining, servers[0]], work)
    finally:
        draining.kill()


async def health(address: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))


def test_a_port_beyond_this_machine_asks_for_the_key_without_tls_and_health_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    key = tmp_path / "key"
    key.write_text("k" * 40 + "\n")
    server = Server(tmp_path / "s", "--key-file", str(key), listen=f"0.0.0.0:{port}")
    monkeypatch.setenv("TRIPLANE_ENVD_KEY_FILE", "")

    async def run() -> None:
        assert await health(f"127.0.0.1:{port}") == "SERVING"
        async with SandboxClient(f"127.0.0.1:{port}") as client:
            with pytest.raises(AccessDenied, match="asks for a key"):
                await client.put_template(FILES)
        monkeypatch.setenv("TRIPLANE_ENVD_KEY_FILE", str(key))
        async with open_client(f"127.0.0.1:{port},127.0.0.1:9") as client:
            sandbox = await client.create(await client.put_template(FILES))
            assert (await sandbox.call(ToolCall("exec", {"command": "true"}))).ok

    try:
        server.start()
        asyncio.run(run())
    finally:
        server.kill()
