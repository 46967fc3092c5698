"""Strict YAML for files that grant rights: no aliases and no duplicate keys, which a reader could overlook."""

from __future__ import annotations

from typing import Any

import yaml

from contracts.yaml_text import UniqueKeys, load_yaml

_MOST_OPENED = 200
"""Maximum number of `{`, `[` and `- ` in a text: parsing time grows with the square of the nesting depth."""


def load_strictly(text: str) -> Any:
    """Parse a YAML text. Raises ValueError with the reason in one line."""
    if text.count("{") + text.count("[") + text.count("- ") > _MOST_OPENED:
        raise ValueError(f"more than {_MOST_OPENED} lists and mappings")
    return load_yaml(text, _Strict)


class _Strict(UniqueKeys):
    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.constructor.ConstructorError(None, None, "aliases are not allowed", self.peek_event().start_mark)  # type: ignore[no-untyped-call]
        return super().compose_node(parent, index)
