"""Values of the Helm chart: each is explained, and a wrong one is refused by its path."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import kubernetes_validate
import pytest
import yaml
from helm_python import HelmError

from tests.deploy.render_chart import CHART, main, render

MOST = {"min": 3, "max": 2}
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"bogus": 1}, "bogus"),
    ({"image": {"tags": "1"}}, "tags"),
    ({"image": {"tag": 1.5}}, "/image/tag"),
    ({"image": {"tag": "latest"}}, "latest"),
    ({"image": {"digest": "sha256:12"}}, "/image/digest"),
    ({"image": {"pullPolicy": "Sometimes"}}, "/image/pullPolicy"),
    ({"imagePullSecrets": "registry"}, "/imagePullSecrets"),
    ({"runAsUser": 0}, "/runAsUser"),
    ({"store": {"url": "/data/store"}}, "/store/url"),
    ({"store": {"logsBucket": "s3://logs"}}, "/store/logsBucket"),
    ({"s3": {"endpoint": "s3:7070"}}, "/s3/endpoint"),
    ({"s3": {"server": {"enabled": 1}}}, "/s3/server/enabled"),
    ({"s3": {"accessKey": "AKIA"}}, "accessKey"),
    ({"postgres": {"port": "5432"}}, "/postgres/port"),
    ({"postgres": {"password": "secret"}}, "password"),
    ({"postgres": {"storage": {"size": "20G"}}}, "/postgres/storage/size"),
    ({"postgres": {"enabled": False}}, "postgres.host"),
    ({"cache": {"gigabytes": -1}}, "/cache/gigabytes"),
    ({"extraEnv": {"1X": "y"}}, "1X"),
    ({"extraEnv": {"THREADS": 1}}, "/extraEnv/THREADS"),
    ({"webserver": {"serviceType": "Ingress"}}, "/webserver/serviceType"),
    ({"daemon": {"replicas": 2}}, "replicas"),
    ({"code": {"resources": {"requests": {"cpu": "many"}}}}, "/code/resources/requests/cpu"),
    ({"runs": {"executor": "k9s"}}, "/runs/executor"),
    ({"runs": {"pool": {"replicas": 1}}}, "runs.pool.replicas"),
    ({"runs": {"pool": {"replicas": -1}}}, "/runs/pool/replicas"),
    ({"runs": {"ttlSeconds": "1h"}}, "/runs/ttlSeconds"),
    ({"runs": {"tolerations": [{"key": "a", "effect": "Never"}]}}, "/runs/tolerations/0/effect"),
    ({"trainer": {"launcher": "slurm"}}, "/trainer/launcher"),
    ({"trainer": {"image": {"tag": "2"}}}, "trainer.image: give repository"),
    ({"envd": {"backend": "plain"}}, "/envd/backend"),
    ({"envd": {"backend": "namespaces,qemu"}}, "/envd/backend"),
    ({"envd": {"backend": "pods"}}, "extraEnv.TRIPLANE_ENVD_PODS_IMAGE"),
    ({"envd": {"enabled": False}}, "envd.address"),
    ({"envd": {"privileged": "yes"}}, "/envd/privileged"),
    ({"envd": {"nodeSelector": {"pool": True}}}, "/envd/nodeSelector/pool"),
    ({"samplers": [{"replicas": 1}]}, "/samplers/0"),
    ({"samplers": [{"experiment": "Night"}]}, "/samplers/0/experiment"),
    ({"engines": [{"experiment": "a", "replicas": 1, "image": "v:1"}]}, "give first"),
    ({"engines": [{"experiment": "a", "replicas": 1}]}, "/engines/0"),
    ({"engines": [{"experiment": "a", "replicas": 1, "image": "vllm"}]}, "/engines/0/image"),
    ({"engines": [{"experiment": "a", "replicas": 1, "image": "vllm:latest", "model": "/m"}]}, "latest"),
    ({"engines": [{"experiment": "a", "replicas": 1, "image": "v:1", "gpuResource": "gpu"}]}, "/engines/0/gpuResource"),
    ({"samplers": [{"experiment": "a_b"}, {"experiment": "a-b"}]}, "samplers: a-b: give an experiment one entry"),
    ({"routers": [{"experiment": "a"}]}, "routers: a: give to"),
    ({"routers": [{"to": "samplers"}]}, "/routers/0"),
    ({"routers": [{"experiment": "a", "to": "envd"}]}, "/routers/0/to"),
    ({"routers": [{"experiment": "a", "to": "samplers"}]}, "routers: a: to: samplers has no entry"),
    ({"routers": [{"experiment": "a", "servers": ["10.0.0.7"]}]}, "/routers/0/servers/0"),
    ({"routers": [{"experiment": "a", "servers": ["http://b:1,http://c:1"]}]}, "/routers/0/servers/0"),
    ({"routers": [{"experiment": "a", "keySecret": "k", "replicas": 2}]}, "routers: a: replicas: several routers"),
    ({"routers": [{"experiment": "a", "keySecret": "k", "autoscale": {"max": 2}}]}, "routers: a: autoscale: give to"),
    ({"routers": [{"experiment": "a", "keySecret": "k", "autoscale": {"min": 1}}]}, "/routers/0/autoscale"),
    (
        {"samplers": [{"experiment": "a"}], "routers": [{"experiment": "a", "to": "samplers", "autoscale": MOST}]},
        "routers: a: autoscale: min 3 exceeds max 2",
    ),
    (
        {
            "engines": [{"experiment": "a", "replicas": 1, "image": "v:1", "model": "/m"}],
            "routers": [{"experiment": "a", "to": "engines", "autoscale": {"max": 2}}],
        },
        "routers: a: autoscale: give to: samplers: only samplers",
    ),
    ({"bridges": [{"experiment": "a"}]}, "/bridges/0"),
    ({"bridges": [{"experiment": "a", "keySecret": "k", "policy": "best"}]}, "/bridges/0/policy"),
    ({"bridges": [{"experiment": "a", "keySecret": "k", "set": ["engine"]}]}, "/bridges/0/set/0"),
    (
        {"bridges": [{"experiment": "a", "keySecret": "k", "clientCertificates": True}]},
        "bridges: a: clientCertificates",
    ),
    ({"bridges": [{"experiment": "a", "keySecret": "k", "journal": {"size": "1G"}}]}, "/bridges/0/journal/size"),
    ({"redis": {"enabled": True}}, "redis.existingSecret: redis.enabled needs a Secret"),
    ({"redis": {"maxMemory": "256Mi"}}, "/redis/maxMemory"),
    ({"redis": {"enabled": True, "existingSecret": "r", "maxMemory": "512mb"}}, "redis.maxMemory: 512mb: must be"),
    ({"redis": {"enabled": True, "existingSecret": "r", "maxMemory": "1gb"}}, "limits.memory (512Mi)"),
    ({"redis": {"password": "secret"}}, "password"),
    ({"networkPolicies": {"webserverFrom": [{"pods": {}}]}}, "/networkPolicies/webserverFrom/0"),
]


@pytest.mark.parametrize(("values", "name"), WRONG, ids=[json.dumps(values) for values, _ in WRONG])
def test_a_wrong_value_is_refused_by_name(values: dict[str, Any], name: str) -> None:
    with pytest.raises(HelmError) as refused:
        render(values)
    assert name in str(refused.value)


def test_names_that_kubernetes_refuses_are_refused_by_the_chart() -> None:
    routed = {"samplers": [{"experiment": "e" * 30}], "routers": [{"experiment": "e" * 30, "to": "samplers"}]}
    bridge = {"bridges": [{"experiment": "e" * 30, "keySecret": "k"}]}
    for values, name, longest in ((routed, "-sampler-", 63 - 48), (bridge, "-bridge-", 52 - 38)):
        assert render(values, "r" * longest)
        with pytest.raises(HelmError, match=f"{name}e.* characters, but the name of a .* has at most"):
            render(values, "r" * (longest + 1))


@pytest.mark.parametrize("release", ["7b", "2026", "my.night"])
def test_releases_whose_services_kubernetes_refuses_are_refused_by_the_chart(release: str) -> None:
    with pytest.raises(HelmError, match=f"{release}-.*rename the release {release}"):
        render({}, release)


def test_names_that_yaml_reads_as_other_types_stay_strings() -> None:
    """on is a boolean there, 100 a number and null nothing; Kubernetes takes all of them for names."""
    nodes = {"priorityClassName": "100"}
    serving = {
        "samplers": [{"experiment": "on", **nodes}],
        "engines": [{"experiment": "on", "replicas": 1, "image": "v:1", "model": "/m", "env": {"Y": "1"}, **nodes}],
        "routers": [{"experiment": "on", "to": "samplers", "keySecret": "100", "webhookSecret": "100", **nodes}],
        "bridges": [
            {"experiment": "on", **dict.fromkeys(("keySecret", "tlsSecret", "policyClaim", "envSecret"), "100")}
        ],
    }
    secret, storage = {"existingSecret": "100"}, {"storage": {"className": "100"}}
    values = {
        **serving,
        **dict.fromkeys(("webserver", "daemon"), nodes),
        "store": {"url": "s3://100/store", "logsBucket": "200", "pipesBucket": "300", "createBuckets": True},
        "s3": {**secret, "server": {"enabled": True, **storage, **nodes}},
        "postgres": {**secret, "passwordKey": "100", **storage, **nodes},
        "redis": {"enabled": True, **secret, **nodes},
        "envd": {**secret, "secretKey": "100", **nodes},
        "code": {"envSecret": "100", **nodes},
        "runs": {"executor": "k8s", "pool": {"replicas": 1}, "envSecret": "100", **nodes},
        "experiments": {"configMap": "100"},
        "imagePullSecrets": ["100"],
        "extraEnv": {"ON": "1"},
    }
    for each in render(values, "true", "2026"):
        kubernetes_validate.validate(each, "1.33", strict=True)


def test_every_value_is_explained() -> None:
    lines = (CHART / "values.yaml").read_text().splitlines()
    for before, line in itertools.pairwise(lines):
        found = re.match(r"^( *)([A-Za-z]+):(.*)$", line)
        if not found:
            continue
        indent, name, value = found.groups()
        explained = before.strip().startswith("#")
        group = not value.strip()
        within_resources = name in ("requests", "limits")
        assert explained or group or within_resources, f"{name}: no comment above it"
        assert not explained or before.startswith(f"{indent}#"), f"{name}: the comment is not at its depth"


def test_schema_and_values_have_the_same_names() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert schema["$schema"] == "http://json-schema.org/draft-07/schema#"
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    # Helm itself adds `global`
    _compare(schema, values, set(schema["properties"]) - {"global"}, schema)


def _compare(part: dict[str, Any], values: dict[str, Any], names: set[str], schema: dict[str, Any]) -> None:
    assert part["additionalProperties"] is False and names == set(values)
    for name in names:
        below = part["properties"][name]
        if "properties" in below:
            _compare(below, values[name], set(below["properties"]), schema)


def test_every_object_of_the_schema_is_closed() -> None:
    def walk(part: Any) -> None:
        if isinstance(part, dict):
            if "properties" in part and isinstance(part["properties"], dict):
                assert part["additionalProperties"] is False, list(part["properties"])
            for each in part.values():
                walk(each)
        elif isinstance(part, list):
            for each in part:
                walk(each)

    walk(json.loads((CHART / "values.schema.json").read_text()))


def test_the_command_merges_files_of_values_and_names_what_is_wrong(
    tmp_path: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    first, second = tmp_path / "first.yaml", tmp_path / "second.yaml"
    first.write_text("image: {repository: a, tag: '1'}\n")
    second.write_text("image: {tag: '2'}\n")
    assert main(["--values", str(first), "--values", str(second), "--release", "r", "--namespace", "n"]) == 0
    objects = [each for each in yaml.safe_load_all(capfd.readouterr().out) if each["kind"] == "Deployment"]
    assert {each["spec"]["template"]["spec"]["containers"][0]["image"] for each in objects} == {"a:2"}
    second.write_text("image: {tag: 2}\n")
    assert main(["--values", str(second)]) == 1
    assert "/image/tag" in capfd.readouterr().err
