"""A release of the chart in a namespace of its own on a real cluster, operated as its users do: kubectl and GraphQL."""

from __future__ import annotations

import json
import pwd
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import yaml

from resources.placement import PodPlacement
from tests.deploy.render_chart import CHART, merged, render
from tests.kubernetes.cluster.support import (
    BUCKETS,
    KEYS,
    SMALL,
    VOLUME,
    experiments,
    postgres_command,
    s3_server,
    secret,
)
from tests.webserver import LAUNCH, ask

RELEASE = "triplane"
LOCATION = {"repositoryLocationName": "triplane", "repositoryName": "__repository__"}
PATIENCE_S = 900.0
_RUNS = """
query ($filter: RunsFilter) {
  runsOrError(filter: $filter) {
    ... on Runs { results { runId jobName status startTime endTime tags { key value } } }
  }
}"""


@dataclass
class World:
    """A namespace with a release."""

    namespace: str
    image: str
    values: dict[str, Any] = field(default_factory=dict)

    def kubectl(self, *arguments: str, given: str | None = None, check: bool = True, timeout: float = 300) -> str:
        """Run kubectl in the namespace. Returns what it prints."""
        command = ["kubectl", "--namespace", self.namespace, *arguments]
        done = subprocess.run(command, input=given, capture_output=True, text=True, timeout=timeout)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stdout}{done.stderr}"
        return done.stdout if check else done.stdout + done.stderr

    def get(self, kind: str, *selectors: str) -> list[dict[str, Any]]:
        """Objects of a kind, by label selectors."""
        labels = ["--selector", ",".join(selectors)] if selectors else []
        found: list[dict[str, Any]] = json.loads(self.kubectl("get", kind, *labels, "--output", "json"))["items"]
        return found

    def apply(self, objects: list[dict[str, Any]], *options: str) -> str:
        """Create or update objects."""
        return self.kubectl("apply", "--filename", "-", *options, given=yaml.safe_dump_all(objects))

    def create(self, files: list[Path]) -> None:
        """Make the namespace, what a release needs, and the release. files: its experiments."""
        subprocess.run(["kubectl", "create", "namespace", self.namespace], check=True, capture_output=True)
        passwords = {"triplane-postgres": {"password": "p@ss word"}, "triplane-envd": {"key": "k" * 43}}
        secrets = [secret(name, values) for name, values in {"triplane-s3": KEYS, **passwords}.items()]
        self.apply([*secrets, experiments(files), *s3_server(self.image, self.environment, self.keeper)])
        self.roll_out("deployment/s3")
        self.kubectl("label", "nodes", "--all", "--overwrite", "triplane/pool=sandboxes")
        self.apply(self.objects())
        pool = ["steps"] if self.values.get("runs", {}).get("pool") else []
        self.roll_out(*(f"deployment/{RELEASE}-{name}" for name in ("code", "webserver", "daemon", *pool)))
        self.roll_out(f"daemonset/{RELEASE}-envd")

    def roll_out(self, *workloads: str) -> None:
        """Wait until all pods of workloads, as KIND/NAME, are of their newest definition and ready."""
        for workload in workloads:
            self.kubectl("rollout", "status", workload, "--timeout=600s", timeout=620)

    def delete(self) -> None:
        """Delete the namespace and everything in it."""
        self.kubectl("delete", "namespace", self.namespace, "--wait=false", check=False)
        self.kubectl(
            "delete", "persistentvolumes", "--selector", f"{VOLUME}={self.namespace}", "--wait=false", check=False
        )

    @property
    def keeper(self) -> str:
        """Node of the servers whose data would be lost with their pod; the others may be drained."""
        return str(json.loads(self.kubectl("get", "nodes", "--output", "json"))["items"][0]["metadata"]["name"])

    @property
    def steps_are_pods(self) -> bool:
        """Whether each step of a run has a pod of its own."""
        values = merged(yaml.safe_load((CHART / "values.yaml").read_text()), self.values)
        return bool(values["runs"]["executor"] == "k8s")

    @property
    def environment(self) -> dict[str, str]:
        """Variables of the image that is made of a machine's files: its checkout is not installed."""
        return {"PYTHONPATH": "/app:/app/kernels", "HOME": "/tmp"}

    def objects(self) -> list[dict[str, Any]]:
        """The chart's objects."""
        repository, _, tag = self.image.rpartition(":")
        image = {"repository": repository, "tag": tag}
        values = {
            "image": image,
            "runAsUser": 10001,
            "s3": {"endpoint": f"http://s3.{self.namespace}.svc:9000"},
            "postgres": {
                "image": image | {"digest": ""},
                "command": postgres_command(),
                "runAsUser": pwd.getpwnam("postgres").pw_uid,
                "storage": {"ephemeral": True},
                "nodeSelector": {"kubernetes.io/hostname": self.keeper},
                "resources": SMALL,
            },
            "experiments": {"configMap": "experiments"},
            "extraEnv": self.environment,
            "redis": {"image": image, "resources": SMALL},
            **{name: {"resources": SMALL} for name in ("webserver", "daemon", "code")},
            "runs": {"resources": SMALL, "pool": {"resources": PodPlacement(cpu=0.05, memory="2Gi").resources()}},
            # containerd 1.6 has no user namespaces
            "envd": {"image": image, "resources": SMALL, "pool": 2, "privileged": True},
        }
        return render(merged(values, self.values), RELEASE, self.namespace)

    def address(self, service: str, port: int) -> str:
        """URL of a Service, as this machine reaches it."""
        return f"http://{self.kubectl('get', 'service', service, '--output', 'jsonpath={.spec.clusterIP}')}:{port}"

    @property
    def store(self) -> dict[str, str]:
        """Environment of a client of the store on this machine."""
        endpoint = {"AWS_ENDPOINT_URL": self.address("s3", 9000), "AWS_DEFAULT_REGION": "us-east-1"}
        return {**KEYS, **endpoint, "TRIPLANE_STORE": f"s3://{BUCKETS[0]}/store"}

    @property
    def launching(self) -> dict[str, str]:
        """Environment of a launcher on this machine, as the release's own pods have it."""
        return {
            "TRIPLANE_KUBERNETES_NAMESPACE": self.namespace,
            "TRIPLANE_KUBERNETES_IMAGE": self.image,
            "TRIPLANE_KUBERNETES_SERVICE_ACCOUNT": f"{RELEASE}-trainer",
            "TRIPLANE_KUBERNETES_ENV": f"configmap/{RELEASE}-env,secret/triplane-s3",
            "TRIPLANE_KUBERNETES_RELEASE": RELEASE,
        }

    def ask(self, query: str, **variables: Any) -> dict[str, Any]:
        """Data of a GraphQL answer of the web server."""
        return ask(self.address(f"{RELEASE}-webserver", 80), query, **variables)

    def launch(self, job: str, config: dict[str, Any] | None = None, tags: dict[str, str] | None = None) -> str:
        """Launch a job as the launchpad does. Returns the run's id."""
        metadata = {"tags": [{"key": key, "value": value} for key, value in (tags or {}).items()]}
        selector = {**LOCATION, "pipelineName": job}
        params = {"selector": selector, "runConfigData": config or {}, "executionMetadata": metadata, "mode": "default"}
        reply = self.ask(LAUNCH, params=params)["launchRun"]
        assert reply["__typename"] == "LaunchRunSuccess", reply
        found: str = reply["run"]["runId"]
        return found

    def train(self, experiment: str, iterations: int) -> str:
        """Ask for iterations by the job NAME_train, and wait until it has noted the request. Returns its run's id."""
        config = {"iterations": iterations, "from_policy": "live", "reason": "test"}
        asked = self.launch(f"{experiment}_train", {"ops": {f"{experiment}_request": {"config": config}}})

        def noted() -> bool:
            (run,) = [each for each in self.runs(f"{experiment}_train") if each["runId"] == asked]
            assert run["status"] != "FAILURE", f"{run}\n{self.why()}"
            return bool(run["status"] == "SUCCESS")

        self.wait("the request is noted", noted)
        return asked

    def finish(self, experiment: str, iterations: int) -> None:
        """Wait until an experiment has this many iterations in all. Fails with a run that nobody launches again."""

        def finished() -> bool:
            runs = [*self.runs(f"{experiment}_iteration"), *self.runs(f"{experiment}_base")]
            failed = [run for run in runs if run["status"] == "FAILURE" and _given_up(run)]
            assert not failed, f"{failed}\n{self.why()}"
            return self.made(experiment) >= iterations

        self.wait(f"{iterations} iteration(s) of {experiment}", finished)

    def iterate(self, experiment: str, iterations: int) -> None:
        """Ask for further iterations and wait for them."""
        before = self.made(experiment)
        self.train(experiment, iterations)
        self.finish(experiment, before + iterations)

    def made(self, experiment: str) -> int:
        """Number of finished iterations."""
        return len([run for run in self.runs(f"{experiment}_iteration") if run["status"] == "SUCCESS"])

    def runs(self, job: str | None = None) -> list[dict[str, Any]]:
        """Runs, newest first."""
        found: list[dict[str, Any]] = self.ask(_RUNS, filter={"pipelineName": job} if job else {})["runsOrError"][
            "results"
        ]
        return found

    def why(self) -> str:
        """Pods and warnings, for the message of a failed test."""
        return self.kubectl("get", "pods", "--output", "wide") + self.kubectl(
            "get", "events", "--field-selector", "type=Warning", "--sort-by", ".lastTimestamp"
        )

    def wait(self, what: str, done: Callable[[], Any], patience_s: float = PATIENCE_S) -> Any:
        """Wait until `done` returns something true, and return it. The web server may be away meanwhile."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            with suppress(httpx.TransportError):
                found = done()
                if found:
                    return found
            time.sleep(1)
        raise AssertionError(f"{what}: not after {patience_s:g} s\n{self.why()}")


def _given_up(run: dict[str, Any]) -> bool:
    """Whether nobody launches a failed run again. Dagster says so in a tag, which it adds after the status, and takes
    back when the code server returns.
    """
    (will_retry,) = [tag["value"] for tag in run["tags"] if tag["key"] == "dagster/will_retry"] or [None]
    return will_retry != "true" and time.time() - (run["endTime"] or time.time()) > 60
