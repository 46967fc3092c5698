"""Routers, bridges, Redis and the autoscaler of the Helm chart: their commands run, their objects fit each other."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
import typer

from contracts.addresses import parse_addresses
from contracts.pb import keda_pb2, keda_pb2_grpc
from contracts.rpc.listening import Listening
from inference.__main__ import app as inference
from inference.fleet.scaler import TARGETS
from inference.server.draining import FINISH_S
from tests.deploy.chart_pods import FULL, Object, templates
from tests.deploy.compose import services
from tests.deploy.render_chart import render
from tests.http_client import HTTP
from tests.inference.test_fleet_routing import hooked, process
from tests.needs import require
from tests.ports import free_port
from tests.vllm.fleet_servers import environment, until
from triplane_dagster.cli.app import app as triplane

NAME, INSTANCE = "app.kubernetes.io/name", "app.kubernetes.io/instance"
COMPONENT = "app.kubernetes.io/component"


@cache
def objects() -> list[Object]:
    return render(FULL, "night", "rl")


def found(kind: str, name: str, given: list[Object] | None = None) -> Object:
    """One object of the release."""
    (match,) = [each for each in given or objects() if (each["kind"], each["metadata"]["name"]) == (kind, name)]
    return match


def container(name: str) -> Object:
    """The only container of a pod of the release."""
    (only,) = dict(templates(objects()))[name]["spec"]["containers"]
    return dict(only)


def parsed(command: list[str]) -> dict[str, Any]:
    """Options of a command of ours, read by its own parser."""
    program, words = (
        (inference, command[3:]) if command[:3] == ["python", "-m", "inference"] else (triplane, command[1:])
    )
    group = typer.main.get_command(program)
    return dict(group.commands[words[0]].make_context(words[0], words[1:]).params)  # type: ignore[attr-defined]


def test_commands_accept_the_arguments_of_the_chart() -> None:
    seen = set()
    for _, template in templates(objects()):
        for each in [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]:
            command = each.get("command", [""])
            if command[0] == "triplane" or command[:3] == ["python", "-m", "inference"]:
                parsed(command)
                seen.add(each["name"])
    assert seen == {"router", "bridge", "sampler", "weights"}


def test_nothing_of_it_is_deployed_unless_the_values_say_so() -> None:
    others = [each for each in render() if each["kind"] != "ServiceAccount"]
    assert not [
        each["metadata"]["name"] for each in others if re.search("router|bridge|redis", each["metadata"]["name"])
    ]


def test_a_router_reaches_the_replicas_of_its_experiment_by_their_own_addresses() -> None:
    for name, service, more in (
        ("quickstart", "night-sampler-quickstart-replicas", []),
        ("qwen3-4b", "night-engine-qwen3-4b", ["http://10.0.0.7:8000"]),
    ):
        given = parsed(container(f"night-router-{name}")["command"])
        assert given["replica"] == [f"dns:{service}.rl.svc:8000", *more] and parse_addresses(",".join(given["replica"]))
        headless = found("Service", service)["spec"]
        assert headless["clusterIP"] == "None" and headless["ports"][0]["port"] == 8000
    (engine,) = dict(templates(objects()))["night-engine-qwen3-4b"]["spec"]["containers"]
    assert {"name": "events", "containerPort": given["events_port"]} in engine["ports"]
    assert (given["timeout"], given["metrics"], given["fleet"]) == (60, True, "rl.night.qwen3-4b")


def test_a_router_without_a_well_server_stays_in_its_service() -> None:
    each = container("night-router-quickstart")
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert each[probe]["httpGet"] == {"path": "/fleet", "port": "http"}


def test_pods_have_time_to_drain() -> None:
    for name in ("router-quickstart", "sampler-quickstart"):
        spec = dict(templates(objects()))[f"night-{name}"]["spec"]
        assert spec["terminationGracePeriodSeconds"] > parsed(spec["containers"][0]["command"])["drain"] + FINISH_S
    for seconds in (0, 300):
        given = render({"bridges": [{"experiment": "a", "keySecret": "k", "drainSeconds": seconds}]})
        spec = dict(templates(given))["triplane-bridge-a"]["spec"]
        assert parsed(spec["containers"][0]["command"])["drain"] == seconds
        assert spec["terminationGracePeriodSeconds"] == seconds + 30


def test_a_disruption_budget_selects_the_pods_of_its_object() -> None:
    labels = {name: each["metadata"]["labels"] for name, each in templates(objects())}
    budgets = [each for each in objects() if each["kind"] == "PodDisruptionBudget"]
    for budget in budgets:
        chosen = budget["spec"]["selector"]["matchLabels"].items()
        assert [name for name, each in labels.items() if chosen <= each.items()] == [budget["metadata"]["name"]]
    assert {"night-router-quickstart", "night-router-qwen3-4b"} <= {each["metadata"]["name"] for each in budgets}


def test_a_bridge_asks_for_keys_and_keeps_its_journal_on_a_volume() -> None:
    plain, secured = (container(f"night-bridge-{name}") for name in ("quickstart", "my-night"))
    for each in (plain, secured):
        given = parsed(each["command"])
        files = {name: given[name] for name in ("tls_cert", "tls_key", "tls_client_ca", "key_file", "insecure")}
        Listening(given["listen"], **files).check()
        mounts = {mount["mountPath"]: mount["name"] for mount in each["volumeMounts"]}
        assert mounts[str(given["journal"])] == "data"
        assert all(str(file.parent) in mounts for file in files.values() if isinstance(file, Path))
        assert {"configMapRef": {"name": "night-env"}} in each["envFrom"]
    assert plain["readinessProbe"]["grpc"] == {"port": 7080} and parsed(plain["command"])["insecure"]
    # the kubelet speaks gRPC without TLS only
    assert all(secured[probe]["tcpSocket"] for probe in ("startupProbe", "readinessProbe", "livenessProbe"))
    assert given["overrides"] and given["policy"] == "base" and given["policy_file"].parent in map(Path, mounts)
    claims = found("StatefulSet", "night-bridge-quickstart")["spec"]["volumeClaimTemplates"]
    assert [each["metadata"]["name"] for each in claims] == ["data"]
    assert "volumeClaimTemplates" not in found("StatefulSet", "night-bridge-my-night")["spec"]


def test_a_bridge_waits_for_its_policy_within_its_time_to_start_and_an_update_replaces_one_that_is_not_ready() -> None:
    for name in ("quickstart", "my-night"):
        each = container(f"night-bridge-{name}")
        probe = each["startupProbe"]
        assert 600 < parsed(each["command"])["wait"] < probe["periodSeconds"] * probe["failureThreshold"]
        assert found("StatefulSet", f"night-bridge-{name}")["spec"]["podManagementPolicy"] == "Parallel"


def test_routers_take_the_address_of_redis_from_a_secret() -> None:
    inside = {each["name"]: each for each in container("night-router-quickstart")["env"]}
    assert inside["TRIPLANE_REDIS"]["value"] == "redis://:$(REDIS_PASSWORD)@night-redis:6379/0"
    assert found("Service", "night-redis")["spec"]["ports"][0]["port"] == 6379
    outside = render({**FULL, "redis": {"existingSecret": "external"}}, "night", "rl")
    assert "night-redis" not in dict(templates(outside))
    (router,) = dict(templates(outside))["night-router-quickstart"]["spec"]["containers"]
    given = {each["name"]: each for each in router["env"]}
    assert given["TRIPLANE_REDIS"]["valueFrom"] == {"secretKeyRef": {"name": "external", "key": "url"}}


def test_keda_scales_what_the_router_routes_to() -> None:
    routers = [
        {"experiment": "quickstart", "to": "samplers", "autoscale": {"max": 8, "tokensPerReplica": 5_000_000}},
        {"experiment": "other", "to": "samplers", "autoscale": {"min": 1, "max": 4, "cooldownSeconds": 0}},
    ]
    samplers = [*FULL["samplers"], {"experiment": "other"}]
    given = render({**FULL, "samplers": samplers, "routers": routers}, "night", "rl")
    targets = {key for key, _ in TARGETS.values()}
    for name, bounds in (("quickstart", (0, 8, 300)), ("other", (1, 4, 0))):
        spec = found("ScaledObject", f"night-router-{name}", given)["spec"]
        target = f"night-sampler-{name}"
        assert spec["scaleTargetRef"] == {"apiVersion": "apps/v1", "kind": "Deployment", "name": target}
        assert "replicas" not in found("Deployment", target, given)["spec"], "an upgrade would undo the scaling"
        assert tuple(spec[f"{each}"] for each in ("minReplicaCount", "maxReplicaCount", "cooldownPeriod")) == bounds
        (trigger,) = spec["triggers"]
        assert trigger["type"] == "external-push" and trigger["metadata"].keys() == {"scalerAddress", *targets}
        service, _, port = trigger["metadata"]["scalerAddress"].partition(".rl.svc:")
        assert int(port) in [each["port"] for each in found("Service", service, given)["spec"]["ports"]]
    scaled = found("ScaledObject", "night-router-quickstart", given)["spec"]["triggers"][0]["metadata"]
    assert scaled["tokensPerReplica"] == "5000000"
    assert found("Deployment", "night-sampler-my-night", given)["spec"]["replicas"] == 1


def test_least_and_greatest_numbers_reach_the_pods() -> None:
    engine = {"experiment": "a", "replicas": 0, "gpus": 0, "image": "v:1", "model": "/m"}
    bridge = {"experiment": "a", "keySecret": "k", "maxEpisodes": 1_000_000}
    made = render({"engines": [engine], "bridges": [bridge]}, "night", "rl")
    assert found("StatefulSet", "night-engine-a", made)["spec"]["replicas"] == 0
    pods = {name: each["spec"]["containers"][0] for name, each in templates(made)}
    assert pods["night-engine-a"]["resources"]["limits"]["nvidia.com/gpu"] == "0"
    assert parsed(pods["night-bridge-a"]["command"])["max_episodes"] == 1_000_000


def pod(**labels: str) -> dict[str, str]:
    return {
        NAME: "triplane",
        INSTANCE: "night",
        **{key.replace("role", "triplane/role"): labels[key] for key in labels},
    }


def may_connect(
    labels: Mapping[str, str], namespace: str, name: str, port: int, given: list[Object] | None = None
) -> bool:
    """Whether the policies let a pod with these labels, in a namespace, connect to the pods of an object."""
    target = dict(templates(objects()))[name]["metadata"]["labels"]
    return any(
        {"port": port} in rule["ports"] and any(matches(peer, labels, namespace) for peer in rule["from"])
        for policy in (each["spec"] for each in given or objects() if each["kind"] == "NetworkPolicy")
        if policy["podSelector"]["matchLabels"].items() <= target.items()
        for rule in policy.get("ingress", [])
        if "ports" in rule and "from" in rule
    )


def matches(peer: Object, labels: Mapping[str, str], namespace: str) -> bool:
    if "namespaceSelector" in peer:
        return bool(peer["namespaceSelector"]["matchLabels"] == {"kubernetes.io/metadata.name": namespace})
    selector = peer["podSelector"]
    wanted = selector.get("matchLabels", {}).items() <= labels.items()
    for each in selector.get("matchExpressions", []):
        wanted &= (labels.get(each["key"]) in each["values"]) == (each["operator"] == "In")
    return bool(wanted) and namespace == "rl"


ROUTER, BRIDGE = pod(role="router"), pod(role="bridge")
RUN, SAMPLER = {**pod(), COMPONENT: "run_worker"}, {**pod(role="sampler"), COMPONENT: "sampler-quickstart"}


@pytest.mark.parametrize(
    ("labels", "name", "ports"),
    [
        (ROUTER, "night-sampler-quickstart", {8000}),
        (ROUTER, "night-engine-qwen3-4b", {8000, 5557, 5558}),
        (ROUTER, "night-redis", {6379}),
        (ROUTER, "night-envd", set()),
        (BRIDGE, "night-sampler-quickstart", {8000}),
        (BRIDGE, "night-engine-qwen3-4b", {8000, 5557, 5558, 7500}),
        (BRIDGE, "night-router-quickstart", {8080}),
        (BRIDGE, "night-redis", {6379}),
        (BRIDGE, "night-envd", {7400}),
        (RUN, "night-router-quickstart", {8080}),
        (RUN, "night-redis", {6379}),
        (SAMPLER, "night-redis", set()),
        (SAMPLER, "night-engine-qwen3-4b", set()),
        ({"app": "trainer"}, "night-bridge-quickstart", {7080}),
        ({"app": "trainer"}, "night-router-quickstart", {8080}),
        ({"app": "trainer"}, "night-redis", set()),
    ],
)
def test_policies_open_the_ports_that_a_pod_needs(labels: dict[str, str], name: str, ports: set[int]) -> None:
    asked = {8000, 5557, 5558, 7500, 8080, 6000, 7080, 7400, 6379}
    assert {port for port in asked if may_connect(labels, "rl", name, port)} == ports
    assert not [port for port in asked if may_connect(labels, "another", name, port)]


def test_only_keda_may_ask_the_scaler() -> None:
    assert may_connect({}, "keda", "night-router-quickstart", 6000)
    assert not may_connect({}, "keda", "night-router-quickstart", 8080)


def test_who_is_named_may_connect_and_the_namespace_no_more() -> None:
    outside = [{"namespaceSelector": {"matchLabels": {"team": "a"}}}]
    named = {f"{name}From": outside for name in ("routers", "bridges", "scaler", "metrics", "samplers")}
    given = render({**FULL, "networkPolicies": named}, "night", "rl")
    for name, port in (("router", 8080), ("bridge", 7080), ("sampler", 8000)):
        target = f"night-{name}-quickstart", port, given
        peers = [
            peer for rule in found("NetworkPolicy", f"night-{name}s", given)["spec"]["ingress"] for peer in rule["from"]
        ]
        assert outside[0] in peers and not may_connect({"app": "trainer"}, "rl", *target)
        assert may_connect(BRIDGE, "rl", *target) is (name != "bridge")
        assert may_connect(ROUTER, "rl", *target) is (name == "sampler")


def test_compose_and_the_chart_start_the_same_servers() -> None:
    compose = services({})
    for service, name, apart in (
        ("router", "night-router-quickstart", {"--redis"}),  # of the chart, it is a variable
        ("bridge", "night-bridge-quickstart", set()),
        ("redis", "night-redis", {"--protected-mode"}),  # of the chart, it has a password
    ):
        assert options(compose[service].command) - options(container(name)["command"]) == apart, service
    assert compose["redis"].definition["image"] == container("night-redis")["image"]


def options(command: list[str]) -> set[str]:
    return {word.split("=")[0] for word in command if word.startswith("--")}


class Pod:
    """A container of the chart as a process of this machine."""

    def __init__(self, name: str, secrets: Mapping[str, Mapping[str, str]], here: Mapping[str, str]) -> None:
        """secrets: name -> key -> value. here: text of the container's command and environment -> this machine's."""
        self.spec, self.here = container(name), here
        self.variables: dict[str, str] = {}
        for each in self.spec["env"]:
            source = each.get("valueFrom", {}).get("secretKeyRef")
            self.variables[each["name"]] = (
                secrets[source["name"]][source["key"]] if source else self.text(each["value"])
            )
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        self.environment = environment(**self.variables, PATH=path)
        self.process: subprocess.Popen[bytes] | None = None

    def text(self, value: str) -> str:
        """`value` with variables expanded as the kubelet does."""
        for inside, outside in self.here.items():
            value = value.replace(inside, outside)
        return re.sub(r"\$\((\w+)\)", lambda name: self.variables[name[1]], value)

    def passes(self, probe: str, **more: str) -> bool:
        """Whether a probe by a command passes."""
        command = [self.text(each) for each in self.spec[probe]["exec"]["command"]]
        return (
            subprocess.run(command, env={**self.environment, **more}, capture_output=True, timeout=30).returncode == 0
        )

    @contextmanager
    def running(self) -> Iterator[None]:
        self.process = subprocess.Popen([self.text(each) for each in self.spec["command"]], env=self.environment)
        try:
            yield
        finally:
            self.process.kill()
            self.process.wait()


@pytest.mark.slow
def test_the_routers_of_a_release_share_a_fleet_that_wakes_on_demand_and_ends_cleanly(tmp_path: Path) -> None:
    require("redis-server")
    (tmp_path / "keys").write_text("the key of the fleet\n")
    redis, scaler = str(free_port()), str(free_port())
    with ExitStack() as stack:
        hook = stack.enter_context(hooked())
        secrets = {
            "triplane-redis": {"password": "5ac1e7"},
            "triplane-webhook": {"url": f"{hook.url}/told"},
        }
        store = Pod("night-redis", secrets, {"6379": redis})
        stack.enter_context(store.running())
        until(lambda: store.passes("readinessProbe"))
        assert not store.passes("readinessProbe", REDISCLI_AUTH="wrong")
        urls, routers = [], []
        for number in range(2):
            port = str(free_port())
            here = {
                "0.0.0.0:6000": f"127.0.0.1:{scaler if number == 0 else free_port()}",
                "0.0.0.0:8080": f"127.0.0.1:{port}",
                "night-redis:6379": f"127.0.0.1:{redis}",
                "dns:night-sampler-quickstart-replicas.rl.svc:8000": "dns:no-pod-yet.invalid:8000",
                "/var/run/triplane-fleet": str(tmp_path),
            }
            routers.append(Pod("night-router-quickstart", secrets, here))
            stack.enter_context(routers[-1].running())
            urls.append(f"http://127.0.0.1:{port}")
        path = routers[0].spec["readinessProbe"]["httpGet"]["path"]
        until(lambda: all(answers(f"{url}{path}") for url in urls))
        channel = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{scaler}"))
        keda: Any = keda_pb2_grpc.ExternalScalerStub(channel)
        trigger = keda_pb2.ScaledObjectRef(name="night", namespace="rl", scalerMetadata=metadata())
        targets = keda.GetMetricSpec(trigger, timeout=30).metricSpecs
        assert [each.targetSizeFloat for each in targets] == [2500.0, 8.0]
        assert not keda.IsActive(trigger, timeout=30).result
        body = {"token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 1}}
        assert HTTP.post(f"{urls[1]}/inference/v1/generate", json=body, timeout=60).status_code == 503
        until(lambda: keda.IsActive(trigger, timeout=30).result)  # the other router tells through Redis
        key = {"TRIPLANE_FLEET_KEY_FILE": str(tmp_path / "keys")}
        stack.enter_context(process("join", "--replica", hook.url, "--router", urls[0], **key))
        until(lambda: HTTP.get(f"{urls[1]}/ready", timeout=60).is_success)
        reply = HTTP.post(f"{urls[1]}/inference/v1/generate", json=body, timeout=60)
        assert reply.is_success and reply.headers["x-replica"] == hook.url
        assert HTTP.get(f"{urls[1]}/fleet", timeout=60).json()["routers"] == 2
        drain = ["triplane", "fleet", "drain", hook.url, "--wait", "--router", urls[0]]
        done = subprocess.run(drain, env=routers[0].environment, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and "nothing is left" in done.stdout, done.stderr
        assert "route_requests_total" in HTTP.get(f"{urls[1]}/metrics", timeout=60).text
        until(lambda: ("joined", "rl.night.quickstart") in [(each["event"], each["fleet"]) for each in hook.told])
        for each in routers:
            assert each.process is not None
            each.process.send_signal(signal.SIGTERM)
        assert [each.process.wait(90) for each in routers if each.process] == [0, 0]


def metadata() -> dict[str, str]:
    """What KEDA sends of the trigger."""
    router = {**FULL["routers"][0], "autoscale": {"max": 2, "tokensPerReplica": 2500}}
    spec = found("ScaledObject", "night-router-quickstart", render({**FULL, "routers": [router]}, "night", "rl"))[
        "spec"
    ]
    return dict(spec["triggers"][0]["metadata"])


def answers(url: str) -> bool:
    try:
        return HTTP.get(url, timeout=5).is_success
    except httpx.TransportError:
        return False
