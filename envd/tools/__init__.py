"""The tools an agent calls: one definition each, and pure functions that act on a workspace directory.

In: a workspace root and a `ToolCall`. Out: a `ToolResult` whose text depends on nothing but the two.
The agent inside a sandbox runs exactly these functions, so scripted episodes rendered with `run_file_tool` read the
same as live ones, byte for byte. `exec` needs a live shell and runs in a sandbox only. May be imported by any plane.
"""

from envd.tools.files import run_file_tool
from envd.tools.output import MAX_OUTPUT_BYTES, Output
from envd.tools.schemas import TOOLS, ToolSpec, check_arguments

__all__ = ["MAX_OUTPUT_BYTES", "TOOLS", "Output", "ToolSpec", "check_arguments", "run_file_tool"]
