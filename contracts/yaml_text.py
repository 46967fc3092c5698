"""YAML that users write. A key that a mapping has twice is an error: readers of YAML keep the last one silently."""

from __future__ import annotations

from typing import Any

import yaml


class UniqueKeys(yaml.SafeLoader):
    """Loader of plain values that refuses duplicate keys."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Mapping as written, before `<<` adds the keys of another one."""
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
            seen.add(str(key.value))
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """Value of a node. PyYAML's functions raise other errors for what is not of its tag, such as `!!bool x`."""
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError):
            problem = f"this is no {node.tag.rpartition(':')[2]}"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from None


def load_yaml(text: str, loader: type[UniqueKeys] = UniqueKeys) -> Any:
    """Value of a YAML text. Raises ValueError with the reason in one line."""
    try:
        return yaml.load(text, loader)
    # ValueError: a date such as 2026-02-30. OverflowError: a character such as "\UFFFFFFFF"
    except (yaml.YAMLError, RecursionError, ValueError, OverflowError) as error:
        raise ValueError(" ".join(str(error).split()) or type(error).__name__) from None
