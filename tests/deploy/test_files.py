"""deploy/ and the workflow as files: valid by their published schemas, complete, and no more privileged than they
say.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile_parse import DockerfileParser
from packaging.requirements import Requirement

from resources.experiment import load_experiment
from tests.deploy.compose import COMPOSE, DOCKERFILE, ROOT, VARIABLE, services

OURS = [name for name, service in services({}).items() if "build" in service.definition]
DOCUMENT = ROOT / "docs" / "deploy.md"
PAGE = ROOT / "docs" / "kubernetes.md"


def valid(schema: str, path: Path) -> subprocess.CompletedProcess[str]:
    command = [str(Path(sys.executable).with_name("check-jsonschema")), "--builtin-schema", f"vendor.{schema}"]
    return subprocess.run([*command, str(path)], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        ("compose-spec", COMPOSE),
        ("github-workflows", ROOT / ".github" / "workflows" / "ci.yml"),
        ("github-issue-forms", ROOT / ".github" / "ISSUE_TEMPLATE" / "bug.yml"),
        ("github-issue-forms", ROOT / ".github" / "ISSUE_TEMPLATE" / "feature.yml"),
        ("github-issue-config", ROOT / ".github" / "ISSUE_TEMPLATE" / "config.yml"),
    ],
    ids=["compose", "workflow", "bug", "feature", "issues"],
)
def test_a_file_is_valid_by_its_published_schema(schema: str, path: Path, tmp_path: Path) -> None:
    done = valid(schema, path)
    assert done.returncode == 0, done.stdout
    misspelled = tmp_path / path.name
    misspelled.write_text(path.read_text().replace("\nservices:", "\nservicez:").replace("\njobs:", "\njobz:"))
    if path.parent.name == "ISSUE_TEMPLATE":
        misspelled.write_text("body: none\nblank_issues_enabled: perhaps\n")
    assert valid(schema, misspelled).returncode == 1


def test_pre_commit_runs_what_make_lint_runs() -> None:
    makefile = (ROOT / "Makefile").read_text()
    assert "\nlint: style types " in makefile
    recipes = [makefile.split(f"\n{target}:")[1].split("\n\n")[0] for target in ("style", "types", "lint")]
    lint = [line.strip().replace("$(BIN)", ".venv/bin") for recipe in recipes for line in recipe.splitlines()[1:]]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    assert [hook["entry"] for hook in hooks] == lint


def test_every_variable_has_a_default_and_is_explained() -> None:
    names = {found["name"] for found in VARIABLE.finditer(COMPOSE.read_text()) if found["name"]}
    services({})  # raises where one has no default
    listed = set(re.findall(r"^\| `([A-Z0-9_]+)` \|", DOCUMENT.read_text(), flags=re.MULTILINE))
    assert names == listed


def test_what_a_service_waits_for_can_come_true() -> None:
    known = services({})
    for service in known.values():
        for name, wait in service.definition.get("depends_on", {}).items():
            if wait["condition"] == "service_healthy":
                assert known[name].healthcheck, f"{service.name} waits for {name} to be healthy, which nothing checks"
            else:
                assert known[name].definition["restart"] == "on-failure", f"{name} never completes"


def test_every_file_that_is_named_exists() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", DOCKERFILE.read_text(), flags=re.MULTILINE)
    for service in services({}).values():
        build = service.definition.get("build")
        if build:
            assert (COMPOSE.parent / build["context"] / build["dockerfile"]).is_file() and build["target"] in stages
        words = [*service.command, *service.healthcheck]
        assert all((ROOT / word).is_file() for word in words if word.startswith("deploy/"))
        places = [each.partition(":")[0] for each in service.definition.get("volumes", [])]
        assert all((COMPOSE.parent / place).is_dir() for place in places if place.startswith("."))
        profiles = [each for each in service.definition.get("security_opt", []) if each.startswith("seccomp=")]
        assert all((COMPOSE.parent / each.removeprefix("seccomp=")).is_file() for each in profiles)


@pytest.mark.parametrize("name", OURS)
def test_a_service_of_ours_has_no_capability(name: str) -> None:
    definition = services({})[name].definition
    assert definition["cap_drop"] == ["ALL"] and "cap_add" not in definition and "privileged" not in definition
    assert "no-new-privileges:true" in definition["security_opt"]


def test_only_envd_leaves_the_default_profiles() -> None:
    for service in services({}).values():
        options = [each for each in service.definition.get("security_opt", []) if not each.startswith("no-new")]
        assert not options or service.name == "envd"


def test_nothing_is_reachable_from_other_machines() -> None:
    ports = [port for service in services({}).values() for port in service.definition.get("ports", [])]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports), ports
    assert services({})["envd"].definition["network_mode"] == "none"


def instructions(kind: str, target: str = "") -> list[str]:
    """Values of the instructions of a kind. target: only of that stage."""
    stage, found = "", []
    for step in DockerfileParser(fileobj=DOCKERFILE.open("rb")).structure:
        if step["instruction"] == "FROM":
            stage = step["value"].rpartition(" AS ")[2]
        if step["instruction"] == kind and target in ("", stage):
            found.append(step["value"])
    return found


def extras_of(target: str) -> set[str]:
    """Extras of the project that a stage installs."""
    (command,) = [value for value in instructions("RUN", target) if "deploy/dependencies.py" in value]
    return set(command.split("deploy/dependencies.py ")[1].split(" >")[0].split())


def test_images_are_pinned_and_end_as_an_ordinary_user() -> None:
    arguments = dict(value.split("=", 1) for value in instructions("ARG"))
    stages = [value.split() for value in instructions("FROM")]
    bases = [image for image, *_ in stages if image not in [stage[-1] for stage in stages]]
    assert bases == ["${BASE_IMAGE}"]
    assert re.fullmatch(r"[\w/.-]+:\d+\.\d+\.\d+-[\w-]+@sha256:[0-9a-f]{64}", arguments["BASE_IMAGE"])
    # a number: Kubernetes can't tell whether a name is root's
    assert instructions("USER") == ["10001:10001"] * len(instructions("CMD"))
    images = [service.definition["image"] for service in services({}).values()]
    assert all(re.search(r":(local$|v?\d+\.\d+)", image) for image in images), images


def test_there_is_an_image_for_each_role_of_compose_and_chart() -> None:
    stages = [value.split()[-1] for value in instructions("FROM")]
    values = yaml.safe_load((ROOT / "deploy" / "helm" / "triplane" / "values.yaml").read_text())
    named = {values["image"]["repository"], values["envd"]["image"]["repository"]}
    assert named == {"triplane-stack", "triplane-envd"} == {f"triplane-{stage}" for stage in [*stages[-1:], "envd"]}


def test_the_image_of_envd_has_what_the_backends_of_the_chart_need() -> None:
    schema = json.loads((ROOT / "deploy" / "helm" / "triplane" / "values.schema.json").read_text())
    assert "(namespaces|gvisor|pods)" in schema["properties"]["envd"]["properties"]["backend"]["pattern"]
    assert "--from=runsc /usr/local/bin/runsc /usr/local/bin/runsc" in instructions("COPY")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = (ROOT / "deploy" / "envd-requirements.txt").read_text().splitlines()
    extras = project["optional-dependencies"]
    assert {*extras["pods"], *extras["search"], *extras["tracing"], *extras["metrics"]} <= set(wanted)
    assert set(wanted) & set(extras["dev"]) == {"ruff>=0.9"}  # of the tool `lint`


def test_the_image_of_the_stack_has_what_a_cluster_needs() -> None:
    assert "packages AS stack" in instructions("FROM")
    assert {"aws", "k8s", "pods", "postgres"} <= extras_of("packages")


def test_the_image_of_trainers_has_what_triton_and_the_shipped_experiments_need() -> None:
    assert "packages AS trainer" in instructions("FROM") and "--target trainer" in PAGE.read_text()
    packages = {word for value in instructions("RUN", "trainer") if "apt-get" in value for word in value.split()}
    assert {"gcc", "g++", "libc6-dev"} <= packages
    # without them CUDA's own headers do not compile
    assert any("cuda-toolkit[cccl,crt,nvml]" in value for value in instructions("RUN", "trainer"))
    needed = set()
    for path in sorted((ROOT / "experiments").glob("*.yaml")):
        trainer = load_experiment(path).trainer
        needed |= {"deepspeed"} if trainer.launcher.backend == "deepspeed" else set()
        needed |= {"te"} if trainer.precision.kind.startswith("te-") else set()
    assert {"deepspeed", "te"} == needed <= extras_of("trainer")


def test_every_installation_is_constrained() -> None:
    commands = [part.split() for value in instructions("RUN") for part in re.split(r"&&|;|\|", value)]
    installations = [" ".join(words) for words in commands if "install" in words[1:] and words[0] != "apt-get"]
    free = [each for each in installations if "--constraint constraints.txt" not in each and "--no-deps" not in each]
    assert installations and not free


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    lines = (ROOT / "deploy" / "Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:] for line in lines if line.startswith("!")]
    assert "*" in lines and all((ROOT / name).exists() for name in kept)
    for value in instructions("COPY"):
        for source in value.split()[:-1] if not value.startswith("--from=") else []:
            assert (ROOT / source).exists()
            assert source == "." or any(fnmatch(source.split("/")[0], name) for name in kept), source
    packages = packages_of_the_project()
    assert packages <= set(kept), "a package of the project is missing in the image"


def packages_of_the_project() -> set[str]:
    """Top-level folders with Python packages of the project."""
    return {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}


def test_dependencies_are_those_of_the_project() -> None:
    script = [sys.executable, str(ROOT / "deploy" / "dependencies.py")]
    printed = subprocess.run([*script, "aws", "postgres"], capture_output=True, text=True, check=True).stdout
    names = {Requirement(line).name for line in printed.splitlines()}
    assert {"dagster", "torch", "dagster-aws", "dagster-postgres"} <= names and "pytest-timeout" not in names
    assert subprocess.run([*script, "nonsense"], capture_output=True).returncode != 0


def test_the_seccomp_profile_forbids_what_sandboxes_do_not_need_and_nothing_they_do() -> None:
    profile: dict[str, Any] = json.loads((ROOT / "deploy" / "envd-seccomp.json").read_text())
    denied = [name for rule in profile["syscalls"] for name in rule["names"]]
    assert len(denied) == len(set(denied)) and {"bpf", "keyctl", "init_module", "perf_event_open"} <= set(denied)
    needed = {
        "clone",
        "clone3",
        "unshare",
        "mount",
        "umount2",
        "fsopen",
        "fsconfig",
        "fsmount",
        "move_mount",
        "open_tree",
        "mount_setattr",
        "pivot_root",
        "sethostname",
    }
    assert not needed & set(denied)


@pytest.mark.parametrize("name", ["dagster-production.yaml", "dagster-aws.yaml"])
def test_dagster_accepts_an_instance_file(name: str) -> None:
    from dagster._core.instance.config import dagster_instance_config

    settings, _ = dagster_instance_config(str(ROOT / "deploy"), name)
    assert settings["telemetry"] == {"enabled": False}
    assert settings["compute_logs"]["class"] == "S3ComputeLogManager"


def test_the_workflow_calls_the_suites_of_a_clean_clone() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    makefile = (ROOT / "Makefile").read_text()
    jobs = workflow["jobs"]
    targets = {each for job in jobs.values() for each in job.get("strategy", {}).get("matrix", {}).get("target", [])}
    run = (ROOT / ".ci" / "run").read_text()
    suites = set(re.findall(r"^(?:suite |  if_time \S+ )?make (test[a-z-]*|fuzz-[a-z]+)", run, flags=re.MULTILINE))
    assert len(suites) > 5 and {"demo", *suites} <= targets
    assert all(re.search(rf"^{target}:", makefile, flags=re.MULTILINE) for target in targets)
