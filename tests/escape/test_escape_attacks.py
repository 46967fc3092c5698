"""Every attack on every backend that runs here: blocked, with an event, and neither the host nor a neighbour harmed."""

from __future__ import annotations

import re

import pytest

from tests.escape.arena import Arena
from tests.escape.attack import Attack
from tests.escape.catalogue import ALL

pytestmark = [pytest.mark.escape, pytest.mark.timeout(180)]


@pytest.mark.parametrize("attack", ALL, ids=lambda attack: attack.name)
def test_attack_is_blocked(arena: Arena, attack: Attack, request: pytest.FixtureRequest) -> None:
    if arena.backend in attack.not_on:
        pytest.skip(attack.not_on[arena.backend])
    selected = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    outcome = arena.run(attack, [each["attack"] for each in selected if each.get("arena") == arena.backend])
    if arena.backend in attack.succeeds_on:
        assert "BREACH" in outcome.text, f"it is stopped now: remove it from succeeds_on\n{outcome.text}"
        pytest.xfail(attack.succeeds_on[arena.backend])
    if arena.backend not in attack.harmless_on:
        breaches = [line for line in outcome.text.splitlines() if "BREACH" in line]
        assert not breaches, "\n".join(breaches)
        assert re.search(attack.blocked, outcome.text), f"{attack.blocked!r} is not in:\n{outcome.text}"
    if told := attack.told_on(arena.backend):
        assert told & set(outcome.kinds), f"none of {attack.audit} in {outcome.kinds}:\n{outcome.text}"
    else:
        assert outcome.called, f"no call of the trail names {attack.called!r}:\n{outcome.text}"


@pytest.mark.parametrize("attack", [each for each in ALL if each.plain], ids=lambda attack: attack.name)
def test_the_same_attempt_succeeds_where_nothing_isolates(unprotected: Arena, attack: Attack) -> None:
    assert "BREACH" in unprotected.runner.run(unprotected.tried(attack))[0]
