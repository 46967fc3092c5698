"""Objects of the Helm chart, rendered by Helm's own library: valid by Kubernetes' schemas, and no more privileged than
docs/kubernetes.md says.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from resources.placement import PlacementConfig
from tests.deploy.chart_pods import FULL, Object, environment, instance, run_job, templates
from tests.deploy.compose import ROOT
from tests.deploy.render_chart import CHART, render

VERSIONS = [f"1.{minor}" for minor in range(30, 37)]
COUNTED = ("Deployment", "StatefulSet", "DaemonSet", "Job")


@cache
def rendered(kube_version: str = "1.33") -> str:
    return json.dumps(render(FULL, "night", "rl", kube_version))


def objects(kube_version: str = "1.33") -> list[Object]:
    found: list[Object] = json.loads(rendered(kube_version))
    return found


@pytest.fixture
def pods(tmp_path: Path) -> dict[str, Object]:
    """Pod template of each object of the chart, and of a run."""
    return {**dict(templates(objects())), "run": run_job(objects(), tmp_path)["spec"]["template"]}


def containers(template: Object) -> list[Object]:
    return [*template["spec"].get("initContainers", []), *template["spec"]["containers"]]


@pytest.mark.parametrize(
    "version", [VERSIONS[0], *(pytest.param(each, marks=pytest.mark.slow) for each in VERSIONS[1:-1]), VERSIONS[-1]]
)
def test_objects_are_valid_by_the_schemas_of_a_kubernetes_version(version: str, tmp_path: Path) -> None:
    found = objects(version)
    assert {each["kind"] for each in found} >= {*COUNTED, "Role", "NetworkPolicy", "PodDisruptionBudget"}
    for each in [*found, run_job(found, tmp_path)]:
        kubernetes_validate.validate(each, version, strict=True)
    found[-1]["spec"]["misspelled"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(found[-1], version, strict=True)


def test_default_values_render_a_stack_with_its_own_database() -> None:
    names = {(each["kind"], each["metadata"]["name"]) for each in render(None, "r", "n")}
    assert {("Deployment", f"r-{name}") for name in ("webserver", "daemon", "code")} <= names
    assert ("StatefulSet", "r-postgres") in names and ("DaemonSet", "r-envd") in names


def test_objects_carry_the_release_and_its_namespace() -> None:
    for each in objects():
        labels = each["metadata"]["labels"]
        assert each["metadata"]["namespace"] == "rl"
        assert labels["app.kubernetes.io/name"] == "triplane" and labels["app.kubernetes.io/instance"] == "night"
        assert labels["app.kubernetes.io/component"]


def test_only_stable_versions_of_the_api_are_used() -> None:
    assert {each["apiVersion"] for each in objects()} == {
        "v1",
        "apps/v1",
        "batch/v1",
        "policy/v1",
        "networking.k8s.io/v1",
        "rbac.authorization.k8s.io/v1",
    }


def test_every_container_requests_what_it_needs_and_limits_memory(pods: dict[str, Object]) -> None:
    for name, template in pods.items():
        for container in containers(template):
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]) and "memory" in resources["limits"], name


def test_no_container_runs_as_root_or_writes_its_image(pods: dict[str, Object]) -> None:
    for name, template in pods.items():
        security = template["spec"]["securityContext"]
        assert security["runAsNonRoot"] and security["runAsUser"] == (999 if name == "night-postgres" else 10001)
        for container in containers(template):
            own = container["securityContext"]
            assert own["readOnlyRootFilesystem"] and own["runAsNonRoot"] and not own["privileged"], name
            assert own["allowPrivilegeEscalation"] is False and own["capabilities"] == {"drop": ["ALL"]}, name


def test_only_envd_leaves_the_default_profiles(pods: dict[str, Object]) -> None:
    for name, template in pods.items():
        spec = template["spec"]
        usual = spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert usual is (name != "night-envd")
        unusual = {"procMount", "appArmorProfile"} & set(containers(template)[0]["securityContext"])
        assert bool(unusual) is (name == "night-envd") and ("hostUsers" in spec) is (name == "night-envd")


def test_envd_has_a_user_namespace_of_its_own_unless_it_is_privileged() -> None:
    spec = {name: each["spec"] for name, each in templates(objects())}["night-envd"]
    # the API server refuses an unmasked /proc without hostUsers: false
    assert spec["hostUsers"] is False and spec["containers"][0]["securityContext"]["procMount"] == "Unmasked"
    older = {name: each["spec"] for name, each in templates(render({"envd": {"privileged": True}}))}["triplane-envd"]
    assert older["containers"][0]["securityContext"]["privileged"] and "hostUsers" not in older
    assert older["securityContext"]["runAsUser"] == 10001
    profile = {"envd": {"seccompProfile": "triplane/envd-seccomp.json"}}
    strict = {name: each["spec"] for name, each in templates(render(profile))}["triplane-envd"]
    assert strict["securityContext"]["seccompProfile"]["localhostProfile"] == "triplane/envd-seccomp.json"


def test_a_sandbox_server_has_time_to_drain() -> None:
    spec = dict(templates(render({"envd": {"drainSeconds": 300}})))["triplane-envd"]["spec"]
    assert "--drain=300" in spec["containers"][0]["command"] and spec["terminationGracePeriodSeconds"] == 330


def test_envd_accepts_its_command() -> None:
    from envd.__main__ import _parser

    program = dict(templates(objects()))["night-envd"]["spec"]["containers"][0]["command"]
    assert program[:3] == ["python", "-m", "envd"]
    given = _parser().parse_args(program[3:])
    assert given.listen == "0.0.0.0:7400" and given.insecure and str(given.key_file) == "/var/run/triplane-envd/key"
    assert given.metrics == "0.0.0.0:9464"
    assert given.audit_log.parent == given.state_dir, "an alert of lost events needs a file, on a volume"


def test_what_is_written_lies_on_volumes(pods: dict[str, Object]) -> None:
    for name, template in pods.items():
        volumes = {each["name"] for each in template["spec"].get("volumes", [])}
        for container in containers(template):
            mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
            assert "/tmp" in mounts and set(mounts.values()) <= volumes | {"data"}, name


def test_images_are_named_by_version_or_digest(pods: dict[str, Object]) -> None:
    for template in pods.values():
        for container in containers(template):
            image = container["image"]
            assert re.search(r"(@sha256:[0-9a-f]{64}|:[^:/@]+)$", image) and not image.endswith(":latest")


def test_secrets_are_taken_by_reference() -> None:
    assert not [each for each in objects() if each["kind"] == "Secret"]
    secret = re.compile(r"PASSWORD|SECRET|TOKEN|ACCESS_KEY|_KEY$")
    assert not [name for name in environment(objects()) if secret.search(name)]
    named = set()
    for _, template in templates(objects()):
        for container in containers(template):
            for variable in container.get("env", []):
                assert "value" not in variable or not secret.search(variable["name"])
                named |= {variable["valueFrom"]["secretKeyRef"]["name"]} if "valueFrom" in variable else set()
            named |= {each["secretRef"]["name"] for each in container.get("envFrom", []) if "secretRef" in each}
        named |= {each["secret"]["secretName"] for each in template["spec"]["volumes"] if "secret" in each}
    served = {"bridge", "bridge-tls", "bridge-variables", "fleet", "redis", "webhook"}
    assert named == {f"triplane-{name}" for name in {"postgres", "s3", "envd"} | served}


def test_variables_of_services_do_not_reach_pods(pods: dict[str, Object]) -> None:
    # a Service `triplane-envd` would set TRIPLANE_ENVD_PORT
    assert all(template["spec"]["enableServiceLinks"] is False for template in pods.values())


def test_every_long_running_container_is_probed() -> None:
    for name, template in templates(objects()):
        lasting = [each for each in containers(template) if each["name"] not in ("buckets", "vllm-side")]
        for container in lasting:
            # nobody connects to the daemon
            wanted = {"startupProbe", "livenessProbe"} | ({"readinessProbe"} if container.get("ports") else set())
            assert wanted <= set(container), name


def test_only_dagster_has_rights_and_they_are_the_documented_ones() -> None:
    accounts = {each["metadata"]["name"]: each for each in objects() if each["kind"] == "ServiceAccount"}
    with_token = {name for name, each in accounts.items() if each["automountServiceAccountToken"]}
    assert with_token == {"night-dagster"} and len(accounts) == 10
    bindings = [each for each in objects() if each["kind"] == "RoleBinding"]
    assert all([each["name"] for each in binding["subjects"]] == ["night-dagster"] for binding in bindings)
    roles = {each["metadata"]["name"]: each for each in objects() if each["kind"] == "Role"}
    assert set(roles) == {"night-dagster", "night-engines"} == {each["roleRef"]["name"] for each in bindings}
    role = roles["night-dagster"]
    granted = {resource: set(rule["verbs"]) for rule in role["rules"] for resource in rule["resources"]}
    page = (ROOT / "docs" / "kubernetes.md").read_text().split("## What each right is for")[1].split("\n## ")[0]
    documented = {
        row[1]: set(row[2].split(", ")) for row in re.finditer(r"^\| `([a-z/]+)` \| ([a-z, ]+) \|", page, re.MULTILINE)
    }
    assert granted == documented and "*" not in {verb for verbs in granted.values() for verb in verbs}
    assert not {"secrets", "pods/exec", "configmaps"} & set(granted)


def test_only_engines_that_are_scaled_can_be_scaled() -> None:
    (role,) = [each for each in objects() if each["metadata"]["name"] == "night-engines" and each["kind"] == "Role"]
    (rule,) = role["rules"]
    assert rule["resourceNames"] == ["night-engine-qwen3-4b"] and rule["verbs"] == ["get", "patch"]


def test_rights_on_jobsets_are_an_option() -> None:
    (role,) = [each for each in render() if each["kind"] == "Role"]
    assert "jobsets" not in [resource for rule in role["rules"] for resource in rule["resources"]]


def test_pods_without_rights_get_no_token(pods: dict[str, Object]) -> None:
    for name, template in pods.items():
        spec = template["spec"]
        if spec["serviceAccountName"] != "night-dagster":
            assert spec["automountServiceAccountToken"] is False, name


def test_the_pods_backend_of_envd_gets_rights_of_its_own() -> None:
    backend, image = {"backend": "namespaces,pods"}, {"TRIPLANE_ENVD_PODS_IMAGE": "registry.example.com/sandbox:1"}
    found = render({"envd": backend, "extraEnv": image})
    (role,) = [each for each in found if each["kind"] == "Role" and each["metadata"]["name"] == "triplane-envd"]
    assert {resource for rule in role["rules"] for resource in rule["resources"]} == {
        "pods",
        "pods/exec",
        "networkpolicies",
    }
    assert not [each for each in found if each["kind"].startswith("Cluster")]
    gvisor = {**image, "TRIPLANE_ENVD_PODS_RUNTIME_CLASS": "gvisor"}
    whole = [each for each in render({"envd": backend, "extraEnv": gvisor}) if each["kind"].startswith("Cluster")]
    (read,), binding = whole[0]["rules"], whole[1]
    assert (read["resources"], read["resourceNames"], read["verbs"]) == (["runtimeclasses"], ["gvisor"], ["get"])
    assert binding["roleRef"]["name"] == whole[0]["metadata"]["name"] == "triplane-triplane-envd"
    assert [each["name"] for each in binding["subjects"]] == ["triplane-envd"]
    for each in whole:
        assert "namespace" not in each["metadata"]
        kubernetes_validate.validate(each, "1.33", strict=True)


def test_the_instance_is_that_of_production_with_another_launcher() -> None:
    production = yaml.safe_load((ROOT / "deploy" / "dagster-production.yaml").read_text())
    found = instance(objects())
    assert found["run_launcher"] != production["run_launcher"]
    assert found["concurrency"]["runs"].pop("max_concurrent_runs") == 8
    production["concurrency"]["runs"].pop("max_concurrent_runs")
    assert found["run_monitoring"].pop("start_timeout_seconds") == 600
    production["run_monitoring"].pop("start_timeout_seconds")
    found.pop("run_launcher"), production.pop("run_launcher")
    assert found == production
    assert found["run_monitoring"]["max_resume_run_attempts"] == 0 and found["run_retries"]["max_retries"] == 3


def test_dagster_accepts_the_instance(tmp_path: Path) -> None:
    from dagster._core.instance.config import dagster_instance_config

    (tmp_path / "dagster.yaml").write_text(yaml.safe_dump(instance(objects())))
    settings, _ = dagster_instance_config(str(tmp_path))
    assert settings["run_launcher"]["class"] == "RunPodLauncher"


def test_a_run_is_a_job_that_is_not_restarted_and_leaves_after_an_hour(tmp_path: Path) -> None:
    job = run_job(objects(), tmp_path)
    assert job["spec"]["backoffLimit"] == 0 and job["spec"]["ttlSecondsAfterFinished"] == 3600
    spec, labels = job["spec"]["template"]["spec"], job["spec"]["template"]["metadata"]["labels"]
    assert spec["restartPolicy"] == "Never" and spec["serviceAccountName"] == "night-dagster"
    # network policies find it by these
    assert labels["app.kubernetes.io/name"] == "triplane" and labels["app.kubernetes.io/instance"] == "night"
    (container,) = spec["containers"]
    assert {"configMapRef": {"name": "night-env"}} in container["envFrom"]
    assert {"secretRef": {"name": "triplane-s3"}} in container["envFrom"]
    assert spec["imagePullSecrets"] == [{"name": "registry"}] and container["image"] == "triplane-stack:0.1.0"


def test_placement_of_a_run_replaces_the_defaults(tmp_path: Path) -> None:
    placed = {
        "container_config": {"resources": {"requests": {"cpu": "3000m", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}},
        "pod_spec_config": {"node_selector": {"pool": "cpu"}},
    }
    spec = run_job(objects(), tmp_path, {"dagster-k8s/config": json.dumps(placed)})["spec"]["template"]["spec"]
    resources = spec["containers"][0]["resources"]
    assert resources == {"requests": {"cpu": "3000m", "memory": "8Gi"}, "limits": {"memory": "8Gi"}}
    assert spec["nodeSelector"] == {"pool": "cpu"} and spec["securityContext"]["runAsNonRoot"]


def test_the_code_server_tells_runs_which_image_they_use() -> None:
    (container,) = {name: each["spec"]["containers"] for name, each in templates(objects())}["night-code"]
    assert {"name": "DAGSTER_CURRENT_IMAGE", "value": container["image"]} in container["env"]


def test_a_pod_of_the_step_pool_is_what_a_step_of_an_experiment_gets_by_default(tmp_path: Path) -> None:
    pool = dict(templates(objects()))["night-steps"]
    (container,), run = pool["spec"]["containers"], run_job(objects(), tmp_path)["spec"]["template"]["spec"]
    assert container["resources"] == PlacementConfig().steps.resources()
    assert {"name": "DAGSTER_CURRENT_IMAGE", "value": container["image"]} in container["env"]
    (of_run,) = run["containers"]
    for field in ("image", "volumeMounts"):
        assert container[field] == of_run[field], field
    assert {each["name"] for each in pool["spec"]["volumes"]} == {each["name"] for each in run["volumes"]}
    assert pool["spec"]["serviceAccountName"] == run["serviceAccountName"]
    assert environment(objects())["TRIPLANE_STEP_POOL"] == "dns:night-steps.rl.svc:4100"
    assert json.loads(environment(objects())["TRIPLANE_STEP_POOL_RESOURCES"]) == container["resources"]
    assert "TRIPLANE_STEP_POOL" not in environment(render())


def test_trainers_take_configuration_and_credentials_by_name() -> None:
    found = environment(objects())
    assert found["TRIPLANE_KUBERNETES_ENV"] == "configmap/night-env,secret/triplane-s3"
    assert found["TRIPLANE_KUBERNETES_IMAGE"] == "registry.example.com/trainer:0.1.0"
    assert found["TRIPLANE_KUBERNETES_SERVICE_ACCOUNT"] == "night-trainer"
    assert found["TRIPLANE_ENVD"] == "dns:night-envd.rl.svc:7400"
    plain = environment(render({"s3": {"existingSecret": ""}}))
    assert plain["TRIPLANE_KUBERNETES_ENV"] == "configmap/triplane-env"


def test_a_sampler_is_replaced_without_a_gap() -> None:
    found = {(each["kind"], each["metadata"]["name"]): each for each in objects()}
    deployment = found["Deployment", "night-sampler-quickstart"]
    assert deployment["spec"]["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    spec = deployment["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    drain = int(container["command"][container["command"].index("--drain") + 1])
    # requests in flight get up to 60 s more
    assert 0 < drain < spec["terminationGracePeriodSeconds"] - 60
    assert container["command"][0] == "triplane"
    assert found["PodDisruptionBudget", "night-sampler-quickstart"]["spec"]["maxUnavailable"] == 1
    assert ("Service", "night-sampler-my-night") in found
    my_night = found["Deployment", "night-sampler-my-night"]["spec"]["template"]["spec"]["containers"][0]
    assert "my_night" in my_night["command"]


def test_an_engine_gets_gpus_and_reads_weights_of_its_sidecar() -> None:
    spec = {name: each["spec"] for name, each in templates(objects())}["night-engine-qwen3-4b"]
    (engine,), (side, weights) = spec["containers"], spec["initContainers"]
    assert engine["command"] == ["vllm", "serve", "/weights/first"] and weights["restartPolicy"] == "Always"
    assert (ROOT / side["command"][2]).is_dir()
    assert engine["resources"] == {
        "requests": {"nvidia.com/gpu": "2", "cpu": "8", "memory": "64Gi"},
        "limits": {"nvidia.com/gpu": "2", "memory": "128Gi"},
    }
    assert "nvidia.com/gpu" not in weights["resources"]["requests"]
    mounts = {each["mountPath"]: each for each in engine["volumeMounts"]}
    assert mounts["/weights"]["readOnly"] and "/weights" in weights["command"]


def test_selectors_find_the_pods_of_their_object_alone() -> None:
    labels = {name: each["metadata"]["labels"] for name, each in templates(objects())}
    services = [each for each in objects() if each["kind"] == "Service"]
    assert len(services) == 15
    for service in services:
        chosen = service["spec"]["selector"].items()
        matched = [name for name, each in labels.items() if chosen <= each.items()]
        assert matched == [service["metadata"]["name"].removesuffix("-replicas")]
        found = containers(dict(templates(objects()))[matched[0]])
        names = {port["name"] for container in found for port in container.get("ports", [])}
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_every_pod_denies_connections_that_no_policy_allows(pods: dict[str, Object]) -> None:
    policies = {each["metadata"]["name"]: each["spec"] for each in objects() if each["kind"] == "NetworkPolicy"}
    assert "ingress" not in policies["night-deny"]
    everything = policies["night-deny"]["podSelector"]["matchLabels"].items()
    assert all(everything <= template["metadata"]["labels"].items() for template in pods.values())
    listening = {
        each["metadata"]["labels"]["app.kubernetes.io/component"] for each in objects() if each["kind"] == "Service"
    }
    assert len(listening) == 14
    for name, template in templates(objects()):
        wanted = {port["containerPort"] for each in containers(template) for port in each.get("ports", [])}
        open_ports = {
            port["port"]
            for spec in policies.values()
            if spec["podSelector"]["matchLabels"].items() <= template["metadata"]["labels"].items()
            for rule in spec.get("ingress", [])
            for port in rule.get("ports", [])
        }
        assert open_ports == wanted, name


def test_metrics_of_envd_are_read_by_the_scraper_that_the_values_name() -> None:
    def readers(values: Object) -> list[Object]:
        policies = {
            each["metadata"]["name"]: each["spec"] for each in render(values) if each["kind"] == "NetworkPolicy"
        }
        rules = policies["triplane-envd"]["ingress"]
        return [peer for rule in rules if {"port": 9464} in rule["ports"] for peer in rule["from"]]

    monitoring = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}]
    assert readers({}) == []
    assert readers({"envd": {"metrics": True}}) == [{"podSelector": {}}]
    assert readers({"envd": {"metrics": True}, "networkPolicies": {"metricsFrom": monitoring}}) == monitoring
    assert not [
        each
        for each in dict(templates(render()))["triplane-envd"]["spec"]["containers"][0]["command"]
        if each.startswith("--metrics")
    ]


def test_cache_events_of_engines_can_be_reached_where_they_are_published() -> None:
    (engine,) = dict(templates(objects()))["night-engine-qwen3-4b"]["spec"]["containers"]
    (given,) = [each for each in engine["args"] if each.startswith("--kv-events-config=")]
    assert json.loads(given.partition("=")[2])["replay_endpoint"] == "tcp://*:5558"
    assert [port["containerPort"] for port in engine["ports"]] == [8000, 5557, 5558]


def test_others_reach_engines_only_where_the_values_name_them() -> None:
    prometheus = [{"namespaceSelector": {"matchLabels": {"name": "monitoring"}}}]

    def rules(policies: Object) -> list[Object]:
        found = render({"engines": FULL["engines"], "networkPolicies": policies})
        policies = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "NetworkPolicy"}
        return list(policies["triplane-engine-qwen3-4b"]["ingress"])

    assert len(rules({})) == 1
    assert rules({"engineMetricsFrom": prometheus})[1] == {"ports": [{"port": 8000}], "from": prometheus}


def test_policies_can_be_left_out() -> None:
    assert "NetworkPolicy" not in {each["kind"] for each in render({"networkPolicies": {"enabled": False}})}


def test_an_existing_database_and_sandbox_server_are_used() -> None:
    given = {"postgres": {"enabled": False, "host": "db.example.com"}, "envd": {"enabled": False, "address": "h:7400"}}
    found = render(given)
    assert environment(found)["DAGSTER_POSTGRES_HOST"] == "db.example.com"
    assert environment(found)["TRIPLANE_ENVD"] == "h:7400"
    names = {each["metadata"]["name"] for each in found if each["kind"] in COUNTED}
    assert names == {"triplane-webserver", "triplane-daemon", "triplane-code"}


def test_variables_of_values_take_precedence() -> None:
    found = render({"extraEnv": {"HOME": "/var/home", "TRIPLANE_CACHE_GB": "5"}})
    assert environment(found)["HOME"] == "/var/home" and environment(found)["TRIPLANE_CACHE_GB"] == "5"
    (envd,) = dict(templates(found))["triplane-envd"]["spec"]["containers"]
    assert [each["value"] for each in envd["env"] if each["name"] == "HOME"] == ["/var/home"]


def test_a_secret_of_the_code_server_reaches_no_other_pod() -> None:
    found = render({"code": {"envSecret": "alerts"}})
    holders = {
        name
        for name, template in templates(found)
        for container in template["spec"]["containers"]
        if {"secretRef": {"name": "alerts"}} in container.get("envFrom", ())
    }
    assert holders == {"triplane-code"}


def test_a_secret_of_runs_reaches_runs_and_steps_alone(tmp_path: Path) -> None:
    found = render({"runs": {"envSecret": "judges", "executor": "k8s", "pool": {"replicas": 2}}})
    reference = {"secretRef": {"name": "judges"}}
    holders = {
        name
        for name, template in templates(found)
        for container in template["spec"]["containers"]
        if reference in container.get("envFrom", ())
    }
    assert holders == {"triplane-steps"}
    (container,) = run_job(found, tmp_path)["spec"]["template"]["spec"]["containers"]
    assert reference in container["envFrom"]


def test_configuration_that_changes_restarts_its_pods() -> None:
    def checksums(values: Object) -> dict[str, Any]:
        return {name: each["metadata"].get("annotations") for name, each in templates(render(values))}

    before, after = checksums({}), checksums({"runs": {"maxConcurrent": 3}})
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {"triplane-webserver", "triplane-daemon", "triplane-code"}


def test_the_chart_holds_the_file_of_production_itself() -> None:
    assert (CHART / "files" / "dagster-production.yaml").resolve() == ROOT / "deploy" / "dagster-production.yaml"


def test_a_job_creates_the_buckets_that_are_used() -> None:
    (container,) = {name: each["spec"] for name, each in templates(objects())}["night-buckets"]["containers"]
    assert container["command"][1:] == ["deploy/create_buckets.py", "triplane", "triplane-logs"]
    assert (ROOT / container["command"][1]).is_file()
    assert environment(objects())["AWS_ENDPOINT_URL"] == "http://night-s3:7070"


def test_a_default_node_label_is_removed_by_null() -> None:
    found = dict(templates(render({"envd": {"nodeSelector": {"triplane/pool": None}}})))
    assert "nodeSelector" not in found["triplane-envd"]["spec"]
