"""Convert messages to tokens and back: ChatML with `<tool_call>` and `<tool_response>`, as Qwen3 uses it.

    <|im_start|>user\\n{instruction}<|im_end|>\\n<|im_start|>assistant\\n          prompt tokens
    <tool_call>{"name":"read","arguments":{"path":"a.py"}}</tool_call><|im_end|>  policy tokens, kept as sampled
    \\n<|im_start|>user\\n<tool_response>1 def f():...</tool_response><|im_end|>\\n
    <|im_start|>assistant\\n                                                      environment tokens
    ...

Markup is encoded by token id; other text is encoded with added tokens disabled, so that no file content can close a
turn or a tool's response.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from contracts.digests import canonical_json
from contracts.episodes import TokenRole
from contracts.errors import SchemaError

END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
CALL_START, CALL_END = "<tool_call>", "</tool_call>"
RESPONSE_START, RESPONSE_END = "<tool_response>", "</tool_response>"
THINK_START, THINK_END = "<think>", "</think>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END, CALL_START, CALL_END, RESPONSE_START, RESPONSE_END)
CHAT_VERSION = "2"
"""Part of the key of an imported policy's rollouts: bumped when its tokenizer would give the same text other tokens."""
_COMPACT = ", separators=(',', ':')"
"""What the chat template passes to `tojson` where calls are written without blanks."""
_CALL = re.compile(re.escape(CALL_START) + r"(.*?)" + re.escape(CALL_END), re.DOTALL)
_THOUGHT = re.compile(f"({re.escape(THINK_START)}|{re.escape(THINK_END)})")


@dataclass(frozen=True)
class ToolCallText:
    """Tool call as the policy wrote it."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True)
class ParsedTurn:
    """Tool calls in a policy's turn."""

    calls: tuple[ToolCallText, ...]
    """Calls in order; several calls run in parallel."""
    error: str | None
    """Why the turn can't be executed, or None. One invalid call makes the whole turn invalid."""


def render_call(call: ToolCallText, *, spaced: bool = False) -> str:
    """Text of one call. spaced: Qwen's layout, with newlines and blanks."""
    body = {"name": call.name, "arguments": dict(call.arguments)}
    if spaced:
        return f"{CALL_START}\n{json.dumps(body, ensure_ascii=False)}\n{CALL_END}"
    return f"{CALL_START}{json.dumps(body, ensure_ascii=False, separators=(',', ':'))}{CALL_END}"


def parse_turn(text: str) -> ParsedTurn:
    """Tool calls in the text of a turn, without its end token. A turn without calls ends the episode.

    Refuses also what JSON readers let through but nothing can write down again: NaN, infinity, lone surrogates.
    """
    calls: list[ToolCallText] = []
    for match in _CALL.finditer(text):
        try:
            body = json.loads(match.group(1))
        except (ValueError, RecursionError):
            return ParsedTurn((), "tool call is not JSON")
        if not (
            isinstance(body, dict)
            and set(body) == {"name", "arguments"}
            and isinstance(body["name"], str)
            and isinstance(body["arguments"], dict)
        ):
            return ParsedTurn((), 'tool call is not {"name": ..., "arguments": {...}}')
        calls.append(ToolCallText(body["name"], body["arguments"]))
    rest = _CALL.sub("", text)
    if CALL_START in rest or CALL_END in rest:
        return ParsedTurn((), "tool call is not closed")
    try:
        canonical_json([[call.name, call.arguments] for call in calls])
    except (ValueError, SchemaError):
        return ParsedTurn((), "tool call is not JSON")
    return ParsedTurn(tuple(calls), None)


class ChatTokenizer:
    """Tokenizer with the chat markup. Thread-safe for reading."""

    def __init__(self, tokenizer: Tokenizer, *, spaced: bool = False) -> None:
        self._text = tokenizer
        self._text.encode_special_tokens = True
        added = [token for token in tokenizer.get_added_tokens_decoder().values() if not token.special]
        for token in added:  # Qwen3's <tool_response>, for one, which would be encoded as markup otherwise
            token.special = True
        self._text.add_special_tokens(added)
        self.spaced = spaced
        """Whether calls have Qwen's layout, with newlines and blanks."""
        missing = [token for token in SPECIAL_TOKENS if tokenizer.token_to_id(token) is None]
        if missing:
            raise SchemaError(
                f"tokenizer lacks the chat tokens {', '.join(missing)}: train it with contracts.chat.SPECIAL_TOKENS, or"
                " import a Qwen-style one"
            )
        ids = {token: tokenizer.token_to_id(token) for token in (*SPECIAL_TOKENS, THINK_START, THINK_END)}
        self._ids: dict[str, int] = {token: int(found) for token, found in ids.items() if found is not None}
        self.end_of_turn: int = self._ids[TURN_END]
        self.pad: int = self._ids[END_OF_TEXT]
        self.call_start: int = self._ids[CALL_START]
        self.call_end: int = self._ids[CALL_END]

    @classmethod
    def from_directory(cls, directory: Path, *, spaced: bool | None = None) -> ChatTokenizer:
        """Load `tokenizer.json`. spaced: None is the layout of the directory's chat template.

        Raises SchemaError if it is missing or lacks the markup.
        """
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise SchemaError(f"{directory} has no tokenizer.json: is it a checkpoint directory?")
        template = directory / "chat_template.jinja"
        if spaced is None:
            spaced = template.is_file() and _COMPACT not in template.read_text(encoding="utf-8")
        return cls(Tokenizer.from_file(str(path)), spaced=spaced)

    @property
    def vocabulary_size(self) -> int:
        """Number of ids, markup included."""
        return int(self._text.get_vocab_size(with_added_tokens=True))

    def encode_text(self, text: str) -> list[int]:
        """Tokens of untrusted text; markup in it stays plain characters."""
        return list(self._text.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of tokens, markup included."""
        return str(self._text.decode(list(token_ids), skip_special_tokens=False))

    def prompt(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Prompt tokens of (role, content) messages up to the start of the policy's first turn."""
        parts: list[tuple[str, bool]] = []
        for role, content in messages:
            parts += [(TURN_START, True), (f"{role}\n{content}", False), (TURN_END, True), ("\n", False)]
        return self._encode([*parts, (TURN_START, True), ("assistant\n", False)])

    def environment_turn(self, responses: Sequence[str]) -> list[int]:
        """Tokens after a policy's turn and its end token: the tools' results, in call order."""
        glue = "\n" if self.spaced else ""
        parts: list[tuple[str, bool]] = [("\n", False), (TURN_START, True), ("user\n", False)]
        for index, response in enumerate(responses):
            parts += [("\n", False)] if index else []
            parts += [(RESPONSE_START, True), (glue + response + glue, False), (RESPONSE_END, True)]
        return self._encode([*parts, (TURN_END, True), ("\n", False), (TURN_START, True), ("assistant\n", False)])

    def reply(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """Tokens between two turns of a policy: of (role, content) messages that are all results of tools, or all the
        user's and the system's.
        """
        if messages[0][0] == "tool":
            return self.environment_turn([content for _, content in messages])
        return self.encode_text("\n") + self.prompt(messages)

    def policy_turn(self, calls: Sequence[ToolCallText], text: str = "") -> list[int]:
        """Tokens of a policy's turn with its end token.

        `<think>` and `</think>` in `text` are markup, if the tokenizer has them.
        """
        parts = [(part, index % 2 == 1 and part in self._ids) for index, part in enumerate(_THOUGHT.split(text))]
        for index, call in enumerate(calls):
            body = render_call(call, spaced=self.spaced)[len(CALL_START) : -len(CALL_END)]
            parts += [("\n", False)] if index or text else []
            parts += [(CALL_START, True), (body, False), (CALL_END, True)]
        return self._encode([*parts, (TURN_END, True)])

    def _encode(self, parts: Sequence[tuple[str, bool]]) -> list[int]:
        """Encode (text, is markup) parts. Adjacent texts are joined first, so that the result equals encoding the whole
        string.
        """
        ids: list[int] = []
        pending = ""
        for text, markup in parts:
            if not markup:
                pending += text
                continue
            ids += self.encode_text(pending) if pending else []
            pending = ""
            ids.append(self._ids[text])
        return ids + (self.encode_text(pending) if pending else [])


def chat_template(*, spaced: bool = False) -> str:
    """The Jinja template that renders the same tokens through `transformers`; stored in every checkpoint."""
    text = (Path(__file__).parent / "chat_template.jinja").read_text(encoding="utf-8")
    return text.replace("__GLUE__", "\\n" if spaced else "").replace("__SEPARATORS__", "" if spaced else _COMPACT)


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


def tools_text(tools: Iterable[Mapping[str, Any]]) -> str:
    """List of tools, in the OpenAI function form, as the chat template writes it that Qwen3 was trained with."""
    lines = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return _TOOLS.format(tools=lines, start=CALL_START, end=CALL_END)


def message_views(tokenizer: ChatTokenizer, token_ids: Sequence[int], roles: Sequence[int]) -> list[Mapping[str, Any]]:
    """Runs of equal role as {"role": int, "text": str, "start": int, "end": int}, for display.

    Forced tokens are part of the policy's turns.
    """
    views: list[Mapping[str, Any]] = []
    start = 0
    roles = [TokenRole.POLICY if role == TokenRole.FORCED else role for role in roles]
    for end in range(1, len(roles) + 1):
        if end == len(roles) or roles[end] != roles[start]:
            views.append(
                {
                    "role": int(roles[start]),
                    "text": tokenizer.decode(token_ids[start:end]),
                    "start": start,
                    "end": end,
                }
            )
            start = end
    return views
