"""First messages of an episode: system prompt, tools if they are listed, and the task."""

from __future__ import annotations

import json

from contracts.chat import CALL_END, CALL_START
from contracts.tasks import Task
from envd.tools import toolset_named
from inference.rollouts.config import RolloutConfig

_TOOLS = """\
# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within {start}{end} XML tags:
{start}
{{"name": <function-name>, "arguments": <args-json-object>}}
{end}"""


def first_messages(config: RolloutConfig, task: Task) -> list[tuple[str, str]]:
    """(role, content) of each message before the policy's first turn."""
    said = [config.system_prompt] if config.system_prompt else []
    told = [tools_text(task.toolset)] if config.tool_prompt else []
    system = [("system", "\n\n".join(said + told))] if said or told else []
    return [*system, ("user", task.instruction)]


def tools_text(toolset: str = "") -> str:
    """List of a toolset's tools in the format of the chat template that Qwen3 was trained with."""
    tools = "\n".join(
        json.dumps(tool.json_schema(), ensure_ascii=False) for tool in toolset_named(toolset).listed.values()
    )
    return _TOOLS.format(tools=tools, start=CALL_START, end=CALL_END)
