"""deploy/compose.yaml and deploy/Dockerfile as data, read as Docker reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from dockerfile_parse import DockerfileParser

ROOT = Path(__file__).parents[2]
COMPOSE = ROOT / "deploy" / "compose.yaml"
DOCKERFILE = ROOT / "deploy" / "Dockerfile"
VARIABLE = re.compile(r"\$(?:\$|\{(?P<name>\w+)(?::-(?P<default>[^}]*))?\})")


@dataclass(frozen=True)
class Service:
    """What a container runs."""

    name: str
    command: list[str]
    environment: dict[str, str]
    healthcheck: list[str]
    definition: dict[str, Any]


def interpolate(text: str, variables: Mapping[str, str]) -> str:
    """`text` with ${NAME:-default} replaced. A variable that has neither a value nor a default is an error."""

    def value(found: re.Match[str]) -> str:
        if found["name"] is None:
            return "$"
        given = variables.get(found["name"]) or found["default"]
        assert given is not None, f"${{{found['name']}}} has no default"
        return given

    return VARIABLE.sub(value, text)


def services(variables: Mapping[str, str]) -> dict[str, Service]:
    """Every service by name, with these values in place of the defaults."""
    found = _interpolated(yaml.safe_load(COMPOSE.read_text()), variables)["services"]
    return {name: _service(name, definition) for name, definition in found.items()}


def image_environment(target: str) -> dict[str, str]:
    """What ENV sets in an image, with that of the stages below it."""
    environment: dict[str, dict[str, str]] = {}
    stage = ""
    for step in DockerfileParser(fileobj=DOCKERFILE.open("rb")).structure:
        if step["instruction"] == "FROM":
            base, _, stage = step["value"].partition(" AS ")
            environment[stage] = dict(environment.get(base, {}))
        elif step["instruction"] == "ENV":
            environment[stage] |= dict(part.split("=", 1) for part in step["value"].split())
    return environment[target]


def _interpolated(value: Any, variables: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        return interpolate(value, variables)
    if isinstance(value, list):
        return [_interpolated(each, variables) for each in value]
    if isinstance(value, dict):
        return {name: _interpolated(each, variables) for name, each in value.items()}
    return value


def _service(name: str, definition: dict[str, Any]) -> Service:
    environment = {key: str(value) for key, value in definition.get("environment", {}).items()}
    kind, *check = definition.get("healthcheck", {"test": ["NONE"]})["test"]
    health = ["sh", "-c", *check] if kind == "CMD-SHELL" else check
    return Service(name, definition.get("command", []), environment, health, definition)
