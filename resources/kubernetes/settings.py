"""Settings of a deployment on Kubernetes, by environment variables."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from contracts.errors import ConfigError

IMAGE = "TRIPLANE_KUBERNETES_IMAGE"
"""Image of trainers."""
ACCOUNT = "TRIPLANE_KUBERNETES_SERVICE_ACCOUNT"
"""Service account of trainers, which needs no rights; default: the namespace's default account."""
ENVIRONMENT = "TRIPLANE_KUBERNETES_ENV"
"""Where trainers get environment variables from: comma-separated configmap/NAME and secret/NAME."""
RELEASE = "TRIPLANE_KUBERNETES_RELEASE"
"""Value of the label app.kubernetes.io/instance; default: triplane."""


@dataclass(frozen=True)
class Settings:
    """What every trainer of a deployment has."""

    image: str
    account: str | None
    sources: tuple[tuple[str, str], ...]
    """(configMapRef or secretRef, name) of the environment variables."""
    release: str

    @property
    def env_from(self) -> list[dict[str, Any]]:
        """The same in Kubernetes' spelling."""
        return [{kind: {"name": name}} for kind, name in self.sources]


def release_of(environment: Mapping[str, str] = os.environ) -> str:
    """Name of this release of the chart."""
    return environment.get(RELEASE) or "triplane"


def read_settings(environment: Mapping[str, str] = os.environ) -> Settings:
    """Settings of trainers. Raises ConfigError."""
    image = environment.get(IMAGE, "")
    if not image:
        raise ConfigError(f"{IMAGE} is not set: set it to the image of trainers, such as registry/triplane:1")
    kinds = {"configmap": "configMapRef", "secret": "secretRef"}
    sources = []
    for each in filter(None, (part.strip() for part in environment.get(ENVIRONMENT, "").split(","))):
        kind, _, name = each.partition("/")
        if kind not in kinds or not name:
            raise ConfigError(f"{ENVIRONMENT}: {each!r} is neither configmap/NAME nor secret/NAME: correct it")
        sources.append((kinds[kind], name))
    return Settings(image, environment.get(ACCOUNT) or None, tuple(sources), release_of(environment))
