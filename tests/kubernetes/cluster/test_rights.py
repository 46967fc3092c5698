"""The role of the release is enough; without any of its rights the doctor says which is missing, and for what."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.kubernetes.cluster.world import RELEASE, World
from triplane_dagster.doctor.cluster_rights import RIGHTS

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(900)]
NAME = f"{RELEASE}-dagster"
ASK = "from triplane_dagster.doctor.cluster import rights; found = rights([]); print(found.found)"


@pytest.fixture
def role(world: World) -> Iterator[dict[str, Any]]:
    """The role, which is put back."""
    (found,) = [each for each in world.objects() if each["kind"] == "Role" and each["metadata"]["name"] == NAME]
    yield found
    world.apply([found])


def asked(world: World) -> str:
    """What the doctor says of the rights, in a pod of the release."""
    return world.kubectl("exec", f"deployment/{RELEASE}-code", "--", "python", "-W", "ignore", "-c", ASK)


def test_the_role_is_enough_and_each_of_its_rights_is_named_when_it_is_missing(
    world: World, role: dict[str, Any]
) -> None:
    granted = {
        (rule["apiGroups"][0], resource, verb)
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    needed = {
        (right.group, "/".join(filter(None, (right.resource, right.subresource))), right.verb) for right in RIGHTS
    }
    assert granted == needed
    assert f"all {len(RIGHTS)}" in asked(world)
    for right in RIGHTS:
        lacking = copy.deepcopy(role)
        place = "/".join(filter(None, (right.resource, right.subresource)))
        for rule in lacking["rules"]:
            if rule["apiGroups"][0] == right.group and place in rule["resources"]:
                rule["verbs"] = [verb for verb in rule["verbs"] if verb != right.verb]
        lacking["rules"] = [rule for rule in lacking["rules"] if rule["verbs"]]
        world.kubectl("replace", "--filename", "-", given=json.dumps(lacking))
        said = asked(world)
        assert f"no right to {right}" in said and right.feature in said, said
