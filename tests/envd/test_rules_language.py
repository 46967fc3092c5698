"""Syntax and checks of sandbox rules; the rules of a request can only tighten those of the server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envd.backends.base import IsolationLevel
from envd.rules_check import run_check
from envd.server.rules import DEFAULT, Decisions, Rules, RulesError, hides, load_rules
from envd.types import Limits

HERE: dict[str, Any] = {
    "backend": "namespaces",
    "isolation": IsolationLevel.PROCESS,
    "can": frozenset({"pty"}),
    "enforced": ("cpu", "disk", "memory", "pids"),
    "live": 0,
}


def decide(text: str, asked: dict[str, float] | None = None, **here: Any) -> Decisions:
    return load_rules(text).check(asked or {}, **{**HERE, **here})


def test_the_default_allows_what_a_server_without_rules_does() -> None:
    decisions = decide("")
    assert (decisions.denials, decisions.limits, decisions.network, decisions.read_only) == ((), Limits(), (), False)
    assert load_rules("") == DEFAULT and decisions.allows("exec") and decisions.least == IsolationLevel.NONE
    assert decide("", {"memory_mb": 10**6, "cpu": 0.1}).limits == Limits(memory_mb=10**6, cpu=0.1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("resources: {maximum: {memory_mb: -4}}", "resources.maximum.memory_mb: .*greater than 0 .got -4"),
        ("resources: {maximum: {memory_mb: lots}}", "resources.maximum.memory_mb"),
        ("resources: {default: {cpu: .nan}}", "resources.default.cpu"),
        ("resources: {maximum: {cpu: .inf}}", "resources.maximum.cpu"),
        ("tools: {allow: [read, nope]}", "unknown tool 'nope': choose from read"),
        ("network: {allow: [{host: 'EXAMPLE.com'}]}", "network.allow.0.host: write a lower-case name"),
        ("network: {allow: [{host: 10.0.0.1/8}]}", "network.allow.0.host"),
        ("network: {allow: [{host: a.b, ports: [0]}]}", "ports are numbers from 1 to 65535"),
        ("filesystem: {read_only: 'yes'}", "filesystem.read_only"),
        ("filesystem: {hidden: [/etc]}", "must be relative to the workspace"),
        ("isolation: strong", "isolation: .*'machine' .got 'strong'"),
        ("memory_mb: 4", "field memory_mb: there is no such field"),
        ("version: 2", "version"),
        ("[1, 2]", "are a list: write a mapping"),
        ("a: &x 1\nb: *x", "aliases are not allowed"),
        ("tools: {allow: [read]}\ntools: {}", "'tools' is given twice"),
        ("x: !!python/object/apply:os.system [id]", "not YAML"),
        ("network: !!bool foo", "not YAML"),
        ("{" * 150, "not YAML"),
        ("{" * 5000, "more than 200 lists"),
        ("#" * 20_000, "write at most 16384"),
    ],
)
def test_what_is_wrong_is_one_line_that_names_field_value_and_fix(text: str, words: str) -> None:
    with pytest.raises(RulesError, match=words) as caught:
        load_rules(text)
    assert "\n" not in str(caught.value)


def test_ceilings_defaults_and_isolation_are_decided() -> None:
    text = "resources: {maximum: {memory_mb: 256, lifetime_s: 60, live: 3}, default: {pids: 8}}\nisolation: process"
    decisions = decide(text)
    assert decisions.limits == Limits(memory_mb=256, lifetime_s=60, pids=8) and not decisions.denials
    (denial,) = decide(text, {"memory_mb": 257}).denials
    assert str(denial) == "sandbox rule resources.maximum.memory_mb allows at most 256, not 257"
    assert "3 sandboxes at once" in str(decide(text, live=3).denials[0])
    low = decide(text, backend="plain", isolation=IsolationLevel.NONE, enforced=())
    assert [denial.rule for denial in low.denials] == ["resources.maximum.memory_mb", "isolation"]
    assert "kernel or more" in str(decide("isolation: kernel").denials[0])
    assert not decide("isolation: kernel", isolation=IsolationLevel.MACHINE).denials


@pytest.mark.parametrize("number", [float("nan"), float("inf"), -1.0])
def test_numbers_that_are_no_limits_are_denied(number: float) -> None:
    assert decide("", {"cpu": number}).denials


def test_a_network_needs_a_backend_that_has_one() -> None:
    text = "network: {allow: [{host: pypi.example, ports: [443]}]}"
    assert "backends with a network" in str(decide(text).denials[0])
    allowed = decide(text, can=frozenset({"network"}))
    assert [(rule.host, rule.ports) for rule in allowed.network] == [("pypi.example", (443,))] and not allowed.denials


SERVER = """
network: {allow: [{host: "*.example.com", ports: [80, 443]}, {host: 10.0.0.0/8}]}
resources: {maximum: {memory_mb: 256}, default: {memory_mb: 128}}
filesystem: {hidden: [secrets]}
tools: {allow: [read, list, exec]}
isolation: process
"""


def under(text: str) -> tuple[Rules, list[str]]:
    rules, denials = load_rules(text).under(load_rules(SERVER))
    return rules, [denial.asked for denial in denials]


@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("a.example.com, ports: [443]", True),
        ("a.b.example.com, ports: [80, 443]", True),
        ("'*.b.example.com', ports: [80]", True),
        ("a.example.com", False),
        ("a.example.com, ports: [22]", False),
        ("example.com, ports: [80]", False),
        ("badexample.com, ports: [80]", False),
        ("10.1.2.3", True),
        ("10.1.0.0/16, ports: [22]", True),
        ("10.0.0.0/7", False),
        ("11.0.0.1", False),
        ("'::1'", False),
    ],
)
def test_a_request_reaches_only_what_the_server_allows(host: str, allowed: bool) -> None:
    _, denied = under(f"network: {{allow: [{{host: {host}}}]}}")
    assert (denied == []) is allowed


def test_a_request_can_only_tighten() -> None:
    rules, denied = under(
        "resources: {maximum: {memory_mb: 9999, pids: 5}}\nisolation: none\ntools: {allow: [read]}\nfilesystem:"
        " {hidden: [x]}"
    )
    assert denied == []
    assert (rules.resources.maximum.memory_mb, rules.resources.maximum.pids) == (256, 5)
    assert (rules.isolation, rules.tools.allow) == ("process", ("read",))
    assert rules.filesystem.hidden == ("secrets", "x") and rules.resources.default.memory_mb == 128
    assert under("tools: {allow: [write]}")[1] == ["write"]
    assert under("")[0].tools.allow == ("read", "list", "exec")


LEVELS = st.sampled_from(["none", "process", "kernel", "machine"])
CEILING = st.none() | st.integers(1, 1000)
ANY_RULES = st.builds(
    lambda level, memory, pids, read_only: Rules.model_validate(
        {
            "isolation": level,
            "resources": {"maximum": {"memory_mb": memory, "pids": pids}},
            "filesystem": {"read_only": read_only},
        }
    ),
    LEVELS,
    CEILING,
    CEILING,
    st.booleans(),
)


@given(ANY_RULES, ANY_RULES, st.integers(0, 1500), st.integers(0, 1500), st.sampled_from(list(IsolationLevel)))
def test_what_the_server_denies_no_request_gets(
    ours: Rules, servers: Rules, memory: int, pids: int, level: IsolationLevel
) -> None:
    asked, here = {"memory_mb": memory, "pids": pids}, {**HERE, "isolation": level}
    merged, denials = ours.under(servers)
    got = merged.check(asked, **here)
    assert denials == ()
    for rules in (ours, servers):
        if rules.check(asked, **here).denials and memory and pids:
            assert got.denials
    if not got.denials:
        assert got.read_only >= servers.filesystem.read_only and level >= servers.least
        for name in ("memory_mb", "pids"):
            ceiling = getattr(servers.resources.maximum, name)
            assert ceiling is None or getattr(got.limits, name) <= ceiling


@given(st.text(max_size=300))
def test_any_text_is_rules_or_one_line(text: str) -> None:
    try:
        load_rules(text)
    except RulesError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("path", "hidden"),
    [
        ("secrets", True),
        ("secrets/a/b", True),
        ("a/secrets", False),
        ("x/.env", True),
        (".env", True),
        ("env", False),
        ("a/b.pem", True),
    ],
)
def test_globs_hide_what_they_match_and_all_below(path: str, hidden: bool) -> None:
    assert hides(["secrets", "*.env", "*.pem"], path) is hidden


def test_the_command_checks_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad, server = tmp_path / "good", tmp_path / "bad", tmp_path / "server"
    good.write_text("tools: {allow: [write]}")
    bad.write_text("tools: 3")
    server.write_text("tools: {allow: [read]}")
    assert run_check([str(good)]) == 0 and '"write"' in capsys.readouterr().out
    assert run_check([str(bad)]) == 1 and "sandbox rules, field tools" in capsys.readouterr().err
    assert run_check([str(good), "--under", str(server)]) == 1 and "allows read, not write" in capsys.readouterr().err
    assert run_check([str(tmp_path / "none")]) == 1 and "can't be read" in capsys.readouterr().err
