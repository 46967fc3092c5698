"""What `triplane doctor` says of this machine, and of machines that lack things."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from benchmarks.faulty_s3 import Fault, faulty_s3
from envd.local import LocalEnvd
from resources.experiment import load_experiment
from triplane_dagster.doctor import accelerators, isolation, machine, services
from triplane_dagster.doctor.findings import Check, ask, make, ok
from triplane_dagster.doctor.trials.torch_devices import fp8_of

pytestmark = pytest.mark.slow

Row = dict[str, Any]
ROOT = Path(__file__).parents[2]


def doctor(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, in `folder`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRIPLANE_", "DAGSTER_", "AWS_"))}
    command = [str(Path(sys.executable).with_name("triplane")), "doctor", *arguments]
    return subprocess.run(
        command, cwd=folder, env={**kept, "COLUMNS": "200", **environment}, capture_output=True, text=True, timeout=280
    )


def rows_of(done: subprocess.CompletedProcess[str]) -> dict[str, Row]:
    assert "Traceback" not in done.stderr, done.stderr
    return {row["name"]: row for row in json.loads(done.stdout)["checks"]}


@pytest.fixture
def no_tools(tmp_path: Path) -> str:
    """A PATH with what a sandbox's shell and git need, and none of the tools that doctor looks for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    absent = {"docker", "kubectl", "runsc", "nvidia-smi", "firecracker", "unshare"}
    for place in ("/usr/bin", "/bin"):
        for tool in Path(place).iterdir():
            if (
                tool.name not in absent
                and not tool.name.startswith("qemu-")
                and not os.path.lexists(folder / tool.name)
            ):
                (folder / tool.name).symlink_to(tool)
    return str(folder)


def test_doctor_passes_here_and_leaves_no_files(tmp_path: Path) -> None:
    done = doctor(tmp_path, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows_of(done)
    assert json.loads(done.stdout)["quickstart"] is True
    assert "ran a command" in found["sandboxes"]["found"] and found["torch"]["found"].startswith("2.")
    assert all(row["state"] == "ok" for row in found.values() if row["required"])
    assert all(row["fix"] for row in found.values() if row["state"] != "ok"), "whatever is amiss has a fix"
    assert not list(tmp_path.iterdir())


def test_missing_tools_are_named_with_what_to_install(tmp_path: Path, no_tools: str) -> None:
    place = tmp_path / "here"
    place.mkdir()
    done = doctor(place, PATH=no_tools, TRIPLANE_STORE="/dev/null/store", DAGSTER_HOME=str(tmp_path / "absent"))
    table = done.stdout
    assert done.returncode == 1 and "Traceback" not in done.stderr, done.stderr
    for sentence in ("apt-get install docker.io", "apt-get install kubernetes-client", "deploy/install-runsc.sh"):
        assert sentence in table
    assert "The quickstart can't run here: repair store, Dagster instance." in table


@pytest.mark.parametrize(
    ("store", "words"),
    [
        ("/proc/store", "point TRIPLANE_STORE"),
        ("ftp://x/y", "use a directory or s3://"),
        ("s3:///x", "s3://bucket"),
        ("file://data/store", "use file:///DIR"),
        ("~/store", "write the whole path"),
    ],
)
def test_a_store_that_cannot_be_written_is_broken(
    store: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRIPLANE_STORE", store)
    found = services.store()
    assert found.state == "broken" and words in f"{found.found}: {found.fix}", found


def test_doctor_measures_the_disk_of_a_file_url(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    monkeypatch.setenv("TRIPLANE_STORE", f"file://{tmp_path}/a%20b")
    assert machine.local_place() == tmp_path / "a b"


def test_an_existing_store_is_tried_itself(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", str(tmp_path))
    assert services.store().state == "ok"
    assert [path.name for path in tmp_path.iterdir()] == ["tmp"]


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """host:port of an S3 server with the bucket `triplane`, which TRIPLANE_STORE names."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "TRIPLANE_STORE": "s3://triplane/x",
        "TRIPLANE_CACHE": str(tmp_path),
    }.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3").create_bucket(Bucket="triplane")
    yield f"{host}:{port}"
    server.stop()


def test_doctor_removes_its_probe_object_from_s3(s3: str) -> None:
    found = services.store()
    assert found.state == "ok" and "If-None-Match" in found.found, found
    left = boto3.client("s3").list_objects_v2(Bucket="triplane").get("Contents", [])
    assert not [item["Key"] for item in left if "doctor" in item["Key"]]


@pytest.mark.parametrize(
    ("fault", "words"),
    [("refuse", "s3:PutObject"), ("unconditional", "ignores If-None-Match")],
)
def test_s3_without_permission_or_conditions_is_broken(
    s3: str, fault: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with faulty_s3(s3) as proxy:
        proxy.faults += [Fault(fault, method, times=999) for method in ("GET", "PUT", "HEAD", "DELETE")]
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        found = services.store()
    assert found.state == "broken" and words in f"{found.found}: {found.fix}", found


def test_a_bucket_that_does_not_exist_is_broken(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", "s3://absent/x")
    found = services.store()
    assert found.state == "broken" and "bucket absent does not exist" in found.found and "create it" in found.fix


def test_a_machine_without_a_c_compiler_for_triton_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "false")
    assert accelerators.compiler().state == "broken"
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", str(tmp_path))
    found = accelerators.compiler()
    assert found.state == "missing" and "gcc" in found.fix and "`trainer`" in found.fix, found


def test_settings_that_doctor_names_are_accepted() -> None:
    texts = [check.needed_for for check in [*isolation.checks(), *accelerators.checks(thorough=False)]]
    named = [match.groups() for text in texts for match in re.finditer(r"`([a-z_.]+): ([a-z0-9-]+)`", text)]
    assert len(named) >= 5
    for name, value in named:
        load_experiment(ROOT / "experiments" / "quickstart.yaml", [f"{name}={value}"])


def test_an_envd_that_does_not_answer_is_broken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/none.sock"
    monkeypatch.setenv("TRIPLANE_ENVD", address)
    found = isolation.sandboxes()
    assert found.state == "broken" and address in found.fix and "unset TRIPLANE_ENVD" in found.fix


def test_each_of_several_envd_servers_is_tried(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with LocalEnvd() as first, LocalEnvd() as second:
        monkeypatch.setenv("TRIPLANE_ENVD", f"{first.address},{second.address}")
        found = isolation.sandboxes()
        assert found.state == "ok" and found.found.startswith("2 servers: "), found
    with LocalEnvd() as first:
        monkeypatch.setenv("TRIPLANE_ENVD", f"{first.address},unix:{tmp_path}/none.sock")
        found = isolation.sandboxes()
        assert found.state == "broken" and f"{tmp_path}/none.sock" in found.found, found
    monkeypatch.setenv("TRIPLANE_ENVD", "dns:no-such-name.invalid:7400")
    found = isolation.sandboxes()
    assert found.state == "broken" and "no-such-name.invalid" in found.found, found


def test_a_backend_is_tried_on_the_server_that_runs_ask(monkeypatch: pytest.MonkeyPatch) -> None:
    with LocalEnvd("namespaces,plain") as server:
        monkeypatch.setenv("TRIPLANE_ENVD", server.address)
        looks = {check.name: check.look for check in isolation.checks()}
        assert looks["isolation"]().found.startswith("namespaces: ran a command, isolates")
        found = looks["gVisor"]()
        assert found.state == "missing" and "this server has namespaces, plain" in found.found, found


def test_a_program_that_hangs_or_fails_is_broken_and_holds_nothing_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in (("docker", "exec sleep 600"), ("nvidia-smi", "echo driver mismatch >&2; exit 9")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(services, "ask", lambda command: ask(command, timeout_s=0.5))
    never = threading.Event()
    checks = [
        Check("Docker", "", services.docker),
        Check("GPU", "", accelerators.gpu),
        Check("hangs", "", lambda: ok(str(never.wait())), timeout_s=0.5),
        Check("raises", "", lambda: ok(str(1 // 0))),
    ]
    found = [finding for _, finding in make(checks)]
    never.set()
    assert [each.state for each in found] == ["broken"] * 4
    assert [each.found for each in found] == [
        "no answer within 0.5 s",
        "driver mismatch",
        "no answer within 0.5 s",
        "ZeroDivisionError: integer division or modulo by zero",
    ]


def test_a_program_that_may_not_be_run_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "nvidia-smi").touch()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert accelerators.gpu().state == "missing"


def test_doctor_names_versions_that_differ_from_constraints(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "constraints.txt").write_text("# comment\nnumpy==0.1\nnever-heard-of-it==1\nhttpx>0\n")
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    found = machine.tested_versions()
    assert found.state == "broken" and found.found.startswith("numpy ") and found.found.endswith("tested ==0.1")
    assert list(machine._unmet(["numpy<0.1", "never-heard-of-it", "pytest>=8", 'nothing; extra == "dev"'])) == [
        f"numpy {machine._installed('numpy')} is not <0.1",
        "never-heard-of-it is not installed",
    ]


@pytest.mark.parametrize(
    ("capability", "words"),
    [((8, 0), "no FP8 units"), ((8, 9), "FP8 units"), ((9, 0), "FP8 units"), ((10, 0), "FP8 and MXFP8 units")],
)
def test_fp8_units_follow_from_the_compute_capability(capability: tuple[int, int], words: str) -> None:
    assert fp8_of(capability) == words
