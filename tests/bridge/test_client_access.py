"""How the client gets in: certificates, and keys that a bridge made for itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from contracts.errors import ConfigError
from contracts.rpc.listening import Listening
from inference.bridge.client import AccessDenied, BridgeClient, BridgeUnreachable, Sampling
from inference.bridge.serve import Options, limits_of, serving
from inference.engines.builtin import BuiltinEngine
from tests.bridge.scripted_bridge import looped
from tests.envd.test_services_tls import certificate
from tests.inference.conftest import write_checkpoint

SAMPLING = Sampling(max_tokens=4)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("policy") / "p", 0)


@looped
async def test_certificates_let_the_client_in(policy: Path, tmp_path: Path) -> None:
    authority = certificate(tmp_path, "ca", None)
    for name in ("server", "one"):
        certificate(tmp_path, name, authority)
    files = {"tls_cert": tmp_path / "server.crt", "tls_key": tmp_path / "server.key"}
    listening = Listening("localhost:0", tls_client_ca=tmp_path / "ca.crt", **files)
    engine = BuiltinEngine(policy, "v1", threads=1)
    async with serving(engine, limits_of(policy), Options(listening)) as server:
        own = {"tls_ca": tmp_path / "ca.crt", "tls_cert": tmp_path / "one.crt", "tls_key": tmp_path / "one.key"}
        async with BridgeClient(server.address, **own) as client:
            async with await client.start([1], sampling=SAMPLING) as episode:
                assert len((await episode.step()).token_ids) == 4
        async with BridgeClient(server.address, tls_ca=tmp_path / "ca.crt", give_up_after_s=0.5) as client:
            with pytest.raises(BridgeUnreachable):
                await client.start([1])
        with pytest.raises(ConfigError, match=r"missing\.crt"):
            async with BridgeClient(server.address, tls_ca=tmp_path / "missing.crt"):
                pass
    await engine.close()


@looped
async def test_key_that_the_bridge_made_is_found(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    engine = BuiltinEngine(policy, "v1", threads=1)
    async with serving(engine, limits_of(policy), Options(Listening("127.0.0.1:0"))) as server:
        async with BridgeClient(server.address) as client:
            assert (await client.info()).versions == ("v1",)
            async with await client.start([1], sampling=SAMPLING) as episode:
                assert len((await episode.step()).token_ids) == 4
        async with BridgeClient(server.address, key="another key of 16") as client:
            with pytest.raises(AccessDenied):
                await client.start([1])
    await engine.close()
    assert "asks for this key" in capsys.readouterr().err


def test_default_address_is_the_socket_of_this_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert BridgeClient().address == f"unix:{tmp_path}/triplane/bridge.sock"
