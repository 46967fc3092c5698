"""An iteration that meets spoiled artifacts, full disks, refusing stores and dead servers: one line, and nothing that
was made is touched.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
import torch
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file, save_file

from benchmarks.faulty_s3 import Fault, faulty_s3
from contracts.artifacts import list_artifacts
from contracts.filecache import CACHE_FOLDER
from tests.acceptance.interrupting import PROGRESS
from tests.acceptance.laboratory import Laboratory
from tests.acceptance.spoiling import (
    assert_one_line,
    contents,
    copy_of,
    cut,
    file_of,
    flipped,
    iterate,
    reseal,
    rewrite,
)
from tests.acceptance.test_iterations_are_exact import TINY

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SCALE, UP = "model.layers.0.self_attn.q_proj.weight_scale_inv", "model.layers.0.mlp.experts.1.up_proj.weight"
AGAIN = "delete the artifact's folder and run its step again"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Laboratory:
    laboratory = Laboratory(tmp_path_factory.mktemp("finished"), TINY)
    laboratory.iterate(1)
    return laboratory


def file_spoiled(kind: str, name: str, how: Callable[[bytes], bytes]) -> Callable[[Laboratory], None]:
    return lambda laboratory: rewrite(file_of(laboratory, kind, name), how)


def weights_spoiled(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Laboratory], None]:
    """A base policy that was committed with bad tensors."""

    def spoil(laboratory: Laboratory) -> None:
        path = file_of(laboratory, "checkpoint", "model.safetensors")
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file(tensors, path, metadata={"format": "pt"})
        reseal(laboratory, "checkpoint")

    return spoil


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors[SCALE].fill_(float("nan"))


@pytest.mark.parametrize(
    ("redo", "spoil", "said"),
    [
        (
            "rollouts",
            file_spoiled("group", "sequences.parquet", cut),
            ("artifacts/group/", "/sequences.parquet", AGAIN),
        ),
        (
            "rewards",
            file_spoiled("rollouts", "episodes.parquet", cut),
            ("artifacts/rollouts/", "/episodes.parquet", AGAIN),
        ),
        ("dataset", file_spoiled("rewards", "rewards.parquet", cut), ("artifacts/rewards/", "/rewards.parquet", AGAIN)),
        ("checkpoint", file_spoiled("dataset", "train.parquet", cut), ("artifacts/dataset/", "/train.parquet", AGAIN)),
        (
            "checkpoint",
            file_spoiled("dataset", "manifest.json", cut),
            ("artifacts/dataset/", "/manifest.json is damaged", AGAIN),
        ),
        (
            "prompts",
            file_spoiled("task_suite", "tasks.parquet", flipped),
            ("artifacts/task_suite/", "/tasks.parquet", AGAIN),
        ),
        ("prompts", file_spoiled("iteration_inputs", "inputs.json", flipped), ("artifacts/iteration_inputs/", AGAIN)),
        (
            "rollout_plan",
            file_spoiled("prompts", "prompts.json", flipped),
            ("artifacts/prompts/", "/prompts.json", AGAIN),
        ),
        ("group", file_spoiled("rollout_plan", "plan.json", flipped), ("artifacts/rollout_plan/", "/plan.json", AGAIN)),
        (
            "checkpoint",
            file_spoiled("trainer_state", "state.safetensors", flipped),
            ("artifacts/trainer_state/", AGAIN),
        ),
        (
            "evaluation",
            file_spoiled("evaluation_run", "rewards.parquet", flipped),
            ("artifacts/evaluation_run/", AGAIN),
        ),
        ("sampler", file_spoiled("evaluation", "evaluation.json", flipped), ("artifacts/evaluation/", AGAIN)),
        ("report", file_spoiled("sampler", "decision.json", flipped), ("artifacts/sampler/", "/decision.json", AGAIN)),
        (
            "group",
            weights_spoiled(lambda tensors: tensors.pop(UP)),
            ("tiny/base_policy fails its check", f"lacks tensor {UP}"),
        ),
        (
            "group",
            weights_spoiled(lambda tensors: tensors.update({"model.norm.weight": torch.ones(7)})),
            ("model.norm.weight is", "expected"),
        ),
        ("group", weights_spoiled(not_finite), ("q_proj.weight is not finite", "don't serve it")),
        (
            "checkpoint",
            weights_spoiled(not_finite),
            (f"{SCALE} contains numbers that are not finite", "use an earlier policy"),
        ),
    ],
)
def test_spoiled_artifacts(
    finished: Laboratory, tmp_path: Path, redo: str, spoil: Callable[[Laboratory], None], said: tuple[str, ...]
) -> None:
    laboratory = copy_of(finished, tmp_path, redo)
    spoil(laboratory)
    before = contents(laboratory)
    assert_one_line(iterate(laboratory), *said)
    assert before.items() <= contents(laboratory).items()


TMPFS = "mkdir -p {0}/disk; mount -t tmpfs -o size=8m none {0}/disk"
FILLED = "; head -c 9m /dev/zero > {0}/disk/filler 2>&- || true"
OTHER_STORE = (
    "mv {0}/.triplane/store {0}/was; mkdir {0}/.triplane/store; mount -t tmpfs -o size=8m none {0}/.triplane/store; cp"
    " -a {0}/was/. {0}/.triplane/store"
)
READ_ONLY = "mount --bind {0}/.triplane/%s {0}/.triplane/%s; mount -o remount,bind,ro {0}/.triplane/%s"
LARGE = ("base.model.hidden_size=256", "base.model.expert_width=256")
"""A base policy whose snapshots do not fit in 8 MiB."""


@pytest.mark.parametrize(
    ("script", "environment", "settings", "redo", "said"),
    [
        (
            TMPFS,
            {"TRIPLANE_STORE": "{0}/disk"},
            LARGE,
            None,
            ("trainer: store", "/disk is full: free some space, or point TRIPLANE_STORE elsewhere"),
        ),
        (
            "mkdir {0}/.triplane; mount -t tmpfs -o size=8m none {0}/.triplane",
            {},
            LARGE,
            None,
            ("/.triplane/store is full: free some space",),
        ),
        (
            (TMPFS + FILLED + "; truncate -s -20K {0}/disk/filler").replace("{0}/disk", "/mnt"),
            {"TMPDIR": "/mnt"},
            (),
            None,
            ("envd did not start: ", "No space left on device", "space"),
        ),
        (
            TMPFS + "; echo 'telemetry: {{enabled: false}}' > {0}/disk/dagster.yaml" + FILLED,
            {"DAGSTER_HOME": "{0}/disk"},
            (),
            None,
            ("Dagster's records", "free some space"),
        ),
        (
            OTHER_STORE + "; head -c 9m /dev/zero > {0}/.triplane/store/filler 2>&- || true; truncate -s -150K"
            " {0}/.triplane/store/filler",
            {},
            (),
            "group",
            ("store", "is full: free some space"),
        ),
        (READ_ONLY.replace("%s", "store"), {}, (), "group", ("store", "is not writable (Read-only file system)")),
        (READ_ONLY.replace("%s", "dagster"), {}, (), "group", ("Dagster's records", "make them writable")),
    ],
    ids=[
        "store",
        "everything",
        "TMPDIR",
        "DAGSTER_HOME",
        "store during rollouts",
        "read-only store",
        "read-only records",
    ],
)
@pytest.mark.skipif(os.getuid() != 0, reason="only root may mount: run the suite in a container")
def test_full_and_read_only_disks(
    finished: Laboratory,
    tmp_path: Path,
    script: str,
    environment: dict[str, str],
    settings: tuple[str, ...],
    redo: str | None,
    said: tuple[str, ...],
) -> None:
    laboratory = copy_of(finished, tmp_path, redo) if redo else Laboratory(tmp_path, TINY)
    before = contents(laboratory)
    command = laboratory.command(
        "iterate", *laboratory.settings, "-n", "1", *(part for each in settings for part in ("--set", each))
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-ec", f'{script.format(tmp_path)}\nexec "$@"', "sh", *command],
        cwd=tmp_path,
        env=laboratory.env | {name: value.format(tmp_path) for name, value in environment.items()},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert_one_line(done, *said)
    assert [line for line in done.stderr.splitlines() if line.strip() and not PROGRESS.match(line)][1:] == []
    moved = tmp_path / "was"
    if moved.exists():
        (tmp_path / ".triplane" / "store").rmdir()
        moved.rename(tmp_path / ".triplane" / "store")
    assert before.items() <= contents(laboratory).items()


class Answers(BaseHTTPRequestHandler):
    """A server that says of itself what `said` holds, and hangs up on anything else."""

    def do_GET(self) -> None:
        body = self.server.said  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_POST(self) -> None:
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Silent."""


@contextmanager
def answering(said: bytes) -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    server.said = said  # type: ignore[attr-defined]
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def models(version: str) -> bytes:
    return json.dumps({"data": [{"id": "policy", "owned_by": "triplane", "version": version}]}).encode()


@pytest.mark.parametrize(
    ("said_by_it", "said"),
    [
        (None, ("http://127.0.0.1:9/v1/models can't be reached", "start the server or correct the address")),
        (b"<html>hello</html>", ("sent an invalid reply, '<html>hello</html>'", "an engine's API runs there")),
        (b"{}", ("/models lists no model",)),
        (models("f" * 64), ("/load_weights can't be reached",)),
        (models("POLICY"), ("engine", "run")),
    ],
    ids=["nothing listens", "a web page", "other JSON", "another policy", "it hangs up in the middle"],
)
def test_engines_that_are_none(
    finished: Laboratory, tmp_path: Path, said_by_it: bytes | None, said: tuple[str, ...]
) -> None:
    laboratory = copy_of(finished, tmp_path, "group")
    before = contents(laboratory)
    acting = next(
        each for each in list_artifacts(laboratory.store, "checkpoint") if "dataset" not in each.manifest.parents
    )
    with answering((said_by_it or b"").replace(b"POLICY", acting.ref.digest.encode())) as url:
        config = {"kind": "openai", "base_url": url if said_by_it else "http://127.0.0.1:9/v1", "retries": 1}
        done = iterate(laboratory, "--set", f"engine={json.dumps(config)}")
    assert_one_line(done, *said)
    assert before.items() <= contents(laboratory).items()


def test_a_dead_environment_server(finished: Laboratory, tmp_path: Path) -> None:
    laboratory = Laboratory(tmp_path, TINY)
    laboratory.take_base_from(finished)
    shutil.rmtree(tmp_path / ".triplane" / "store" / "artifacts" / "task_suite")
    before = contents(laboratory)
    done = iterate(laboratory, "--set", "sandboxes.address=127.0.0.1:9")
    assert_one_line(done, "envd at 127.0.0.1:9 did not answer", "check that `python -m envd serve` runs there")
    assert before.items() <= contents(laboratory).items()


@pytest.mark.parametrize(("method", "where"), [("PUT", ""), ("GET", "list-type=2")], ids=["writing", "listing"])
def test_a_bucket_that_refuses_a_part(tmp_path: Path, method: str, where: str) -> None:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    environment = {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "TRIPLANE_CACHE": str(tmp_path / "cache"),
        "TRIPLANE_STORE": "s3://triplane/x",
    }
    with pytest.MonkeyPatch.context() as patch, faulty_s3(f"{host}:{port}") as proxy:
        for name, value in environment.items():
            patch.setenv(name, value)
        boto3.client("s3").create_bucket(Bucket="triplane")
        proxy.faults.append(Fault("refuse", method, where, times=9999))
        laboratory = Laboratory(tmp_path / "here", TINY, environment=environment | {"AWS_ENDPOINT_URL": proxy.endpoint})
        done = iterate(laboratory)
    server.stop()
    assert_one_line(done, "store s3://triplane/x refuses access to", "s3:PutObject", "s3:ListBucket")
    assert list((tmp_path / "cache" / CACHE_FOLDER / "tmp").iterdir()) == [], "no staged file is left"
