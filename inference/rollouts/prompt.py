"""First messages of an episode: system prompt, tools if they are listed, and the task."""

from __future__ import annotations

from contracts.chat import tools_text
from contracts.tasks import Task
from envd.tools import toolset_named
from inference.rollouts.config import RolloutConfig


def first_messages(config: RolloutConfig, task: Task) -> list[tuple[str, str]]:
    """(role, content) of each message before the policy's first turn."""
    said = [config.system_prompt] if config.system_prompt else []
    listed = toolset_named(task.toolset).listed.values() if config.tool_prompt else ()
    told = [tools_text(tool.json_schema() for tool in listed)] if listed else []
    system = [("system", "\n\n".join(said + told))] if said or told else []
    return [*system, ("user", task.instruction)]
