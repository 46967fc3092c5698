"""TLS with client certificates: who gets in, and whose episodes are whose."""

from __future__ import annotations

import asyncio
from pathlib import Path

import grpc
import pytest

from contracts.pb import bridge_pb2 as pb
from contracts.rpc.listening import Listening
from inference.bridge.serve import Options, limits_of, serving
from inference.engines.builtin import BuiltinEngine
from tests.bridge.bridge_harness import Client, new_id, refused, start_request
from tests.envd.test_services_tls import certificate
from tests.inference.conftest import write_checkpoint


def credentials(folder: Path, name: str) -> grpc.ChannelCredentials:
    pair = (folder / f"{name}.key").read_bytes(), (folder / f"{name}.crt").read_bytes()
    return grpc.ssl_channel_credentials((folder / "ca.crt").read_bytes(), *pair)


def test_client_certificates_see_their_own_episodes_only(tmp_path: Path) -> None:
    authority = certificate(tmp_path, "ca", None)
    for name in ("server", "one", "two"):
        certificate(tmp_path, name, authority)
    certificate(tmp_path, "stranger", None)
    files = {"tls_cert": tmp_path / "server.crt", "tls_key": tmp_path / "server.key"}
    listening = Listening("localhost:0", tls_client_ca=tmp_path / "ca.crt", **files)
    policy = write_checkpoint(tmp_path / "p", 0)

    async def run() -> None:
        engine, name = BuiltinEngine(policy, "v1", threads=1), new_id()
        options = Options(listening, journal=tmp_path / "journal")
        async with serving(engine, limits_of(policy), options) as bridge:
            assert not bridge.address.endswith(":0")
            async with (
                grpc.aio.secure_channel(bridge.address, credentials(tmp_path, "one")) as first,
                grpc.aio.secure_channel(bridge.address, credentials(tmp_path, "two")) as second,
                grpc.aio.secure_channel(bridge.address, credentials(tmp_path, "stranger")) as stranger,
                grpc.aio.insecure_channel(bridge.address) as plain,
            ):
                await Client(first).start(start_request(name))
                async with refused("NOT_FOUND", "UnknownEpisode"):
                    await Client(second).state(name)
                assert (await Client(first).step(name, 1)).finish == pb.LENGTH
                for outsider in (stranger, plain):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        await Client(outsider).state(name)
                    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        async with serving(engine, limits_of(policy), options) as bridge:
            async with grpc.aio.secure_channel(bridge.address, credentials(tmp_path, "one")) as first:
                assert (await Client(first).state(name)).steps == 1, "the names stay over a restart"
        await engine.close()

    asyncio.run(run())
