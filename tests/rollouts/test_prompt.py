"""What a policy is told before its first turn."""

from __future__ import annotations

import dataclasses
import json

from rollouts_script import one_file_task

from inference.rollouts.config import RolloutConfig
from inference.rollouts.prompt import first_messages


def test_tools_are_listed_as_qwen3s_template_lists_them() -> None:
    config = RolloutConfig(system_prompt="You repair.", tool_prompt=True)
    (role, system), user = first_messages(config, one_file_task(0))
    assert role == "system" and user == ("user", one_file_task(0).instruction)
    head, rest = system.split("\n<tools>\n")
    listed, tail = rest.split("\n</tools>\n")
    assert head.startswith("You repair.\n\n# Tools\n\nYou may call one or more functions")
    assert tail.endswith('<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>')
    tools = {tool["function"]["name"]: tool for tool in map(json.loads, listed.splitlines())}
    assert list(tools) == ["read", "write", "edit", "list", "search", "exec"]
    assert tools["exec"]["type"] == "function"
    assert tools["exec"]["function"]["parameters"]["required"] == ["command"]


def test_the_list_follows_the_tasks_toolset() -> None:
    config = RolloutConfig(tool_prompt=True)
    (_, system), _ = first_messages(config, dataclasses.replace(one_file_task(0), toolset="answer"))
    assert '"name": "submit_answer"' in system and '"name": "lint"' not in system
    (_, system), _ = first_messages(config, dataclasses.replace(one_file_task(0), toolset="files"))
    assert '"name": "exec"' not in system


def test_prompt_contains_only_configured_messages() -> None:
    assert [role for role, _ in first_messages(RolloutConfig(), one_file_task(0))] == ["user"]
    assert first_messages(RolloutConfig(system_prompt="Hi."), one_file_task(0))[0] == ("system", "Hi.")


def test_a_config_without_the_list_is_written_as_before_there_was_one() -> None:
    assert "tool_prompt" not in RolloutConfig().model_dump(mode="json")
    told = RolloutConfig(tool_prompt=True)
    assert RolloutConfig.model_validate(told.model_dump(mode="json")) == told
    assert RolloutConfig.model_validate_json(told.model_dump_json(exclude={"group_size"})).tool_prompt
