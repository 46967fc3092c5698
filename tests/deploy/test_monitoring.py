"""deploy/monitoring: rules and dashboard name what the services give."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import urllib.request
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from contracts.pb import bridge_pb2 as pb
from envd.server.operations import metrics as envd_metrics
from inference.bridge import errors
from inference.bridge import metrics as bridge_metrics
from inference.server.route_metrics import Look, RouteMetrics
from tests import needs
from tests.deploy.compose import ROOT

MONITORING = ROOT / "deploy" / "monitoring"
DASHBOARD = MONITORING / "grafana" / "dashboards" / "triplane.json"
NAME = re.compile(r"\b((?:envd|bridge|route)_[a-z_]+)(?:\{([^}]*)\})?")
GROUPING = re.compile(r"by \(([^)]*)\)")


def expressions() -> list[str]:
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    panels = json.loads(DASHBOARD.read_text())["panels"]
    return [rule["expr"] for group in rules["groups"] for rule in group["rules"]] + [
        target["expr"] for panel in panels for target in panel.get("targets", [])
    ]


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return str(answer.read().decode())


async def given() -> dict[str, set[str]]:
    """Name of every sample that the three services give -> its labels."""
    living: Any = SimpleNamespace(
        backends={"namespaces": SimpleNamespace(pool=SimpleNamespace(hits=1, misses=1))},
        egress=SimpleNamespace(connections=0, sent=0, received=0),
        all=lambda wanted: [],
    )
    envd = envd_metrics.Metrics(living, cast("Any", SimpleNamespace(counts={"auth.denied": 1})))
    for method in ("Tools/Batch", "Sandboxes/Create"):
        envd.begin(method, SimpleNamespace(calls=[SimpleNamespace(name="exec")]), None)("OK")
    counts = bridge_metrics.Counts()
    for each in (counts.closed, counts.turns, counts.refused):
        each["x"] += 1
    bridge = bridge_metrics.Metrics(counts, lambda: {"open": 1})
    route = RouteMetrics(lambda: Look({"serving": 1}, {"a": 1.0}, {"lost": 1}, {"sent": 1}))
    route.requests.labels("a", "200").inc()
    route.seconds.labels("/v1/completions").observe(1)
    texts = [route.text().decode()]
    for each in (envd, bridge):
        port = each.start("127.0.0.1:0")
        texts.append(await asyncio.to_thread(scrape, port))
        await asyncio.to_thread(each.stop)
    found: dict[str, set[str]] = {}
    for text in texts:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found.setdefault(sample.name, set()).update(sample.labels)
    return found


@pytest.mark.anyio
async def test_rules_and_dashboard_ask_for_metrics_and_labels_that_services_give() -> None:
    known, used = await given(), set[str]()
    for text in expressions():
        names = NAME.findall(text)
        used |= {name for name, _ in names}
        for name, filters in names:
            assert name in known, f"{name} in {text}"
            assert set(re.findall(r"(\w+)[!=]", filters)) <= known[name], text
        for labels in GROUPING.findall(text):
            wanted = set(labels.replace(" ", "").split(",")) - {"instance"}
            assert all(wanted <= known[name] for name, _ in names), text
    assert {name.partition("_")[0] for name in used} == {"envd", "bridge", "route"}


def test_the_values_that_alerts_ask_for_are_those_of_the_services() -> None:
    rules = (MONITORING / "rules.yaml").read_text()
    assert set(re.findall(r'finish="(\w+)"', rules)) <= set(pb.Finish.keys())
    for kind in re.findall(r'kind="([\w.]+)"', rules):
        assert any(f'"{kind}"' in path.read_text() for path in (ROOT / "envd").rglob("*.py")), kind
    for error in re.findall(r'error="(\w+)"', rules):
        assert hasattr(errors, error)
    jobs = {each["job_name"] for each in yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]}
    assert jobs <= set(re.findall(r"[a-z]+", rules.split("job=~")[1].split("}")[0]))


def test_services_of_other_profiles_are_scraped_only_where_they_run() -> None:
    jobs = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())["scrape_configs"]
    services = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())["services"]
    for job in jobs:
        assert job.keys() == {"job_name", "dns_sd_configs"}, "a static target that was not started counts as down"
        (found,) = job["dns_sd_configs"]
        (name,) = found["names"]
        assert found["type"] == "A" and f":{found['port']}" in str(services[name]["command"])


def test_every_alert_is_explained() -> None:
    rules = yaml.safe_load((MONITORING / "rules.yaml").read_text())
    alerts = [rule["alert"] for group in rules["groups"] for rule in group["rules"]]
    page = (ROOT / "docs" / "monitoring.md").read_text()
    assert alerts == re.findall(r"^\| `([A-Z][a-z]\w+)` \| [a-z\d]", page, flags=re.MULTILINE)
    assert f"({len(alerts)} alerts)" in page


def test_the_dashboard_is_whole() -> None:
    board = json.loads(DASHBOARD.read_text())
    panels = [each for each in board["panels"] if each["type"] != "row"]
    assert len({each["id"] for each in board["panels"]}) == len(board["panels"])
    places = {(each["gridPos"]["x"], each["gridPos"]["y"]) for each in panels}
    assert len(places) == len(panels), "two panels are at one place"
    (source,) = yaml.safe_load(next(MONITORING.rglob("datasources/*.yaml")).read_text())["datasources"]
    assert {each["datasource"]["uid"] for each in panels} == {source["uid"]}


def test_prometheus_accepts_configuration_and_rules() -> None:
    needs.require("promtool")
    for what in (["config", "prometheus.yaml"], ["rules", "rules.yaml"]):
        done = subprocess.run(["promtool", "check", *what], cwd=MONITORING, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
