"""`triplane doctor --kubernetes` names what a cluster lacks, and what fails without it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from resources.experiment import load_experiment
from tests.deploy.chart_pods import environment
from tests.deploy.render_chart import render
from tests.kubernetes.api_server import Cluster, serving
from triplane_dagster.cli.app import app
from triplane_dagster.doctor import cluster as checks
from triplane_dagster.doctor.cluster_rights import JOBSET_RIGHTS, RIGHTS

pytestmark = pytest.mark.slow

TINY = Path(__file__).parents[1] / "dagster" / "tiny.yaml"
AS_JOBSET = load_experiment(TINY, ["placement.trainer.workload=jobset"])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    for name in (*checks.VARIABLES, *checks.ADDRESSES):
        monkeypatch.delenv(name, raising=False)
    with serving(Cluster(tmp_path / "cluster")) as running:
        yield running


def doctor() -> tuple[int, dict[str, dict[str, Any]]]:
    done = CliRunner().invoke(app, ["doctor", "--kubernetes", "--json"])
    return done.exit_code, {row["name"]: row for row in json.loads(done.stdout)["checks"]}


def test_a_cluster_and_its_rights_are_found(cluster: Cluster) -> None:
    code, found = doctor()
    assert code == 1, "neither store nor variables are set"
    assert found["API server"]["state"] == "ok" and "v1.36.0" in found["API server"]["found"]
    assert found["rights"]["found"] == f"all {len(RIGHTS)} of the chart's Role in triplane"
    assert found["clock"]["state"] == "ok"
    assert "TRIPLANE_KUBERNETES_IMAGE (the image of trainers)" in found["settings"]["found"]
    assert "is a folder of one machine" in found["store"]["found"]


def test_the_environment_of_the_charts_pods_is_complete(monkeypatch: pytest.MonkeyPatch) -> None:
    for runs in ({}, {"runs": {"executor": "k8s"}}, {"trainer": {"launcher": "local"}}):
        found = environment(render(runs))
        for name in checks.VARIABLES:
            monkeypatch.setenv(name, found[name])
        assert checks.settings().state == "ok"
    monkeypatch.delenv("TRIPLANE_LAUNCHER")
    assert "not set: TRIPLANE_LAUNCHER (where trainers run)" in checks.settings().found


@pytest.mark.parametrize("right", [*RIGHTS, *JOBSET_RIGHTS], ids=str)
def test_a_missing_right_is_named_with_its_feature(cluster: Cluster, right: Any) -> None:
    kind = "/".join(filter(None, (right.resource, right.subresource)))
    cluster.forbidden.add((right.verb, kind))
    found = checks.rights([AS_JOBSET])
    assert found.state == "broken" and found.found == f"no right to {right}: {right.feature}"
    if right in JOBSET_RIGHTS:
        assert checks.rights([]).state == "ok", "no experiment needs it"


def test_a_cluster_without_jobsets_is_told_if_an_experiment_trains_as_one(cluster: Cluster) -> None:
    assert checks.jobsets([]).found == "no experiment asks for them"
    found = checks.jobsets([AS_JOBSET])
    assert found.state == "broken" and "does not know jobset.x-k8s.io/v1alpha2: tiny asks for it" in found.found
    cluster.has_jobsets = True
    assert checks.jobsets([AS_JOBSET]).state == "ok"


def test_an_old_or_unreachable_api_server_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "OLDEST", (1, 37))
    assert checks.api_server().fix == "use Kubernetes 1.37 or newer"
    cluster.down(60)
    code, found = doctor()
    assert code == 1 and found["API server"]["state"] == found["rights"]["state"] == "broken"


def test_a_wrong_clock_is_told(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    ahead = formatdate(time.time() + 120, usegmt=True)
    monkeypatch.setattr(BaseHTTPRequestHandler, "date_time_string", lambda *_: ahead)
    found = checks.clock()
    assert found.state == "broken" and re.match(r"\+1[12]\d s from the API server: more than 30 s", found.found)


def test_a_name_that_does_not_resolve_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DAGSTER_POSTGRES_HOST", "localhost")
    monkeypatch.setenv("TRIPLANE_ENVD", "no-such-host.invalid:7400,127.0.0.1:7400")
    assert checks.names().found == "no such host: no-such-host.invalid"
    monkeypatch.setenv("TRIPLANE_STEP_POOL", "dns:no-such-pool.invalid:4100,dns:localhost:4100")
    assert checks.names().found == "no such host: no-such-host.invalid, no-such-pool.invalid"
    monkeypatch.delenv("TRIPLANE_STEP_POOL")
    monkeypatch.setenv("TRIPLANE_ENVD", "127.0.0.1:7400")
    assert checks.names().state == "ok"


def test_classes_and_gpus_of_experiments_are_looked_for(cluster: Cluster) -> None:
    wanted = load_experiment(
        TINY, ["placement.trainer.priority_class=training", "trainer.launcher.gpus=8", "trainer.launcher.nodes=2"]
    )
    for name, gpus in (("node-a", "8"), ("node-b", "4")):
        node = {"metadata": {"name": name}, "status": {"allocatable": {"nvidia.com/gpu": gpus}}}
        cluster.add("nodes", node, namespace="")
    assert checks.classes([wanted]).found == "no priority class training (tiny: placement.trainer.priority_class)"
    assert checks.gpus([wanted]).found == "tiny: 2 x 8 nvidia.com/gpu, 1 nodes have them"
    cluster.add("priorityclasses", {"metadata": {"name": "training"}, "value": 1}, namespace="")
    cluster.add("nodes", {"metadata": {"name": "c"}, "status": {"allocatable": {"nvidia.com/gpu": "8"}}}, namespace="")
    assert checks.classes([wanted]).state == checks.gpus([wanted]).state == "ok"
    cluster.forbidden |= {("list", "nodes"), ("list", "priorityclasses")}
    assert checks.gpus([wanted]).found == "not checked: this account may not list nodes"
    assert checks.classes([wanted]).state == "missing"
