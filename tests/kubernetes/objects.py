"""Objects of a stand-in for a Kubernetes cluster: by namespace, kind and name, with selectors, owners and events."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

Object = dict[str, Any]


class Refused(Exception):
    """The API server refuses a request, with an HTTP status and a reason."""

    def __init__(self, status: int, reason: str, message: str) -> None:
        super().__init__(message)
        self.status, self.reason = status, reason


def now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


class Objects:
    """Everything that the API server stores. Hold `lock` to change an object."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.every: dict[tuple[str, str, str], Object] = {}
        self._version = 0

    def create(self, namespace: str, plural: str, made: Object) -> Object:
        """Store an object. Raises Refused (409) if its name is taken."""
        with self.lock:
            meta = made.setdefault("metadata", {})
            if "name" not in meta:
                meta["name"] = meta.get("generateName", plural + "-") + uuid.uuid4().hex[:5]
            name = meta["name"]
            if (namespace, plural, name) in self.every:
                raise Refused(409, "AlreadyExists", f'{plural} "{name}" already exists')
            meta |= {"namespace": namespace, "uid": str(uuid.uuid4()), "creationTimestamp": now()}
            self.every[namespace, plural, name] = made
            self.touch(made)
            return made

    def touch(self, changed: Object) -> None:
        self._version += 1
        changed["metadata"]["resourceVersion"] = str(self._version)

    def get(self, namespace: str, plural: str, name: str) -> Object:
        found = self.every.get((namespace, plural, name))
        if found is None:
            raise Refused(404, "NotFound", f'{plural} "{name}" not found')
        return found

    def remove(self, gone: Object, plural: str) -> None:
        self.every.pop((gone["metadata"]["namespace"], plural, gone["metadata"]["name"]), None)

    def all(self, plural: str, namespace: str | None = None) -> list[Object]:
        with self.lock:
            return [
                each
                for (place, kind, _), each in self.every.items()
                if kind == plural and (namespace is None or place == namespace)
            ]

    def owned_by(self, plural: str, owner: Object) -> list[Object]:
        uid = owner["metadata"]["uid"]
        return [each for each in self.all(plural) if uid in _owners(each)]

    def orphans(self) -> Iterator[tuple[str, Object]]:
        """Objects whose owners are gone, which the garbage collector deletes."""
        with self.lock:
            alive = {each["metadata"]["uid"] for each in self.every.values()}
            for (_, plural, _), each in list(self.every.items()):
                owners = _owners(each)
                if owners and not owners & alive:
                    yield plural, each

    def event(self, about: Object, kind: str, reason: str, message: str, type_: str = "Warning") -> None:
        """Record an event about an object."""
        meta = about["metadata"]
        involved = {"kind": kind, "name": meta["name"], "namespace": meta["namespace"], "uid": meta["uid"]}
        event = {
            "kind": "Event",
            "apiVersion": "v1",
            "metadata": {"name": f"{meta['name']}.{uuid.uuid4().hex[:12]}"},
            "involvedObject": involved,
            "reason": reason,
            "message": message,
            "type": type_,
            "firstTimestamp": now(),
            "lastTimestamp": now(),
            "count": 1,
            "source": {"component": "stand-in"},
        }
        self.create(meta["namespace"], "events", event)


def _owners(each: Object) -> set[str]:
    return {owner["uid"] for owner in each["metadata"].get("ownerReferences", [])}


def matches(each: Object, labels: str, fields: str) -> bool:
    """Whether an object matches a label selector and a field selector."""
    own = each["metadata"].get("labels", {})
    return all(_labelled(own, term) for term in _terms(labels)) and all(
        _has_field(each, term) for term in fields.split(",") if term
    )


def _terms(selector: str) -> Iterator[str]:
    depth, start = 0, 0
    for at, sign in enumerate(selector + ","):
        depth += (sign == "(") - (sign == ")")
        if sign == "," and depth == 0:
            if selector[start:at].strip():
                yield selector[start:at].strip()
            start = at + 1


def _labelled(labels: dict[str, str], term: str) -> bool:
    for words, wanted in ((" notin ", False), (" in ", True)):
        if words in term:
            key, _, values = term.partition(words)
            listed = {value.strip() for value in values.strip(" ()").split(",")}
            return (labels.get(key.strip()) in listed) == wanted
    if "!=" in term:
        key, _, value = term.partition("!=")
        return labels.get(key) != value
    if "=" in term:
        key, _, value = term.replace("==", "=").partition("=")
        return labels.get(key) == value
    return term[1:] not in labels if term.startswith("!") else term in labels


def _has_field(each: Object, term: str) -> bool:
    path, _, value = term.replace("==", "=").partition("=")
    negated = path.endswith("!")
    found: Any = each
    for part in path.rstrip("!").split("."):
        found = found.get(part, "") if isinstance(found, dict) else ""
    return (str(found) == value) != negated


def merge(old: Any, patch: Any) -> Any:
    """JSON merge patch (RFC 7386)."""
    if not isinstance(patch, dict):
        return patch
    merged = dict(old) if isinstance(old, dict) else {}
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = merge(merged.get(key), value)
    return merged


def seconds_since(stamp: str) -> float:
    return time.time() - datetime.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
