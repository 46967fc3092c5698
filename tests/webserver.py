"""What tests need of a Dagster web server in a process of its own: to wait for it, and the GraphQL that its pages
use.
"""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import httpx

LAUNCH = """
mutation ($params: ExecutionParams!) {
  launchRun(executionParams: $params) {
    __typename
    ... on LaunchRunSuccess { run { runId } }
    ... on PythonError { message }
    ... on RunConfigValidationInvalid { errors { message } }
  }
}"""
ADD = """
mutation ($name: String!, $key: String!, $where: RepositorySelector!) {
  addDynamicPartition(partitionsDefName: $name, partitionKey: $key, repositorySelector: $where) { __typename }
}"""


def wait_until_up(url: str, child: subprocess.Popen[bytes], log: Path, patience_s: float) -> None:
    """Return when the server that `child` is answers.

    Fails with the end of its log when it ends, or does not within patience_s.
    """
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline and child.poll() is None:
        try:
            httpx.get(f"{url}/server_info", timeout=5).raise_for_status()
            return
        except httpx.HTTPError:
            time.sleep(0.5)
    raise AssertionError(f"the web server did not come up: {log.read_text()[-2000:]}")


def ask(url: str, query: str, **variables: Any) -> dict[str, Any]:
    """The data of a GraphQL answer."""
    reply = httpx.post(f"{url}/graphql", json={"query": query, "variables": variables}, timeout=60).json()
    assert "errors" not in reply, reply["errors"]
    data: dict[str, Any] = reply["data"]
    return data
