"""The tools an agent calls: one definition each, and `tool_steps`, which runs those that act on files.

In: a `ToolCall` and the files that it asks for. Out: a `ToolResult` whose text depends on nothing but the two.
The server answers `tool_steps` from a sandbox and the scripted expert from memory, so their episodes read the same,
byte for byte. `exec`, `lint` and `semantic_search` run in a sandbox only. May be imported by any plane.
"""

from envd.tools.files import Store, tool_steps
from envd.tools.output import MAX_OUTPUT_BYTES, Output
from envd.tools.paths import relative
from envd.tools.schemas import (
    ALL_TOOLS,
    DEFAULT_TOOLSET,
    SUBMIT_ANSWER,
    TOOLS,
    TOOLSETS,
    ToolSpec,
    check_arguments,
    toolset_named,
)

__all__ = [
    "ALL_TOOLS",
    "DEFAULT_TOOLSET",
    "MAX_OUTPUT_BYTES",
    "SUBMIT_ANSWER",
    "TOOLS",
    "TOOLSETS",
    "Output",
    "Store",
    "ToolSpec",
    "check_arguments",
    "relative",
    "tool_steps",
    "toolset_named",
]
