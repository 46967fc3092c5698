"""The cluster of $KUBECONFIG, and a release on it. docs/kubernetes.md tells how to run this suite."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kubernetes.cluster.world import World

IMAGE = "TRIPLANE_TEST_IMAGE"
"""Image of Triplane that the cluster has, with moto and Debian's PostgreSQL, as NAME:VERSION."""
EXECUTOR = "TRIPLANE_TEST_EXECUTOR"
"""Executor of the release's runs; default: that of the chart."""
POOL = "TRIPLANE_TEST_POOL"
"""Pods of the step pool; default: none."""
EXPERIMENTS = Path(__file__).with_name("experiments")
QUICKSTART = Path(__file__).parents[3] / "experiments" / "quickstart.yaml"
TINY = EXPERIMENTS / "tiny.yaml"


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    if not os.environ.get("KUBECONFIG") or not os.environ.get(IMAGE) or shutil.which("kubectl") is None:
        pytest.skip(f"needs kubectl, $KUBECONFIG and ${IMAGE}: see docs/kubernetes.md")
    kept = os.environ.get("TRIPLANE_TEST_NAMESPACE")
    runs: dict[str, Any] = {"executor": os.environ[EXECUTOR]} if EXECUTOR in os.environ else {}
    if pool := int(os.environ.get(POOL, "0")):
        runs |= {"executor": "k8s", "pool": {"replicas": pool}}
    made = World(kept or f"triplane-{secrets.token_hex(3)}", os.environ[IMAGE], {"runs": runs})
    if kept is None or "not found" in made.kubectl("get", "namespace", kept, check=False):
        made.create([*sorted(EXPERIMENTS.glob("*.yaml")), QUICKSTART])
    yield made
    if kept is None:
        made.delete()
