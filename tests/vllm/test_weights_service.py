"""The weights service: complete and verified checkpoints or none, shared pulls, space and keys."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from contracts.artifacts import Artifact, ArtifactRef, ArtifactWriter
from contracts.digests import sha256
from contracts.errors import ConfigError
from contracts.store import Store, open_store
from inference.engines import SamplingParams, VllmConfig
from inference.engines.fleet import FleetEngine
from inference.engines.policies import PolicyDirectory, StoredPolicy
from inference.engines.sidecar import Sidecar
from inference.errors import EngineError
from inference.fleet.client import read_key
from inference.weights import folder as folder_module
from inference.weights.folder import NoSpace, WeightsFolder
from tests.http_client import HTTP
from tests.vllm.conftest import ROOT
from tests.vllm.fleet_servers import StubServer, WeightsServer, environment, until

Policies = tuple[Path, Path]


@pytest.fixture(scope="module")
def s3_endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.slow)])
def store(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Store:
    monkeypatch.setenv("TRIPLANE_CACHE", str(tmp_path / "cache"))
    if request.param == "local":
        return open_store(str(tmp_path / "store"))
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": request.getfixturevalue("s3_endpoint"),
    }.items():
        monkeypatch.setenv(name, value)
    bucket = tmp_path.name.replace("_", "-").lower()
    boto3.client("s3").create_bucket(Bucket=bucket)
    return open_store(f"s3://{bucket}/some/prefix")


def commit(store: Store, name: str, files: dict[str, bytes]) -> Artifact:
    with ArtifactWriter(store, "checkpoint", sha256(name.encode()), parents={}, config={}, code_version="1") as out:
        for path, data in files.items():
            out.add_bytes(path, data)
        return out.commit()


def commit_policy(store: Store, directory: Path) -> Artifact:
    return commit(store, directory.name, {each.name: each.read_bytes() for each in directory.iterdir()})


def small(store: Store, name: str, size: int = 1000) -> Artifact:
    return commit(store, name, {"config.json": name.encode(), "model.safetensors": name.encode() * size})


def request(ref: ArtifactRef, **more: Any) -> dict[str, Any]:
    return {"digest": ref.digest, "key": ref.key, "kind": ref.kind, **more}


def tampered(store: Store, artifact: Artifact, name: str) -> None:
    """Change the stored bytes of a file, as a disk or a person may."""
    key = f"{artifact.uri}/{artifact.manifest.attempt}/{name}"
    if store.url.startswith("s3://"):
        bucket, _, prefix = store.url.removeprefix("s3://").partition("/")
        boto3.client("s3").put_object(Bucket=bucket, Key=f"{prefix}/{key}", Body=b"other bytes")
        return
    path = Path(store.url) / key
    path.chmod(0o644)
    path.write_bytes(b"other bytes")


@pytest.fixture
def run(store: Store, tmp_path: Path) -> Iterator[Callable[..., WeightsServer]]:
    """run(*options) -> a service of the store, which ends with the test"""
    started: list[WeightsServer] = []

    def begin(*options: str) -> WeightsServer:
        server = WeightsServer(tmp_path / "weights", store.url, "127.0.0.1", 0, *options)
        started.append(server)
        server.start()
        server.wait()
        return server

    yield begin
    for each in started:
        each.stop()


@pytest.fixture
def service(run: Callable[..., WeightsServer]) -> WeightsServer:
    return run()


def test_pull_is_complete_verified_and_done_once(service: WeightsServer, store: Store) -> None:
    artifact = small(store, "a")
    answer = service.pull(**request(artifact.ref))
    directory = Path(answer.json()["directory"])
    assert answer.status_code == 200 and directory == service.folder / artifact.ref.digest
    assert {each.name for each in directory.iterdir()} == {"config.json", "model.safetensors"}
    assert (directory / "model.safetensors").read_bytes() == b"a" * 1000
    assert not (directory / "model.safetensors").stat().st_mode & 0o222
    made = (directory / "model.safetensors").stat().st_ino
    store.discard(f"{artifact.uri}/")
    assert service.pull(**request(artifact.ref)).status_code == 200, "idempotent, without the store"
    assert (directory / "model.safetensors").stat().st_ino == made
    held = HTTP.get(f"{service.url}/held", timeout=30).json()["held"]
    assert [(each["name"], each["bytes"]) for each in held] == [(artifact.ref.digest, 1001)]


def test_corrupted_object_is_refused_by_name_and_nothing_is_visible(service: WeightsServer, store: Store) -> None:
    artifact = small(store, "a")
    tampered(store, artifact, "model.safetensors")
    answer = service.pull(**request(artifact.ref))
    assert answer.status_code == 422 and answer.json()["error"]["code"] == "corrupt"
    assert "model.safetensors does not match its manifest" in answer.json()["error"]["message"]
    assert [each.name for each in service.folder.iterdir()] == ["tmp"]
    assert not list((service.folder / "tmp").glob("stage-*"))


def test_unknown_checkpoint_and_other_digest_are_told_apart(service: WeightsServer, store: Store) -> None:
    artifact = small(store, "a")
    missing = service.pull(**request(artifact.ref) | {"key": "0" * 64})
    assert missing.status_code == 404 and "has no artifacts/checkpoint/000" in missing.json()["error"]["message"]
    other = service.pull(**request(artifact.ref) | {"digest": "f" * 64})
    assert other.status_code == 422 and "not ffffffffffff" in other.json()["error"]["message"]
    evil = service.pull(**request(artifact.ref) | {"digest": "../../etc"})
    assert evil.status_code == 400 and "digest" in evil.json()["error"]["message"]
    assert service.pull(**request(artifact.ref) | {"kind": "../x"}).status_code == 400


def test_concurrent_pulls_share_the_work(service: WeightsServer, store: Store) -> None:
    artifact = small(store, "ab", 20_000_000)
    answers: list[httpx.Response] = []
    threads = [threading.Thread(target=lambda: answers.append(service.pull(**request(artifact.ref)))) for _ in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert [each.status_code for each in answers] == [200] * 8
    assert len(HTTP.get(f"{service.url}/held", timeout=30).json()["held"]) == 1


def test_long_pull_is_answered_in_pieces(service: WeightsServer, store: Store) -> None:
    artifact = small(store, "ab", 50_000_000)
    first = service.pull(**request(artifact.ref, wait_s=0))
    assert first.status_code == 202 and set(first.json()) == {"done", "total"}
    until(lambda: service.pull(**request(artifact.ref, wait_s=0.2)).status_code == 200)


@pytest.mark.slow
def test_pull_that_is_killed_leaves_nothing_visible_and_is_repeated(
    service: WeightsServer, store: Store, tmp_path: Path
) -> None:
    size = 80_000_000 if store.url.startswith("s3://") else 300_000_000
    files = {"a.bin": b"a" * 1000, "b.bin": bytes(size), "c.bin": b"c"}
    artifact = commit(store, "large", files)
    service.pull(**request(artifact.ref, wait_s=0))
    assert service.process is not None
    until(lambda: any((service.folder / "tmp").glob("stage-*/a.bin")))
    service.process.send_signal(signal.SIGKILL)
    service.process.wait()
    assert [each.name for each in service.folder.iterdir()] == ["tmp"], "killed in the middle"
    service.start()
    service.wait()
    assert not list((service.folder / "tmp").glob("stage-*")), "a new service removes what is left"
    until(lambda: service.pull(**request(artifact.ref)).status_code == 200)
    directory = service.folder / artifact.ref.digest
    assert {each.name: each.stat().st_size for each in directory.iterdir()} == {
        name: len(data) for name, data in files.items()
    }
    assert not list((service.folder / "tmp").rglob("part-*"))


def test_last_ones_and_the_one_before_are_kept(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = WeightsFolder(tmp_path / "weights", keep=2)
    refs = [small(store, name).ref for name in ("a", "b", "c", "d")]
    weights.start_with(weights.pull(store, refs[0]))
    for ref in refs[1:]:
        time.sleep(0.02)
        weights.pull(store, ref)
    names = [each.name for each in weights.held()]
    assert names == [refs[3].digest, refs[2].digest, refs[0].digest], "the first one stays for a restart"
    weights.close()
    one = WeightsFolder(tmp_path / "one", keep=1)
    for ref in refs[:3]:
        time.sleep(0.02)
        one.pull(store, ref)
    assert [each.name for each in one.held()] == [refs[2].digest, refs[1].digest], "the one before may be in use"
    one.close()


def test_other_folders_beside_checkpoints_are_kept(store: Store, tmp_path: Path) -> None:
    others = [tmp_path / "models" / name for name in ("Qwen3-8B", "mine-float32", "0" * 63)]
    for other in others:
        other.mkdir(parents=True)
        (other / "model.safetensors").write_bytes(b"weights")
        os.utime(other, (0, 0))
    weights = WeightsFolder(tmp_path / "models", keep=1)
    refs = [small(store, name).ref for name in ("a", "b", "c")]
    for ref in refs:
        time.sleep(0.02)
        weights.pull(store, ref)
    assert [each.name for each in weights.held()] == [refs[2].digest, refs[1].digest]
    assert all((other / "model.safetensors").exists() for other in others)
    weights.close()


def test_missing_space_is_told_before_a_byte_is_written(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = WeightsFolder(tmp_path / "weights", keep=3)
    refs = [small(store, name).ref for name in ("a", "b", "c")]
    for ref in refs[:2]:
        time.sleep(0.02)
        weights.pull(store, ref)
    usage = folder_module.shutil._ntuple_diskusage(10**9, 10**9 - 500, 500)  # type: ignore[attr-defined]
    monkeypatch.setattr(folder_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(NoSpace, match=r"has 0\.00 GB free, checkpoint \w{12} needs 0\.00 GB: enlarge the volume"):
        weights.pull(store, refs[2])
    assert [each.name for each in weights.held()] == [refs[1].digest], "old ones were given up for it, not the last one"
    weights.close()


def test_folder_has_one_service(service: WeightsServer) -> None:
    with pytest.raises(ConfigError, match="in use by another weights service"):
        WeightsFolder(service.folder, keep=2)


def test_key_is_asked_for(store: Store, tmp_path: Path, run: Callable[..., WeightsServer]) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# keys of this service\na-key-of-some-length\n")
    server = run("--key-file", str(keys))
    body = request(small(store, "a").ref)
    assert server.pull(**body).status_code == 401
    for wrong in ("a-wrong-key-of-length", "# keys of this service"):
        assert server.pull(wrong, **body).status_code == 401
    assert server.pull("a-key-of-some-length", **body).status_code == 200
    headers = {"authorization": "Bearer a-key-of-some-length", "content-type": "text/plain"}
    undeclared = HTTP.post(f"{server.url}/pull", content=json.dumps(body), headers=headers, timeout=60)
    assert undeclared.status_code == 400 and "content-type" in undeclared.text, "any web page may send it"
    keys.write_text("short")
    command = [*server.command, "--listen", "127.0.0.1:0"]
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "at least 16 characters" in done.stderr


def test_first_checkpoint_is_there_before_the_service_answers(store: Store, run: Callable[..., WeightsServer]) -> None:
    artifact = small(store, "a")
    server = run("--first", artifact.ref.digest[:10])
    assert (server.folder / "first" / "config.json").read_bytes() == b"a"


@pytest.mark.parametrize(("text", "words"), [(None, "can't be read: .*absent"), ("", "holds no key")])
def test_errors_of_a_key_file_name_the_variable_that_names_it(
    text: str | None, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "absent"
    if text is not None:
        file.write_text(text)
    monkeypatch.setenv("TRIPLANE_WEIGHTS_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match=f"^TRIPLANE_WEIGHTS_KEY_FILE: .*{words}"):
        Sidecar("http://127.0.0.1:7500", timeout_s=1.0)
    monkeypatch.setenv("TRIPLANE_FLEET_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match=f"^TRIPLANE_FLEET_KEY_FILE: .*{words}"):
        read_key()


@pytest.mark.anyio
@pytest.mark.slow
async def test_fleet_loads_what_its_services_pulled(store: Store, tmp_path: Path, policies: Policies) -> None:
    """Two machines, here two loopback addresses, each with a server and a service on the same ports."""
    artifacts = [commit_policy(store, each) for each in policies]
    hosts = ["127.0.0.1", "127.0.0.2"]
    servers, services = [StubServer(policies[0], hosts[0])], []
    servers.append(StubServer(policies[0], hosts[1], servers[0].port))
    services.append(WeightsServer(tmp_path / "weights-0", store.url, hosts[0]))
    services.append(WeightsServer(tmp_path / "weights-1", store.url, hosts[1], services[0].port))
    try:
        for each in [*servers, *services]:
            each.start()
        for each in [*servers, *services]:
            each.wait()
        config = VllmConfig(base_url=",".join(each.url for each in servers), weights_port=services[0].port)
        engine = FleetEngine(config, StoredPolicy(artifacts[0]))
        assert await engine.version() == artifacts[0].ref.digest and len(engine.serving()) == 2
        await engine.load_weights(artifacts[1].directory(), artifacts[1].ref.digest)
        found = await engine.generate([1, 2, 3], SamplingParams(1.0, 4, 1))
        assert found.spans == [(artifacts[1].ref.digest, 0, 4)]
        for each in services:
            assert (each.folder / f"{artifacts[1].ref.digest}-float32" / "config.json").is_file()
        services[1].stop()
        third = commit(store, "third", {each.name: each.read_bytes() for each in policies[0].iterdir()} | {"x": b""})
        await engine.load_weights(third.directory(), third.ref.digest)
        assert engine.serving() == [servers[0].url], "a server whose service is down is left out"
        with pytest.raises(EngineError, match="is no artifact of a store"):
            await engine.load_weights(policies[0], "a" * 64)
        await engine.close()
    finally:
        for each in [*servers, *services]:
            each.stop()


def test_reference_is_read_from_the_path_of_a_stored_policy(store: Store) -> None:
    artifact = small(store, "a")
    assert PolicyDirectory(artifact.directory(), artifact.ref.digest).ref == artifact.ref
    assert PolicyDirectory(Path("/somewhere/else"), artifact.ref.digest).ref is None
