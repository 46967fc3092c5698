"""Strict YAML for files that grant rights: no aliases and no duplicate keys, which a reader could overlook."""

from __future__ import annotations

from typing import Any

import yaml

_MOST_OPENED = 200
"""Maximum number of `{`, `[` and `- ` in a text: parsing time grows with the square of the nesting depth."""


def load_strictly(text: str) -> Any:
    """Parse a YAML text. Raises ValueError with the reason in one line."""
    if text.count("{") + text.count("[") + text.count("- ") > _MOST_OPENED:
        raise ValueError(f"more than {_MOST_OPENED} lists and mappings")
    try:
        return yaml.load(text, _Strict)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None


class _Strict(yaml.SafeLoader):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [str(key.value) for key, _ in node.value]
        if len(set(keys)) != len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise yaml.constructor.ConstructorError(None, None, f"key {twice!r} is given twice", node.start_mark)
        return super().construct_mapping(node, deep)
