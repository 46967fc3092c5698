"""Renders deploy/helm/triplane as `helm template` does, by Helm's own library (`helm-python-sdk`).

python -m tests.deploy.render_chart --values FILE --release NAME --namespace NS | kubectl apply -f -
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from helm_python import Chart, HelmError, _native

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "triplane"


def render(
    values: dict[str, Any] | None = None,
    release: str = "triplane",
    namespace: str = "triplane",
    kube_version: str = "1.33",
) -> list[dict[str, Any]]:
    """Objects of a release with these values. Raises HelmError for values that the schema refuses."""
    objects: list[dict[str, Any]] = []
    for name, text in sorted(files(values, release, namespace, kube_version).items()):
        if name.endswith(".yaml"):
            objects += [each for each in yaml.safe_load_all(text) if each]
    return objects


def files(values: dict[str, Any] | None, release: str, namespace: str, kube_version: str) -> dict[str, str]:
    """Rendered text of each template by its path."""
    options = {"name": release, "namespace": namespace, "kube_version": f"v{kube_version}.0"}
    with Chart.load(CHART) as chart:
        given = None if values is None else json.dumps(values)
        # Chart.render has no argument for Kubernetes' version; the library below it does
        rendered = _native.call_string("helm_render", chart._raw(), given, json.dumps(options))
    found: dict[str, str] = json.loads(rendered)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the objects as YAML. Exit status 1 for values that are refused."""
    parser = argparse.ArgumentParser(prog="python -m tests.deploy.render_chart", description=__doc__)
    parser.add_argument("--values", action="append", type=Path, default=[], help="file of values; later ones win")
    parser.add_argument("--release", default="triplane")
    parser.add_argument("--namespace", default="triplane")
    parser.add_argument("--kube-version", default="1.33", help="minor version of Kubernetes, such as 1.30")
    given = parser.parse_args(arguments)
    values: dict[str, Any] = {}
    for path in given.values:
        values = merged(values, yaml.safe_load(path.read_text()) or {})
    try:
        objects = render(values, given.release, given.namespace, given.kube_version)
    except HelmError as error:
        print(error, file=sys.stderr)
        return 1
    yaml.safe_dump_all(objects, sys.stdout, sort_keys=False, width=200)
    return 0


def merged(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """As Helm merges files of values: maps by key, everything else is replaced."""
    found = dict(below)
    for key, value in above.items():
        old = found.get(key)
        found[key] = merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return found


if __name__ == "__main__":
    sys.exit(main())
