"""Artifacts of a store as a graph, walked in both directions from an episode, a checkpoint or any digest.

    manifests' parents  ->  Graph  ->  trace(query)  ->  ancestors: what made it    descendants: what was made of it

Pure functions over committed manifests; nothing is written or cached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from contracts.artifacts import Artifact, ArtifactRef, list_artifacts
from contracts.errors import ArtifactMissing
from contracts.store import Store
from triplane_dagster.episode_index import MERGED, UNMERGED, EpisodeHome, Membership, find_episodes, memberships


@dataclass(frozen=True)
class Node:
    """One artifact, identified by its URI, since equal content may exist under two keys."""

    ref: ArtifactRef
    meta: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    code_version: str = ""
    present: bool = True
    """False: a manifest names it as a parent, but this store does not hold it."""


@dataclass(frozen=True)
class Edge:
    """`parent` was an input of `child`, in the role from the child's manifest. Both are URIs."""

    parent: str
    child: str
    role: str


@dataclass(frozen=True)
class Graph:
    """All artifacts of a store by URI, and the edges into and out of each."""

    nodes: Mapping[str, Node]
    parents: Mapping[str, tuple[Edge, ...]]
    children: Mapping[str, tuple[Edge, ...]]


@dataclass(frozen=True)
class Step:
    """Node of a walk, with the edge by which it was reached and its distance."""

    node: Node
    edge: Edge
    distance: int


@dataclass(frozen=True)
class EpisodeUse:
    """How one dataset used the traced episode, and the checkpoints trained on that dataset."""

    membership: Membership
    checkpoints: tuple[Node, ...]


@dataclass(frozen=True)
class Trace:
    """Result of `triplane lineage`."""

    starts: tuple[Node, ...]
    """Artifacts with the requested digest, or the artifact with the requested episode."""
    episode: EpisodeHome | None
    ancestors: tuple[Step, ...]
    descendants: tuple[Step, ...]
    uses: tuple[EpisodeUse, ...]
    """Uses of an episode; empty for other queries."""


def build_graph(store: Store) -> Graph:
    """Index every committed artifact of `store`."""
    nodes: list[Node] = []
    edges: list[Edge] = []
    gone: dict[str, Node] = {}
    for artifact in list_artifacts(store):
        nodes.append(_node(artifact))
        for role, ref in sorted(artifact.manifest.parents.items()):
            gone[ref.uri] = Node(ref, present=False)
            edges.append(Edge(ref.uri, artifact.ref.uri, role))
    return link([*gone.values(), *nodes], edges)


def link(nodes: Iterable[Node], edges: Sequence[Edge]) -> Graph:
    """Graph of nodes and edges; of two nodes with the same URI the later counts.

    Every edge's ends must be among the nodes.
    """
    by_uri = {node.ref.uri: node for node in nodes}
    return Graph(by_uri, parents=_grouped(by_uri, edges, "child"), children=_grouped(by_uri, edges, "parent"))


def resolve(graph: Graph, prefix: str) -> tuple[Node, ...]:
    """Artifacts whose content digest or action key starts with `prefix`; several only if their content is equal.

    Raises ArtifactMissing if nothing matches or contents differ.
    """
    found = _named(graph, prefix)
    if not found:
        raise ArtifactMissing(
            f"no artifact has a digest or key that starts with {prefix!r}: `triplane status` lists digests"
        )
    if len({node.ref.digest for node in found}) > 1:
        some = ", ".join(f"{node.ref.kind} {node.ref.short}" for node in found[:4])
        raise ArtifactMissing(
            f"{prefix!r} is ambiguous, {len(found)} digests or keys start with it ({some}): give more digits"
        )
    return tuple(found)


def ancestors(graph: Graph, starts: tuple[Node, ...]) -> tuple[Step, ...]:
    """All artifacts that `starts` were made from, nearest first."""
    return _walk(graph, starts, graph.parents, "parent")


def descendants(graph: Graph, starts: tuple[Node, ...]) -> tuple[Step, ...]:
    """All artifacts that were made from `starts`, nearest first."""
    return _walk(graph, starts, graph.children, "child")


def trace(store: Store, query: str) -> Trace:
    """Walk in both directions from an episode id or an artifact's digest or key, each of which may be a prefix."""
    graph = build_graph(store)
    others = _named(graph, query)
    homes = find_episodes(store, query, MERGED) or ([] if others else find_episodes(store, query, UNMERGED))
    if not homes:
        starts = resolve(graph, query)
        return Trace(starts, None, ancestors(graph, starts), descendants(graph, starts), ())
    if len(homes) > 1 or others:
        some = [f"episode {home.episode_id[:16]}" for home in homes[:3]]
        some += [f"{node.ref.kind} {node.ref.short}" for node in others[:3]]
        raise ArtifactMissing(f"{query!r} is ambiguous ({', '.join(some)}): give more digits")
    starts = (graph.nodes[homes[0].artifact.ref.uri],)
    uses = tuple(_use(graph, membership) for membership in memberships(store, homes[0].episode_id))
    learned = tuple(node for use in uses if use.membership.kept for node in use.checkpoints)
    return Trace(starts, homes[0], ancestors(graph, starts), descendants(graph, learned), uses)


def _named(graph: Graph, prefix: str) -> list[Node]:
    matches = [
        node for node in graph.nodes.values() if node.ref.digest.startswith(prefix) or node.ref.key.startswith(prefix)
    ]
    return sorted(matches, key=lambda node: node.ref.uri) if prefix else []


def _use(graph: Graph, membership: Membership) -> EpisodeUse:
    edges = graph.children[membership.dataset.ref.uri]
    trained = tuple(graph.nodes[edge.child] for edge in edges if graph.nodes[edge.child].ref.kind == "checkpoint")
    return EpisodeUse(membership, trained)


def _node(artifact: Artifact) -> Node:
    manifest = artifact.manifest
    return Node(artifact.ref, manifest.meta, manifest.config, manifest.code_version)


def _grouped(nodes: Mapping[str, Node], edges: Sequence[Edge], end: str) -> dict[str, tuple[Edge, ...]]:
    found: dict[str, list[Edge]] = {uri: [] for uri in nodes}
    for edge in edges:
        found[getattr(edge, end)].append(edge)
    return {uri: tuple(group) for uri, group in found.items()}


def _walk(
    graph: Graph, starts: tuple[Node, ...], edges: Mapping[str, tuple[Edge, ...]], far_end: str
) -> tuple[Step, ...]:
    seen = {node.ref.uri for node in starts}
    queue = deque((node.ref.uri, 0) for node in starts)
    steps: list[Step] = []
    while queue:
        uri, distance = queue.popleft()
        for edge in edges[uri]:
            other: str = getattr(edge, far_end)
            if other not in seen:
                seen.add(other)
                steps.append(Step(graph.nodes[other], edge, distance + 1))
                queue.append((other, distance + 1))
    return tuple(steps)
