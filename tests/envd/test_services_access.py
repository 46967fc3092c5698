"""Who may do what: tokens, keys, TLS, addresses; and what anybody may ask: health and reflection."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped, unused-ignore]
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc  # type: ignore[import-untyped, unused-ignore]

from contracts.errors import ConfigError
from contracts.pb import envd_operations_pb2 as pb
from contracts.rpc.listening import Listening
from envd.client import Access, Handle, SandboxGone, ToolCall
from envd.connection import SANDBOX_TOKEN
from envd.errors import AccessDenied
from envd.local import LocalEnvd
from envd.operations.client import OperationsClient
from tests.envd.harness import FILES, Harness

KEY = "a-key-of-enough-characters"
READ = ToolCall("read", {"path": "calc.py"})


def test_another_token_is_an_unknown_sandbox_and_is_recorded(plain: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        sandbox = await client.create(await client.put_template(FILES))
        said = set()
        for token in ("", "x", sandbox.handle.token[:-1], sandbox.handle.token + "x"):
            thief = client.attach(Handle(sandbox.id, token))
            for call in (thief.call(READ), thief.status(), thief.files.read("calc.py"), thief.finish(), thief.fork()):
                with pytest.raises(SandboxGone) as caught:
                    await call
                said.add(str(caught.value))
            await thief.close()  # as for an unknown id: nothing happens
        with pytest.raises(SandboxGone) as unknown:
            await client.attach(Handle("A" * 22, "x")).call(READ)
        assert said == {str(unknown.value).replace("A" * 22, sandbox.id)}
        assert (await sandbox.call(READ)).ok
        kinds = [event.kind async for event in client.audit(sandbox_id=sandbox.id)]
        assert kinds.count("auth.denied") >= 5
        await sandbox.close()

    plain.client(job)


def test_who_has_the_handle_may_attach(plain: Harness) -> None:
    async def job(client: OperationsClient) -> Handle:
        return (await client.create(await client.put_template(FILES))).handle

    handle = plain.client(job)
    assert handle.token not in repr(handle)

    async def again(client: OperationsClient) -> bool:
        async with client.attach(handle) as sandbox:
            return (await sandbox.call(READ)).ok

    assert plain.client(again)


def test_a_key_is_asked_for_on_every_service(tmp_path: Path) -> None:
    (tmp_path / "keys").write_text(f"# ours\n{KEY}\nanother-key-that-is-long\n")

    async def job(address: str) -> None:
        for access in (Access(), Access(key="wrong-key-of-the-same-size"), Access(key=KEY[:-1])):
            async with OperationsClient(address, access) as client:
                stranger = client.attach(Handle("A" * 22, "x"))
                for call in (client.info(), client.put_template(FILES), stranger.call(READ), stranger.files.read("x")):
                    with pytest.raises(AccessDenied, match="authorization"):
                        await call
                with pytest.raises(AccessDenied):
                    [event async for event in client.audit()]
        for key in (KEY, "another-key-that-is-long"):
            async with OperationsClient(address, Access(key=key)) as client:
                async with await client.create(await client.put_template(FILES)) as sandbox:
                    assert (await sandbox.call(READ)).ok
                kinds = [event.kind async for event in client.audit()]
                assert "auth.denied" in kinds
        async with grpc.aio.insecure_channel(address) as channel:

            async def nothing() -> Any:
                await asyncio.sleep(60)
                yield b""

            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.stream_unary("/triplane.envd.v1.Files/Write")(nothing(), timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED, "a request without a key is never received"
            with pytest.raises(grpc.aio.AioRpcError, match="did not arrive within 5 s"):
                await channel.stream_unary("/grpc.health.v1.Health/Check")(nothing(), timeout=20)
            async for told in health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest()):
                assert told.status == health_pb2.HealthCheckResponse.SERVING
                break
            health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert health.status == health_pb2.HealthCheckResponse.SERVING, "a kubelet's probe sends no key"

    with LocalEnvd("plain", options=["--key-file", str(tmp_path / "keys")]) as server:
        asyncio.run(job(server.address))


LISTENING = {
    "0.0.0.0:7070": "--insecure",
    "[::]:7070": "--insecure",
    "envd.example:7070": "--insecure",
    "10.1.2.3:7070": "--tls-cert",
}


@pytest.mark.parametrize("address", LISTENING)
def test_a_server_does_not_listen_to_others_without_tls_and_keys(address: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=LISTENING[address]):
        Listening(address).check()
    with pytest.raises(ConfigError, match="can be reached from other machines"):
        Listening(address, key_file=tmp_path / "keys").check()
    keyless = Listening(address, tls_cert=tmp_path / "c", tls_key=tmp_path / "k")
    keyless.check()
    assert keyless.made_key() is not None
    assert (
        Listening(address, tls_cert=tmp_path / "c", tls_key=tmp_path / "k", tls_client_ca=tmp_path / "a").made_key()
        is None
    )
    Listening(address, tls_cert=tmp_path / "c", tls_key=tmp_path / "k", key_file=tmp_path / "keys").check()
    Listening(address, insecure=True).check()


@pytest.mark.parametrize("address", ["unix:/run/x", "127.0.0.1:7070", "127.9.9.9:1", "localhost:7070", "[::1]:7070"])
def test_a_server_listens_on_this_machine_as_it_is(address: str) -> None:
    Listening(address).check()


@pytest.mark.parametrize("address", ["nowhere", "unix:", ":7070", "localhost:", "127.0.0.1:99999", "localhost:http"])
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address: write unix:/path or host:port"):
        Listening(address).check()


@pytest.mark.parametrize(("content", "words"), [("", "at least"), ("short\n", "at least"), ("# only\n", "at least")])
def test_a_key_file_without_usable_keys_is_refused(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "keys").write_text(content)
    with pytest.raises(ConfigError, match=words):
        Listening("unix:/run/x", key_file=tmp_path / "keys").keys()
    with pytest.raises(ConfigError, match="can't be read"):
        Listening("unix:/run/x", key_file=tmp_path / "nothing").keys()


def test_a_refusal_to_listen_is_one_line() -> None:
    command = [sys.executable, "-m", "envd", "serve", "--listen", "0.0.0.0:0", "--backend", "plain"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "--insecure" in done.stderr and "Traceback" not in done.stderr


def test_health_and_reflection_answer_what_any_tool_asks(plain: Harness) -> None:
    async def job() -> tuple[int, set[str], bytes]:
        async with grpc.aio.insecure_channel(plain.address) as channel:
            probe = health_pb2_grpc.HealthStub(channel)
            health = await probe.Check(health_pb2.HealthCheckRequest())
            for name in ("Sandboxes", "Verifier"):
                one = await probe.Check(health_pb2.HealthCheckRequest(service=f"triplane.envd.v1.{name}"))
                assert one.status == health.status
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            asked = [
                reflection_pb2.ServerReflectionRequest(list_services=""),
                reflection_pb2.ServerReflectionRequest(file_containing_symbol="triplane.envd.v1.Processes"),
            ]
            listed, file = [reply async for reply in stub.ServerReflectionInfo(iter(asked))]
            names = {service.name for service in listed.list_services_response.service}
            return health.status, names, file.file_descriptor_response.file_descriptor_proto[0]

    status, names, descriptor = asyncio.run(job())
    assert status == health_pb2.HealthCheckResponse.SERVING
    ours = {
        f"triplane.envd.v1.{name}" for name in ("Sandboxes", "Operations", "Files", "Processes", "Tools", "Verifier")
    }
    assert ours | {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} <= names
    assert b"ProcessConnectRequest" in descriptor


def test_a_compressed_request_is_refused_before_it_is_decompressed(plain: Harness) -> None:
    async def job() -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(plain.address, compression=grpc.Compression.Gzip) as channel:
            request = pb.FileWriteRequest(sandbox_id="x", data=bytes(32 << 20)).SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await channel.unary_unary("/triplane.envd.v1.Files/Write")(request, timeout=60)
            return caught.value.code()

    assert asyncio.run(job()) is grpc.StatusCode.UNIMPLEMENTED


def test_a_burst_of_calls_cancels_none(plain: Harness) -> None:
    async def job(client: OperationsClient) -> None:
        await client.info()
        await asyncio.gather(*(client.info() for _ in range(6000)))

    plain.client(job)


def test_a_message_beyond_the_bound_is_refused_and_the_server_lives_on(plain: Harness) -> None:
    async def job() -> grpc.StatusCode:
        async with grpc.aio.insecure_channel(plain.address, options=[("grpc.max_send_message_length", -1)]) as channel:
            call: Any = channel.unary_unary("/triplane.envd.v1.Files/Write")
            request = pb.FileWriteRequest(sandbox_id="x", data=bytes(65 << 20)).SerializeToString()
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call(request, metadata=((SANDBOX_TOKEN, "x"),))
            with pytest.raises(grpc.aio.AioRpcError):
                await call(os.urandom(1000))
            return caught.value.code()

    assert asyncio.run(job()) == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert plain.client(lambda client: client.info())
