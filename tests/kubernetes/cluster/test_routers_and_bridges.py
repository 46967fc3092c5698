"""Routers, Redis and a bridge of a release: requests and episodes go on while the pods behind them die."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from contracts.pb import keda_pb2, keda_pb2_grpc
from tests.dagster.serving import Load
from tests.envd.test_services_tls import certificate
from tests.kubernetes.cluster.faults import kill
from tests.kubernetes.cluster.support import SMALL, secret, volume
from tests.kubernetes.cluster.world import RELEASE, World

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1800)]
PER_SECOND = 10
PATIENCE_S = 300.0
KEY = "k" * 43
ROUTER, REDIS, BRIDGE, SAMPLER = (
    f"{RELEASE}-{name}" for name in ("router-tiny", "redis", "bridge-tiny", "sampler-tiny")
)
EPISODES = 8
"""Of each kind."""
PAUSES = ("started", "stepped")
TRAINER = """
import json, pathlib, sys, time
from inference.bridge.client import Bridge, Sampling

given = json.loads(sys.argv[1])
tasks, tls = given["tasks"], {name: pathlib.Path("/tmp", name) for name in given["tls"]}
for name, file in tls.items():
    file.write_text(given["tls"][name])


def wait(name):
    print(name, flush=True)
    while not pathlib.Path("/tmp", name).exists():
        time.sleep(0.05)


with Bridge(given["address"], key=given["key"], **tls) as bridge:
    episodes = [bridge.start_task(task, seed=seed) for seed, task in enumerate(tasks)]
    episodes += [
        bridge.start([1, 2, 3 + seed], sampling=Sampling(max_tokens=32, seed=seed)) for seed in range(len(tasks))
    ]
    for name in given["pauses"]:
        wait(name)
        for _ in range(4):
            bridge.steps([each for each in episodes if not each.done])
    told = []
    for each in episodes:
        reply = each.turns[-1].reply
        told.append(
            {
                "tokens": each.context().tolist(),
                "logprobs": [turn.logprobs.tolist() for turn in each.turns],
                "calls": [[call.name, call.text] for turn in each.turns if turn.reply for call in turn.reply.results],
                "outcome": reply and [reply.outcome, reply.reward, reply.verdict],
            }
        )
        each.end(aborted=not each.done)
print(json.dumps(told), flush=True)
"""
"""A trainer in a pod, which plays episodes of tasks and of token ids. Argument: JSON with what `play` gives it."""


@pytest.fixture(scope="module")
def serving(world: World) -> World:
    """The release with two samplers, two routers, Redis and a bridge of tiny."""
    one = {"experiment": "tiny", "keySecret": "fleet", "resources": SMALL}
    world.values |= {
        "samplers": [{"experiment": "tiny", "replicas": 2, "resources": SMALL}],
        "redis": {"enabled": True, "existingSecret": "redis"},
        "routers": [{**one, "to": "samplers", "replicas": 2}],
        # a policy that no iteration replaces, and time for starts on a busy machine
        "bridges": [{**one, "policy": "base", "set": ["rollouts.episode_timeout_s=1800"]}],
    }
    world.apply([secret("redis", {"password": "5ac1e7"}), secret("fleet", {"keys": KEY})])
    if not json.loads(world.kubectl("get", "storageclasses", "--output", "json"))["items"]:
        world.apply(volume(world.namespace, f"data-{BRIDGE}-0", world.image, world.keeper))
    world.apply(world.objects())
    if not world.made("tiny"):
        world.iterate("tiny", 1)
    world.roll_out(*(f"deployment/{name}" for name in (SAMPLER, REDIS, ROUTER)), f"statefulset/{BRIDGE}")
    return world


def pods(world: World, name: str) -> list[dict[str, Any]]:
    """Pods of a component that are not being deleted."""
    found = world.get("pods", f"app.kubernetes.io/component={name.removeprefix(f'{RELEASE}-')}")
    return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]


def urls(world: World, name: str, port: int) -> set[str]:
    """URL of each pod of a component."""
    return {f"http://{pod['status']['podIP']}:{port}" for pod in pods(world, name)}


def fleets(world: World) -> list[dict[str, Any]]:
    """GET /fleet of each router."""
    return [httpx.get(f"{url}/fleet", timeout=30).json() for url in urls(world, ROUTER, 8080)]


def states(world: World) -> list[dict[str, str]]:
    """State of each replica by its URL, as each router sees it."""
    return [{each["url"]: each["state"] for each in fleet["replicas"]} for fleet in fleets(world)]


def in_router(world: World, *command: str) -> str:
    """What a command of `triplane fleet` prints in the pod of a router."""
    return world.kubectl("exec", f"deployment/{ROUTER}", "--", "triplane", "fleet", *command)


def kill_first(world: World, name: str) -> None:
    """Kill the processes of a component's first pod, and wait until the kubelet has started them again."""

    def restarts() -> Counter[str]:
        statuses = {pod["metadata"]["name"]: pod["status"]["containerStatuses"][0] for pod in found()}
        return Counter({pod: status["restartCount"] for pod, status in statuses.items()})

    found = partial(pods, world, name)
    before = restarts()
    kill(found()[0])
    world.wait(f"{name} is started again", lambda: restarts() - before, PATIENCE_S)


def under_load(world: World, harm: Callable[[], None]) -> Load:
    """Do harm while requests come through the routers' Service."""
    load = Load(f"{world.address(ROUTER, 8080)}/v1", PER_SECOND)

    async def run() -> None:
        async with load.running():
            await asyncio.sleep(2)
            await asyncio.to_thread(harm)
            await asyncio.sleep(5)

    asyncio.run(run())
    assert len(load.replies) > 5 * PER_SECOND
    return load


def test_a_request_through_the_routers_reaches_each_sampler(serving: World) -> None:
    samplers = urls(serving, SAMPLER, 8000)
    assert len(samplers) == 2
    serving.wait("the routers know both samplers", lambda: states(serving) == [dict.fromkeys(samplers, "serving")] * 2)
    url, asked = f"{serving.address(ROUTER, 8080)}/v1/completions", set()
    for number in range(40):
        body = {"prompt": [number + 1] * 64, "max_tokens": 1}
        reply = httpx.post(url, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        asked.add(reply.headers["x-replica"])
    assert asked == samplers
    assert all(url in in_router(serving, "list", "--json") for url in samplers)


def test_a_drain_at_one_router_is_known_to_the_other(serving: World) -> None:
    drained, other = sorted(urls(serving, SAMPLER, 8000))
    in_router(serving, "drain", drained, "--wait")
    try:
        assert states(serving) == [{drained: "draining", other: "serving"}] * 2
    finally:
        in_router(serving, "drain", drained, "--undo")
    serving.wait("the drain is undone", lambda: all("draining" not in each.values() for each in states(serving)), 30)


def test_no_request_fails_while_redis_is_dead(serving: World) -> None:
    def registries() -> list[str]:
        return [f"{fleet['registry']} {fleet['routers']}" for fleet in fleets(serving)]

    def harm() -> None:
        kill_first(serving, REDIS)
        serving.kubectl("scale", f"deployment/{REDIS}", "--replicas=0")
        serving.wait("Redis is missed", lambda: all("away" in each for each in registries()), 60)
        serving.kubectl("scale", f"deployment/{REDIS}", "--replicas=1")
        serving.wait("the routers share again", lambda: registries() == ["well 2"] * 2, PATIENCE_S)

    load = under_load(serving, harm)
    assert not load.failures, Counter(load.failures).most_common(5)


def test_no_request_fails_while_a_sampler_is_killed_and_routers_are_replaced(serving: World) -> None:
    def harm() -> None:
        kill_first(serving, SAMPLER)
        serving.roll_out(f"deployment/{SAMPLER}")
        serving.kubectl("rollout", "restart", f"deployment/{ROUTER}")
        serving.roll_out(f"deployment/{ROUTER}")

    load = under_load(serving, harm)
    assert not load.failures, Counter(load.failures).most_common(5)


def test_a_killed_router_fails_no_more_than_its_requests_in_flight(serving: World) -> None:
    load = under_load(serving, lambda: kill_first(serving, ROUTER))
    assert len(load.failures) < 3 * PER_SECOND, Counter(load.failures).most_common(5)


def test_a_request_that_finds_no_sampler_is_told_to_the_scaler(serving: World) -> None:
    url = f"{serving.address(ROUTER, 8080)}/v1/completions"
    body = {"prompt": [1, 2, 3], "max_tokens": 1}
    serving.kubectl("scale", f"deployment/{SAMPLER}", "--replicas=0")
    try:
        serving.wait("no sampler is left", lambda: not urls(serving, SAMPLER, 8000), PATIENCE_S)
        serving.wait("no router routes", lambda: httpx.post(url, json=body, timeout=60).status_code == 503, PATIENCE_S)
        address = serving.address(ROUTER, 6000).removeprefix("http://")
        with grpc.insecure_channel(address) as channel:
            keda: Any = keda_pb2_grpc.ExternalScalerStub(channel)  # type: ignore[no-untyped-call]
            assert keda.IsActive(keda_pb2.ScaledObjectRef(), timeout=30).result
    finally:
        serving.kubectl("scale", f"deployment/{SAMPLER}", "--replicas=2")
    serving.wait("a sampler replies", lambda: httpx.post(url, json=body, timeout=60).status_code == 200, PATIENCE_S)
    serving.roll_out(f"deployment/{SAMPLER}")


def play(
    world: World, name: str, tasks: list[str], *harm: Callable[[], object], tls: Mapping[str, str] | None = None
) -> list[dict[str, Any]]:
    """What a trainer in a pod of its own reports.

    harm: done while the trainer steps: first after the starts, then after the first steps. tls: texts of its files.
    """
    address = f"{BRIDGE}.{world.namespace}.svc:7080"
    environment = [f"--env={variable}={value}" for variable, value in world.environment.items()]
    given = json.dumps({"address": address, "key": KEY, "tls": tls or {}, "tasks": tasks, "pauses": PAUSES})
    command = ["python", "-c", TRAINER, given]
    world.kubectl("run", name, f"--image={world.image}", "--restart=Never", *environment, "--command", "--", *command)

    def log() -> list[str]:
        (pod,) = [each for each in world.get("pods") if each["metadata"]["name"] == name]
        said = world.kubectl("logs", name, check=False)
        assert pod["status"]["phase"] != "Failed", said
        return said.splitlines()

    def paused(pause: str) -> bool:
        return pause in log()

    try:
        for pause, each in zip(PAUSES, harm, strict=True):
            world.wait(f"{name} pauses", partial(paused, pause), PATIENCE_S)
            world.kubectl("exec", name, "--", "touch", f"/tmp/{pause}")
            each()
        said = world.wait(f"{name} ends", lambda: [line for line in log() if line.startswith("[")], PATIENCE_S)
        return list(json.loads(said[0]))
    finally:
        world.kubectl("delete", "pod", name, "--grace-period=0", "--force", check=False)


def nothing() -> None:
    """No harm."""


@pytest.fixture(scope="module")
def undisturbed(serving: World) -> tuple[list[str], list[dict[str, Any]]]:
    """Tasks, and what a trainer reports of them when nothing dies."""
    shown = ("triplane", "tasks", "list", "-e", "tiny", "-n", str(EPISODES), "--json")
    rows = json.loads(serving.kubectl("exec", f"deployment/{RELEASE}-code", "--", *shown))
    tasks = [each["task_id"] for each in rows]
    found = play(serving, "undisturbed", tasks, nothing, nothing)
    assert len(found) == 2 * EPISODES
    assert all(each["outcome"][0] not in ("aborted", "infra_error") for each in found[:EPISODES])
    return tasks, found


def test_episodes_outlive_a_killed_bridge_and_a_deleted_pod(
    serving: World, undisturbed: tuple[list[str], list[dict[str, Any]]]
) -> None:
    tasks, expected = undisturbed

    def delete() -> None:
        serving.kubectl("delete", "pod", f"{BRIDGE}-0", "--grace-period=0", "--force")

    assert play(serving, "disturbed", tasks, lambda: kill_first(serving, BRIDGE), delete) == expected


def test_episodes_over_tls_outlive_an_update(
    serving: World, undisturbed: tuple[list[str], list[dict[str, Any]]], tmp_path: Path
) -> None:
    tasks, expected = undisturbed
    authority = certificate(tmp_path, "ca", None)
    certificate(tmp_path, "tls", authority, f"{BRIDGE}.{serving.namespace}.svc")
    certificate(tmp_path, "trainer", authority)
    text = {file.name: file.read_text() for file in tmp_path.iterdir()}
    serving.apply([secret("tls", {name: text[name] for name in ("tls.crt", "tls.key", "ca.crt")})])
    plain = serving.values["bridges"]
    serving.values["bridges"] = [plain[0] | {"tlsSecret": "tls", "clientCertificates": True}]
    serving.apply(serving.objects())
    serving.roll_out(f"statefulset/{BRIDGE}")
    tls = {"tls_ca": text["ca.crt"], "tls_cert": text["trainer.crt"], "tls_key": text["trainer.key"]}

    def restart() -> None:
        serving.kubectl("rollout", "restart", f"statefulset/{BRIDGE}")

    try:
        assert play(serving, "secured", tasks, nothing, restart, tls=tls) == expected
    finally:
        serving.values["bridges"] = plain
        serving.apply(serving.objects())


def test_a_bridge_waits_for_its_first_policy_and_wrong_values_can_be_corrected(serving: World) -> None:
    others, name = serving.values["bridges"], f"{RELEASE}-bridge-waiting"
    one = {"experiment": "waiting", "keySecret": "fleet", "resources": SMALL, "journal": {"ephemeral": True}}

    def install(**values: Any) -> None:
        serving.values["bridges"] = [*others, one | values]
        serving.apply(serving.objects())

    def restarts() -> int:
        statuses = [each for pod in pods(serving, name) for each in pod["status"].get("containerStatuses", [])]
        return sum(each["restartCount"] for each in statuses)

    try:
        install(set=["engine.kind=nonsense"])
        serving.wait("it ends with an error", restarts, PATIENCE_S)
        install()
        serving.wait(
            "it waits", lambda: serving.kubectl("logs", f"{name}-0", check=False).startswith("waiting: "), PATIENCE_S
        )
        assert not restarts()
    finally:
        serving.values["bridges"] = others
        serving.kubectl("delete", "statefulset,service", name)
