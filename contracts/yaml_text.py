"""YAML that users write. A key that a mapping has twice is an error: readers of YAML keep the last one silently."""

from __future__ import annotations

from typing import Any

import yaml

_LARGEST = 1 << 24
"""Values and characters of a document with its aliases written out. Nested aliases would fill the memory of whoever
copies or prints the value.
"""


class UniqueKeys(yaml.SafeLoader):
    """Loader of plain values that refuses duplicate keys, and documents whose aliases expand to millions of values."""

    def get_single_node(self) -> yaml.Node | None:
        """The document's node."""
        node: yaml.Node | None = super().get_single_node()
        if node is not None and _size(node, {}) > _LARGEST:
            raise yaml.constructor.ConstructorError(None, None, "its aliases make too many values", node.start_mark)
        return node

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


def _size(node: yaml.Node, sizes: dict[int, int]) -> int:
    """Number of values and characters of a node, with its aliases expanded.

    sizes: of the nodes counted so far, by id. A node that contains itself counts there without its parts.
    """
    if id(node) not in sizes:
        sizes[id(node)] = 1 + len(node.value)
        if not isinstance(node, yaml.ScalarNode):
            parts = (
                node.value if isinstance(node, yaml.SequenceNode) else [part for pair in node.value for part in pair]
            )
            sizes[id(node)] += sum(_size(part, sizes) for part in parts)
    return sizes[id(node)]
