"""The web server's one route of ours: a report's page, intact and sandboxed, and nothing else."""

from __future__ import annotations

import httpx
import pytest
from report_world import World
from starlette.applications import Starlette
from starlette.routing import Route
from starlette.testclient import TestClient

from contracts.artifacts import Artifact
from ops.report import ROUTE
from ops.report.build import commit_report
from ops.report.sources import find_sources
from tests.cli.cli_history import EXPERIMENT
from triplane_dagster.webserver import report_page


@pytest.fixture(scope="module")
def made(world: World) -> Artifact:
    return commit_report(find_sources(world.store, EXPERIMENT, "0000"), [], {})


@pytest.fixture
def client(world: World, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    monkeypatch.setenv("TRIPLANE_STORE", world.store.url)
    return TestClient(Starlette(routes=[Route(f"{ROUTE}/{{key}}", report_page)]))


def body(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status
    return answer.text


def test_a_report_is_served_as_committed_and_without_an_origin(client: TestClient, made: Artifact) -> None:
    answer = client.get(f"{ROUTE}/{made.ref.key}")
    assert answer.status_code == 200 and answer.content == made.path("report.html").read_bytes()
    assert answer.headers["content-type"].startswith("text/html")
    rules = answer.headers["content-security-policy"].split()
    assert rules[0] == "sandbox" and "allow-same-origin" not in rules


def test_other_artifacts_have_no_address(client: TestClient, world: World) -> None:
    checkpoint = world.history.artifacts["base"].ref
    assert "no report" in body(client.get(f"{ROUTE}/{checkpoint.key}"), 404)


@pytest.mark.parametrize("key", ["..", "%2e%2e", "A" * 64, "0" * 63, "0" * 65])
def test_report_route_refuses_anything_but_an_action_key(client: TestClient, key: str) -> None:
    assert client.get(f"{ROUTE}/{key}").status_code == 404


def test_damaged_report_is_an_error(client: TestClient, made: Artifact) -> None:
    page = made.path("report.html")
    whole, mode = page.read_bytes(), page.stat().st_mode
    page.chmod(0o644)
    try:
        page.write_bytes(whole[:-9] + b"<b>x</b>\n")
        assert "does not match its manifest" in body(client.get(f"{ROUTE}/{made.ref.key}"), 500)
    finally:
        page.write_bytes(whole)
        page.chmod(mode)


def test_an_absent_store_is_an_error_in_words(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIPLANE_STORE", "ftp://nowhere")
    assert "unknown scheme" in body(client.get(f"{ROUTE}/{'0' * 64}"), 500)
