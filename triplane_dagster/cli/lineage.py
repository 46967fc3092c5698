"""`triplane lineage`: show what made an artifact or episode, and what was made from it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Annotated, Any

import typer
from rich.text import Text
from rich.tree import Tree

from contracts.store import open_store
from contracts.visible import visible
from triplane_dagster.cli.options import AsJson
from triplane_dagster.cli.output import console, print_json
from triplane_dagster.lineage import EpisodeUse, Node, Step, Trace, trace

SHORT_META = 90
"""Maximum characters of an artifact's meta in the tree."""


def lineage(
    query: Annotated[
        str, typer.Argument(help="Episode id, or digest or key of any artifact, or an unambiguous prefix.")
    ],
    as_json: AsJson = False,
) -> None:
    """Show what made an episode, a checkpoint or any artifact, and everything made from it.

    Examples:

        triplane lineage 3f9c2a71          # the first digits, as `triplane status` prints them
        triplane lineage 3f9c2a71 --json   # the whole graph, with configs
    """
    found = trace(open_store(), query)
    if as_json:
        print_json(trace_json(found))
    else:
        _print_trace(found)


def trace_json(found: Trace) -> dict[str, Any]:
    """A trace as JSON: nodes with meta and config, edges with URIs and role."""
    steps = (*found.ancestors, *found.descendants)
    edges = {(step.edge.parent, step.edge.child, step.edge.role) for step in steps}
    return {
        "starts": [_node_json(node) for node in found.starts],
        "episode": _episode_json(found),
        "made_of": [_step_json(step) for step in found.ancestors],
        "made_into": [_step_json(step) for step in found.descendants],
        "datasets": [_use_json(use) for use in found.uses],
        "edges": [{"parent": parent, "child": child, "role": role} for parent, child, role in sorted(edges)],
    }


def _print_trace(found: Trace) -> None:
    out = console()
    for node in found.starts:
        out.print(Text(visible(_line(node)), "bold"))
    if len(found.starts) > 1:
        out.print(f"made {len(found.starts)} times with equal content; --json tells them apart by key")
    elif found.starts[0].config:
        config = json.dumps(dict(found.starts[0].config), sort_keys=True)
        out.print(Text(visible(f"  config  {config}"), "dim"), soft_wrap=True)
    episode = _episode_json(found)
    if episode:
        for name, value in episode.items():
            out.print(Text(visible(f"  {name:<15} {value}")))
    out.print(_tree("made of", found.ancestors, none="nothing: it has no parents"))
    for use in found.uses:
        kept = "trained on it" if use.membership.kept else f"left it out: {use.membership.reason}"
        out.print(Text(f"dataset {use.membership.dataset.ref.short} {kept} (reward {use.membership.reward})"))
        for node in use.checkpoints:
            out.print(Text(f"  -> {_line(node)}"))
    none = "nothing yet" if found.episode is None else "no descendants: no checkpoint was trained on it"
    out.print(_tree("made into", found.descendants, none=none))


def _tree(title: str, steps: tuple[Step, ...], *, none: str) -> Tree:
    """Tree of the walk; each artifact appears once, below the artifact through which it was first reached.

    Groups are only counted, since their rollouts represent them.
    """
    tree = Tree(Text(title, "bold"))
    if not steps:
        tree.add(Text(none, "dim"))
    branches: dict[str, Tree] = {}
    groups: Counter[str] = Counter()
    for step in steps:
        uri = step.node.ref.uri
        near = step.edge.child if uri == step.edge.parent else step.edge.parent
        if step.node.ref.kind == "group":
            groups[near] += 1
        else:
            branches[uri] = branches.get(near, tree).add(Text(visible(f"{step.edge.role}: {_line(step.node)}")))
    for near, count in groups.items():
        branches.get(near, tree).add(Text(f"{count} groups", "dim"))
    return tree


def _line(node: Node) -> str:
    if not node.present:
        return f"{node.ref.kind} {node.ref.short} (not in this store)"
    facts = ", ".join(
        f"{name}={value}" for name, value in sorted(node.meta.items()) if not isinstance(value, (dict, list))
    )
    return f"{node.ref.kind} {node.ref.short}" + (f"  {facts[:SHORT_META]}" if facts else "")


def _episode_json(found: Trace) -> dict[str, Any] | None:
    if found.episode is None:
        return None
    episode = found.episode.read()
    return {
        "episode": episode.episode_id,
        "policy": episode.policy_version,
        "task": episode.task_id,
        "task_digest": episode.task_digest,
        "image_digest": episode.files_digest,
        "group": episode.group_id,
        "sample": episode.sample,
        "seed": episode.seed,
        "outcome": episode.outcome.value,
        "final_state": episode.final_state,
    }


def _node_json(node: Node) -> dict[str, Any]:
    return {
        **node.ref.model_dump(),
        "uri": node.ref.uri,
        "present": node.present,
        "code_version": node.code_version,
        "meta": dict(node.meta),
        "config": dict(node.config),
    }


def _step_json(step: Step) -> dict[str, Any]:
    return {**_node_json(step.node), "role": step.edge.role, "distance": step.distance}


def _use_json(use: EpisodeUse) -> dict[str, Any]:
    member = use.membership
    return {
        "dataset": member.dataset.ref.digest,
        "kept": member.kept,
        "reason": member.reason,
        "reward": member.reward,
        "checkpoints": [node.ref.digest for node in use.checkpoints],
    }
