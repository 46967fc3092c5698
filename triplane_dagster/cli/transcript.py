"""Render an episode for reading: task, messages, tool results, diff and verdict."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.panel import Panel
from rich.syntax import Syntax
from rich.text import Text

from contracts.artifacts import list_artifacts
from contracts.chat import ChatTokenizer, message_views
from contracts.episodes import Episode, TokenRole
from contracts.errors import ArtifactMissing
from contracts.store import Store
from contracts.visible import visible
from inference.engines.config import OUTSIDE_POLICY
from resources.quarantine import Quarantine
from triplane_dagster.cli.output import cell
from triplane_dagster.episode_index import EpisodeHome, Membership, memberships, rewards_of

STYLES = {
    TokenRole.PROMPT: ("task", "blue"),
    TokenRole.POLICY: ("policy", "green"),
    TokenRole.ENVIRONMENT: ("environment", "yellow"),
}


def tokenizer_of(store: Store, policy_version: str) -> ChatTokenizer:
    """Tokenizer of the policy with the digest `policy_version`: a checkpoint, or one at a server.

    Raises ArtifactMissing if the store no longer has it.
    """
    for policy in (each for kind in ("checkpoint", OUTSIDE_POLICY) for each in list_artifacts(store, kind)):
        if policy.ref.digest == policy_version:
            return ChatTokenizer.from_directory(policy.path("tokenizer.json").parent)
    raise ArtifactMissing(
        f"store {store.url} has no policy {policy_version[:12]}, whose tokenizer decodes this episode: open the"
        " store that made it"
    )


def episode_json(store: Store, home: EpisodeHome) -> dict[str, Any]:
    """All data of an episode: facts, messages by role, tool calls, diff, reward, and the datasets that used it."""
    episode = home.read()
    return {
        **content_of(episode, tokenizer_of(store, episode.policy_version)),
        "artifact": home.artifact.ref.uri,
        "reward": rewards_of(store, home.artifact).get(episode.episode_id),
        "datasets": [_membership(each) for each in memberships(store, episode.episode_id)],
        "quarantine": [
            {"mark": mark.number, "reason": mark.reason} for mark in Quarantine(store).of_episode(episode.episode_id)
        ],
        "telemetry": home.telemetry(),
    }


def content_of(episode: Episode, tokenizer: ChatTokenizer) -> dict[str, Any]:
    """What an episode's own rows say: facts, messages by role, tool calls, diff."""
    return {
        **_facts(episode),
        "failure": episode.failure,
        "seed": episode.seed,
        "messages": [_messages(tokenizer, sequence.token_ids, sequence.token_role) for sequence in episode.sequences],
        "tool_calls": [vars(call) for call in episode.tool_calls],
        "diff": episode.final_diff.decode(errors="replace"),
    }


def print_episode(out: Console, found: dict[str, Any]) -> None:
    """Print the result of `episode_json`."""
    facts = {
        name: found[name] for name in ("episode", "policy", "task", "group", "sample", "outcome", "tokens", "artifact")
    }
    if found["failure"]:
        facts["failure"] = found["failure"]
    out.print(Text("\n".join(f"{name:<9} {cell(value)}" for name, value in facts.items())))
    for index, messages in enumerate(found["messages"]):
        if len(found["messages"]) > 1:
            out.print(Text(f"context {index}", "bold"))
        for message in messages:
            title = f"{message['role']}, {message['tokens']} tokens"
            out.print(
                Panel(Text(visible(message["text"])), title=title, title_align="left", border_style=message["style"])
            )
    for call in found["tool_calls"]:
        sign = "ok    " if call["ok"] else "failed"
        out.print(
            Text(
                visible(f"turn {call['turn']}  {sign}  {call['name']} {call['arguments']}"), "" if call["ok"] else "red"
            )
        )
    if found["diff"]:
        out.print(
            Panel(
                Syntax(visible(found["diff"]), "diff", background_color="default"),
                title="final diff",
                title_align="left",
            )
        )
    else:
        out.print(Text("final diff: empty", "dim"))
    _print_reward(out, found["reward"])
    for each in found["quarantine"]:
        out.print(Text(visible(f"quarantined by mark {each['mark']}: {each['reason']}"), "red"))
    for each in found["datasets"]:
        said = "kept it" if each["kept"] else f"left it out: {each['reason']}"
        out.print(Text(f"dataset {each['dataset'][:12]} {said}"))


def _print_reward(out: Console, reward: dict[str, Any] | None) -> None:
    if reward is None:
        out.print(Text("not graded yet", "dim"))
        return
    parts = ", ".join(f"{each['name']} {cell(each['value'])}" for each in reward["components"] or [])
    verdict = "solved" if reward["solved"] else "not solved" if reward["solved"] is not None else "not graded"
    tests = f"{cell(reward['tests_passed'])} of {cell(reward['tests_total'])} hidden tests passed"
    out.print(
        Text(f"verdict {verdict} ({tests}, {reward['verdict']}), reward {cell(reward['reward'])} ({parts})", "bold")
    )
    for name in reward.get("findings") or ():
        out.print(Text(f"finding {visible(name)}", "red"))


def _facts(episode: Episode) -> dict[str, Any]:
    return {
        "episode": episode.episode_id,
        "policy": episode.policy_version,
        "task": episode.task_id,
        "group": episode.group_id,
        "sample": episode.sample,
        "attempt": episode.attempt,
        "outcome": episode.outcome.value,
        "turns": episode.turns,
        "format_errors": episode.format_errors,
        "tokens": sum(len(sequence.token_ids) for sequence in episode.sequences),
        "policy_tokens": episode.policy_tokens,
    }


def _messages(tokenizer: ChatTokenizer, token_ids: Sequence[int], roles: Sequence[int]) -> list[dict[str, Any]]:
    found = []
    for view in message_views(tokenizer, token_ids, roles):
        name, style = STYLES[TokenRole(view["role"])]
        found.append({"role": name, "style": style, "text": view["text"], "tokens": view["end"] - view["start"]})
    return found


def _membership(member: Membership) -> dict[str, Any]:
    return {"dataset": member.dataset.ref.digest, "kept": member.kept, "reason": member.reason, "reward": member.reward}
