"""docs/kubernetes.md says what the chart does: its values exist, its examples work, its links lead somewhere."""

from __future__ import annotations

import re
from typing import Any

import yaml

from resources.placement import PlacementConfig
from tests.deploy.chart_pods import FULL, environment, templates
from tests.deploy.compose import ROOT
from tests.deploy.render_chart import CHART, render

PAGE = ROOT / "docs" / "kubernetes.md"


def section(title: str) -> str:
    return PAGE.read_text().split(f"\n## {title}\n")[1].split("\n## ")[0]


def examples() -> list[dict[str, Any]]:
    return [yaml.safe_load(each) for each in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]


def test_values_of_the_page_exist() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    first = [row.split("|")[1] for row in section("Values").splitlines() if row.startswith("| `")]
    named = [name for cell in first for name in re.findall(r"`([a-zA-Z0-9.]+)`", cell) if not name.isupper()]
    assert len(named) > 15
    for name in named:
        found: Any = values
        for part in name.split("."):
            assert part in found, name
            found = found[part]


def test_variables_of_the_page_are_those_of_the_chart() -> None:
    documented = set(re.findall(r"^\| `(TRIPLANE_[A-Z_]+)` \|", section("Values"), re.MULTILINE))
    set_by_the_chart = {name for name in environment(render(FULL)) if name.startswith("TRIPLANE_KUBERNETES_")}
    assert set_by_the_chart < documented <= set(environment(render(FULL)))


def test_the_example_of_an_installation_renders() -> None:
    (values,) = [each for each in examples() if "store" in each]
    found = dict(templates(render(values)))
    assert "triplane-sampler-quickstart" in found and "triplane-s3" in found
    assert found["triplane-code"]["spec"]["containers"][0]["image"] == "registry.example.com/triplane-stack:1"


def test_the_example_of_routers_and_bridges_renders_what_the_page_names() -> None:
    (values,) = [each for each in examples() if "routers" in each]
    found = {each["metadata"]["name"]: each["kind"] for each in render(values) if each["kind"] != "Service"}
    for kind, name in re.findall(r"(deployment|statefulset)/(triplane-[a-z-]+)", section("Routers and bridges")):
        assert found.get(name, "").lower() in (kind, "scaledobject", "poddisruptionbudget"), name
    services = {each["metadata"]["name"] for each in render(values) if each["kind"] == "Service"}
    addresses = re.findall(r"(triplane-[a-z-]+)(?:\.triplane\.svc)?:\d+", section("Routers and bridges"))
    assert len(set(addresses)) == 3 and set(addresses) <= services


def test_the_example_of_a_placement_is_valid() -> None:
    (placement,) = [each["placement"] for each in examples() if "placement" in each]
    assert PlacementConfig.model_validate(placement).trainer.queue == "team-a"


def test_secrets_of_the_example_have_the_keys_that_pods_read() -> None:
    commands = PAGE.read_text().replace("\\\n", " ")
    made = {
        name: set(re.findall(r"--from-literal=(\w+)=", rest))
        for name, rest in re.findall(r"^kubectl create secret generic (\S+) (.*)$", commands, re.MULTILINE)
    }
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    (serving,) = [each for each in examples() if "routers" in each]
    assert made == {
        values["s3"]["existingSecret"]: {"AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"},
        values["postgres"]["existingSecret"]: {values["postgres"]["passwordKey"]},
        values["envd"]["existingSecret"]: {values["envd"]["secretKey"]},
        serving["redis"]["existingSecret"]: {"password"},
        serving["routers"][0]["keySecret"]: {"keys"},
        serving["bridges"][0]["keySecret"]: {"keys"},
    }


def test_links_lead_to_files_and_headings() -> None:
    for target in re.findall(r"\]\(([^)#]*)(#[^)]*)?\)", PAGE.read_text()):
        path, heading = target
        if path.startswith("http"):
            continue
        file = (PAGE.parent / path).resolve() if path else PAGE
        assert file.is_file(), path
        if heading:
            titles = re.findall(r"^#+ (.*)$", file.read_text(), re.MULTILINE)
            anchors = {re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}
            assert heading[1:] in anchors, f"{path}{heading}"
