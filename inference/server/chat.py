"""Convert chat messages to prompt tokens and sampled text to a message, with the markup of contracts.chat."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from contracts.chat import CALL_START, END_OF_TEXT, TURN_END, ChatTokenizer, ToolCallText, parse_turn
from contracts.digests import canonical_json
from contracts.errors import SchemaError
from inference.errors import BadRequest
from inference.server.api import CalledTool, Message, Tool

_ENDS = (TURN_END, END_OF_TEXT)
"""Texts of the tokens at which a message stops."""
_TOOLS = "You may call these tools, described as JSON, one a line:"


def prompt_tokens(tokenizer: ChatTokenizer, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int]:
    """Tokens of the conversation up to the start of the assistant's turn.

    Results of parallel calls share one turn.
    """
    leading, index = _leading(messages, tools)
    if index == len(messages):
        return tokenizer.prompt(leading)
    ids = tokenizer.prompt(leading)
    while index < len(messages):
        message = messages[index]
        if message.role != "assistant":
            raise BadRequest(
                f"message {index} has role {message.role}: after the first user message, assistant and tool (or user)"
                " turns alternate"
            )
        ids += tokenizer.policy_turn([_call(call) for call in message.tool_calls], message.content or "")
        index += 1
        responses = []
        while index < len(messages) and messages[index].role == "tool":
            responses.append(messages[index].content or "")
            index += 1
        if responses:
            ids += tokenizer.environment_turn(responses)
            continue
        following = []
        while index < len(messages) and messages[index].role in ("user", "system"):
            following.append((messages[index].role, messages[index].content or ""))
            index += 1
        if not following:
            raise BadRequest(f"message {index - 1} is the assistant's: the last message must be the user's or a tool's")
        ids += tokenizer.reply(following)
    return ids


def answer_message(text: str, answer_id: str) -> tuple[dict[str, Any], str]:
    """Assistant message of sampled text, and its finish reason ("tool_calls" or "stop").

    Malformed calls remain text.
    """
    body = text.removesuffix(next((end for end in _ENDS if text.endswith(end)), ""))
    turn = parse_turn(body)
    if turn.error is not None or not turn.calls:
        return {"role": "assistant", "content": body}, "stop"
    calls = [
        {
            "id": f"call_{answer_id}_{index}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for index, call in enumerate(turn.calls)
    ]
    before = body.partition(CALL_START)[0].rstrip("\n")
    return {"role": "assistant", "content": before or None, "tool_calls": calls}, "tool_calls"


class MessageParts:
    """Content of an assistant's message, while its text is sampled. Tool calls are known at its end."""

    def __init__(self) -> None:
        self._text = self._sent = ""

    def add(self, text: str) -> str:
        """Further content, with as much of the text as can't be part of a call or of the markup after the message."""
        self._text += text
        sure, call, _ = self._text.partition(CALL_START)
        if not call:
            marks = (mark[:length] for mark in (CALL_START, *_ENDS) for length in range(len(mark), 0, -1))
            sure = sure.removesuffix(max((mark for mark in marks if sure.endswith(mark)), key=len, default=""))
        more = sure.rstrip("\n")[len(self._sent) :]
        self._sent += more
        return more

    def end(self, answer_id: str) -> tuple[dict[str, Any], str]:
        """What is left of the message, and its finish reason: see `answer_message`."""
        message, reason = answer_message(self._text, answer_id)
        left = {"content": (message["content"] or "")[len(self._sent) :]}
        calls = [{"index": place, **call} for place, call in enumerate(message.get("tool_calls", ()))]
        return left | ({"tool_calls": calls} if calls else {}), reason


def _leading(messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[tuple[str, str]], int]:
    """Messages before the first assistant turn, with the tools described first, and their number."""
    index = 0
    leading: list[tuple[str, str]] = []
    if tools:
        lines = [json.dumps(tool.function.model_dump(), ensure_ascii=False, sort_keys=True) for tool in tools]
        leading.append(("system", "\n".join([_TOOLS, *lines])))
    while index < len(messages) and messages[index].role in ("system", "user"):
        role, content = messages[index].role, messages[index].content or ""
        if role == "system" and leading and leading[-1][0] == "system":
            leading[-1] = ("system", f"{content}\n{leading[-1][1]}")
        else:
            leading.append((role, content))
        index += 1
    return leading, index


def _call(call: CalledTool) -> ToolCallText:
    arguments = call.function.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
            canonical_json(arguments)
        except (ValueError, SchemaError, RecursionError):
            raise BadRequest(f"arguments of tool call {call.function.name} are not JSON: send an object") from None
    if not isinstance(arguments, dict):
        raise BadRequest(f"arguments of tool call {call.function.name} are not an object")
    return ToolCallText(call.function.name, arguments)
