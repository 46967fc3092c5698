"""The client of TensorRT-LLM, with its real messages, against a server that speaks its gRPC over our forward pass."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
import pytest
from smg_grpc_proto.generated import trtllm_service_pb2 as pb2
from smg_grpc_proto.generated import trtllm_service_pb2_grpc as services

from inference.engines import SamplingParams, TrtllmConfig, open_engine
from inference.engines.builtin import BuiltinEngine
from inference.engines.guarded import GuardedServer
from inference.engines.seeds import mixed_seed
from inference.engines.trtllm import TrtllmEngine
from inference.errors import EngineError, EngineStopped, EngineUnreachable, RequestTooLong, WeightsDiffer
from tests.inference.conftest import write_checkpoint
from tests.ports import free_port

pytestmark = pytest.mark.anyio
ROOT = Path(__file__).parents[2]
PROGRAM = (sys.executable, "-m", "tests.inference.trtllm_server")
FIRST, SECOND = "a" * 64, "b" * 64
PARAMS = SamplingParams(temperature=1.0, max_tokens=8, seed=5)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("policies")
    return write_checkpoint(folder / "first", 0), write_checkpoint(folder / "second", 1)


def opened(folder: Path, version: str = FIRST, env: dict[str, str] | None = None, **changes: object) -> TrtllmEngine:
    path = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", **(env or {})}
    settings = {"program": PROGRAM, "env": path, "unmatched": "warn", "tolerance": 1e-3, "retries": 0, **changes}
    return open_engine(TrtllmConfig.model_validate({"kind": "trtllm", **settings}), folder, version)


def servers() -> list[psutil.Process]:
    """Servers that this process started and that still run."""
    found = []
    for each in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it ends meanwhile, or has ended
            if "tests.inference.trtllm_server" in (command := each.cmdline()) and "--" not in command:
                found.append(each)
    return found


@pytest.mark.slow
async def test_each_policy_has_a_server_and_requests_in_flight_finish_on_theirs(folders: tuple[Path, Path]) -> None:
    engine = opened(folders[0], env={"HOLD_S": "0.3"})
    assert await engine.version() == FIRST
    flying = asyncio.create_task(engine.generate([1, 2, 3], PARAMS))
    await asyncio.sleep(0.1)
    await engine.load_weights(folders[1], SECOND)
    assert (await flying).spans == [(FIRST, 0, 8)]
    reference = BuiltinEngine(folders[1], SECOND, threads=1)
    for temperature, stops in ((1.0, ()), (0.0, ()), (1.0, (3, 5, 7, 11))):
        found = await engine.generate([1, 2, 3], SamplingParams(temperature, 12, 9, stops))
        wanted = await reference.generate([1, 2, 3], SamplingParams(temperature, 12, mixed_seed(9, 3), stops))
        assert (found.token_ids, found.finish_reason) == (wanted.token_ids, wanted.finish_reason)
        assert found.spans == [(SECOND, 0, len(found.token_ids))]
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=1e-4)
    assert await engine.score([5, 6, 7, 6]) == pytest.approx(await reference.score([5, 6, 7, 6]), abs=1e-4)
    await reference.close()
    async with asyncio.timeout(20):
        while len(servers()) > 1:
            await asyncio.sleep(0.1)
    await engine.close()
    assert not servers()
    with pytest.raises(EngineStopped, match="the engine is closed"):
        await engine.generate([1], PARAMS)


async def test_what_it_can_not_do_is_said(folders: tuple[Path, Path]) -> None:
    engine = opened(folders[0])
    with pytest.raises(EngineError, match=r"log probabilities of temperature 1, not of 0\.7: sample at temperature 1"):
        await engine.generate([1], SamplingParams(0.7, 4, seed=1))
    with pytest.raises(EngineError, match="scores at temperature 1 only"):
        await engine.score([1, 2], 0.5)
    with pytest.raises(RequestTooLong, match="prompt has 256 tokens, the server's context holds 256"):
        await engine.generate([1] * 256, PARAMS)
    whole = await engine.generate([1] * 250, SamplingParams(1.0, 100, seed=1))
    assert (whole.finish_reason, len(whole.token_ids)) == ("length", 6)
    with pytest.raises(RequestTooLong, match="256 tokens to score"):
        await engine.score([1] * 256)
    await engine.close()


class Held(services.TrtllmServiceServicer):  # type: ignore[misc]
    """A server that never answers a request."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.asked = directory, asyncio.Event()

    async def HealthCheck(self, request: object, context: object) -> object:
        return pb2.HealthCheckResponse(status="OK")

    async def GetModelInfo(self, request: object, context: object) -> object:
        return pb2.GetModelInfoResponse(model_id=str(self.directory), max_seq_len=256)

    async def Generate(self, request: object, context: object) -> AsyncIterator[object]:
        self.asked.set()
        await asyncio.Event().wait()
        yield pb2.GenerateResponse()


async def test_closing_ends_requests_that_are_held_or_wait_for_a_connection(folders: tuple[Path, Path]) -> None:
    held, server = Held(folders[0]), grpc.aio.server()
    services.add_TrtllmServiceServicer_to_server(held, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    engine = opened(folders[0], address=f"127.0.0.1:{port}", probe_gigabytes=0, connections=1)
    flying = [asyncio.create_task(engine.generate([1, 2, 3], PARAMS)) for _ in range(2)]
    await held.asked.wait()
    await engine.close()
    for outcome in await asyncio.gather(*flying, return_exceptions=True):
        assert isinstance(outcome, EngineUnreachable) and "stopped before it answered: ask again" in str(outcome)
    await server.stop(None)


@pytest.mark.slow
async def test_a_request_in_flight_after_the_drain_is_told_to_ask_again(folders: tuple[Path, Path]) -> None:
    engine = opened(folders[0], env={"HOLD_S": "60"}, drain_s=0.2, probe_gigabytes=0)
    await engine.version()
    flying = asyncio.create_task(engine.generate([1, 2, 3], PARAMS))
    await asyncio.sleep(0)  # it begins
    await engine.load_weights(folders[1], SECOND)
    with pytest.raises(EngineUnreachable, match="stopped before it answered"):
        await flying
    await engine.close()


@pytest.mark.slow
async def test_a_server_that_dies_is_replaced_a_few_times(folders: tuple[Path, Path]) -> None:
    engine = opened(folders[0], max_restarts=1)
    await engine.version()
    for spans in ([(FIRST, 0, 8)], None):
        (server,) = servers()
        os.kill(server.pid, signal.SIGKILL)
        with pytest.raises((EngineUnreachable, EngineStopped)):
            await engine.generate([1], PARAMS)
        assert spans is None or (await engine.generate([1], PARAMS)).spans == spans
    with pytest.raises(EngineStopped, match=r"died 2 times, see engine\.max_restarts"):
        await engine.generate([1], PARAMS)
    await engine.close()


@pytest.mark.slow
async def test_a_server_that_starts_ends_with_the_engine(folders: tuple[Path, Path]) -> None:
    engine = opened(folders[0])
    starting = asyncio.create_task(engine.version())
    async with asyncio.timeout(20):
        while not servers():
            await asyncio.sleep(0.01)
    await engine.close()
    with pytest.raises(EngineStopped, match="closed while its server started"):
        await starting
    assert not servers()


@pytest.mark.slow
async def test_one_memory_for_one_server_ends_the_old_one_first(folders: tuple[Path, Path], tmp_path: Path) -> None:
    engine = opened(folders[0], overlap=False)
    await engine.version()
    (before,) = servers()
    await engine.load_weights(folders[1], SECOND)
    (after,) = servers()
    assert before != after and await engine.version() == SECOND
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(EngineError, match=r"config\.json can't be read"):
        await engine.load_weights(tmp_path, "c" * 64)
    assert (await engine.generate([1, 2], PARAMS)).spans == [(SECOND, 0, 8)] and servers() == [after]
    await engine.close()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("ends", "ended while it started: RuntimeError: no GPU was found"),
        ("other", r"does not serve policy aaaaaaaaaaaa .* probes differ by up to"),
        ("bare", "returned no log probability of prompt token 1"),
    ],
)
async def test_servers_that_are_wrong_are_refused_and_ended(
    folders: tuple[Path, Path], fault: str, message: str
) -> None:
    engine = opened(folders[0], env={"FAULT": fault, "OTHER": str(folders[1])})
    with pytest.raises(EngineError, match=message):
        await engine.version()
    assert not servers()
    await engine.close()


@pytest.mark.slow
async def test_tokens_without_their_log_probabilities_are_refused(folders: tuple[Path, Path]) -> None:
    engine = opened(folders[0], env={"FAULT": "length"})
    with pytest.raises(EngineError, match="8 tokens and 7 log probabilities"):
        await engine.generate([1], PARAMS)
    await engine.close()


@pytest.mark.slow
async def test_a_server_at_an_address_is_compared_and_never_ended(folders: tuple[Path, Path]) -> None:
    port = free_port()
    arguments = ("--grpc", "--host", "127.0.0.1", "--port", str(port), "--backend", "pytorch", "--tp_size", "1")
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    command = [*PROGRAM, "serve", str(folders[0]), *arguments, "--max_seq_len", "256"]
    running = GuardedServer(command, lambda scratch: environment)
    try:
        engine = opened(folders[0], address=f"127.0.0.1:{port}")
        assert (await engine.generate([1], PARAMS)).spans == [(FIRST, 0, 8)]
        with pytest.raises(WeightsDiffer, match="does not serve policy bbbbbbbbbbbb"):
            await engine.load_weights(folders[1], SECOND)
        await engine.close()
        unproven = opened(folders[1], SECOND, address=f"127.0.0.1:{port}", probe_gigabytes=0)
        with pytest.raises(EngineError, match=r"serves '.*/first', which is not shown to be policy bbbbbbbbbbbb"):
            await unproven.version()
        await unproven.close()
        assert running.alive
    finally:
        running.stop()
