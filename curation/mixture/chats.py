"""Files of chats as rows of a mixture: every message is encoded exactly as rollouts and servers encode it.

    {"messages": [{"role": "user", "content": ...}, {"role": "assistant", "tool_calls": ...}, {"role": "tool", ...}]}
    a line of `triplane episodes export --tokens`, whose tokens are taken as they are

The assistant's turns are the policy's, with their end tokens, and are trained. All other tokens are prompt or
environment, and are not.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from contracts.artifacts import ArtifactWriter
from contracts.chat import SPECIAL_TOKENS, ChatTokenizer, ToolCallText, message_views, tools_text
from contracts.digests import canonical_json, digest_of
from contracts.episodes import EPISODES, TokenRole
from contracts.errors import SchemaError
from curation.errors import MixtureError
from curation.mixture.accepted import MEMBERS, user_messages
from curation.mixture.config import ChatsSource
from curation.mixture.reserved import Reserved
from curation.mixture.rows import ROWS, write_rows

CHATS = "chats"
"""Kind of the artifact."""
CHATS_VERSION = "2"
_AT_ONCE = 256
_KEYS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name", "weight"})
"""Keys of a message; others may be null only, since leaving out what they say would change the message."""
_READ = frozenset({"messages", "tools", "task_id", "reward", "sequences", "episode", "task", "tool_calls"})
"""Columns of a Parquet file that are read; others may hold what Python can't."""
_EPISODE = re.compile("[0-9a-f]{32}")
_MERGED = re.compile(r"\b(arguments|parameters): struct<")
_VIEWS = ("task", "policy", "environment")
"""Roles of the messages of an export, in the order of TokenRole."""


@dataclass
class Encoded:
    """One row of a file."""

    token_ids: list[int]
    token_role: list[int]
    prompts: list[str]
    """Texts of the user's messages before the first turn of the policy."""
    tools: list[str]
    """Names of the called tools, turn by turn."""
    task_id: str | None = None
    episode_id: str | None = None
    """Id of an exported episode."""


def build_chats(
    config: ChatsSource,
    digest: str,
    tokenizer: ChatTokenizer,
    reserved: Reserved,
    out: ArtifactWriter,
    longest: int | None = None,
    progress: Callable[[int], None] = lambda rows: None,
    files: Sequence[Path] = (),
) -> dict[str, object]:
    """Stage the rows of a file in `out`; the caller commits them. Returns facts for the manifest.

    digest: of the file. longest: tokens that the model accepts; None: the trainer shortens longer rows. progress:
    receives the number of rows read. files: of a data pipeline, in place of the file. Raises MixtureError, which names
    file and line.
    """
    left_out, episodes = Counter[str](), list[dict[str, Any]]()

    def tables() -> Iterator[tuple[pa.Table, list[str]]]:
        rows, keys = list[dict[str, Any]](), list[str]()
        for number, (place, row) in enumerate(chain.from_iterable(map(read_rows, files or [config.file])), 1):
            found = _accepted(row, place, tokenizer, reserved, longest, left_out, refuse=config.reserved == "refuse")
            if found is not None:
                name = found.episode_id or digest_of([digest, number])[:32]
                own = {"episode_id": name, "task_id": found.task_id}
                rows.append({**own, "token_ids": found.token_ids, "token_role": found.token_role, "clean": True})
                keys.append(found.task_id or "\n".join(found.prompts))
                episodes.append(own | {"tool_calls": [{"name": each} for each in found.tools]})
                episodes[-1]["policy_tokens"] = found.token_role.count(int(TokenRole.POLICY))
            if len(rows) == _AT_ONCE:
                yield pa.Table.from_pylist(rows, schema=ROWS), keys
                rows, keys = [], []
            if number % _AT_ONCE == 0:
                progress(number)
        if rows:
            yield pa.Table.from_pylist(rows, schema=ROWS), keys

    counts = write_rows(out, tables())
    if not counts["train"]:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(left_out.items()))
        raise MixtureError(f"{config.path} has no row to train on ({why or 'it is empty'}): leave the source out")
    # read by the ledger, so that `triplane recall` finds tasks, tools and exported episodes in the file
    out.add_table("episodes.parquet", pa.Table.from_pylist(episodes, schema=EPISODES))
    members = [{"episode_id": each["episode_id"], "kept": True, "reason": None} for each in episodes]
    out.add_table("members.parquet", pa.Table.from_pylist(members, schema=MEMBERS))
    return {**counts, "file": config.file.name, "left_out": dict(sorted(left_out.items()))}


def read_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(place, row) of each row of a file. Raises MixtureError for what can't be read."""
    try:
        if path.suffix == ".parquet":
            number, file = 0, pq.ParquetFile(path)
            merged = _MERGED.search(str(file.schema_arrow))
            if merged:  # rows would have the keys of all rows, with nulls
                raise MixtureError(f"{path} has {merged[1]} as a struct: write it as JSON text, or write JSON lines")
            for batch in file.iter_batches(_AT_ONCE, columns=sorted(_READ.intersection(file.schema_arrow.names))):
                for row in batch.to_pylist():
                    yield f"{path} row {number}", row
                    number += 1
            return
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    yield f"{path} line {number}", _parsed(line, f"{path} line {number}")
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: of texts that are no UTF-8
        raise MixtureError(
            f"{path} can't be read ({' '.join(str(error).split())[:200]}): name a *.jsonl or *.parquet file"
        ) from None


def _parsed(line: bytes, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise MixtureError(f"{place} is not JSON ({error}): write one object per line") from None
    if not isinstance(row, dict):
        raise MixtureError(f"{place} is no JSON object: write one object per line")
    return row


def _accepted(
    row: Mapping[str, Any],
    place: str,
    tokenizer: ChatTokenizer,
    reserved: Reserved,
    longest: int | None,
    left_out: Counter[str],
    *,
    refuse: bool,
) -> Encoded | None:
    """The encoded row, or None, counted in `left_out`."""
    found = encode_row(row, place, tokenizer)
    if found is None:
        left_out["not_solved"] += 1
        return None
    task = reserved.task_of(found.task_id, found.prompts)
    if task is not None and refuse:
        raise MixtureError(
            f"{place} is of {task}, which this experiment measures: remove the row, or set reserved to leave_out"
        )
    if task is not None:
        left_out["reserved"] += 1
        return None
    if longest is not None and len(found.token_ids) > longest:
        raise MixtureError(
            f"{place} has {len(found.token_ids)} tokens, the model accepts {longest}: set"
            " base.sft.truncation, or remove the row"
        )
    if int(TokenRole.POLICY) not in found.token_role:
        raise MixtureError(f"{place} has no turn of the assistant to train on: remove the row")
    return found


def encode_row(row: Mapping[str, Any], place: str, tokenizer: ChatTokenizer) -> Encoded | None:
    """Tokens and roles of a row in one of the two formats; None: an exported episode that was not solved. Raises
    MixtureError.
    """
    graded = row.get("reward") or {}
    if not isinstance(graded, dict):
        raise MixtureError(f"{place}: reward is {graded!r:.60}: write the object of an export, or leave it out")
    if "sequences" not in row:
        return encode_chat(row, place, tokenizer)
    if graded.get("solved") is not True or graded.get("verdict") == "tampered":
        return None
    return _exported(row, place, tokenizer)


def _exported(row: Mapping[str, Any], place: str, tokenizer: ChatTokenizer) -> Encoded:
    """An episode of `triplane episodes export --tokens`. Its text tells whether the tokens are this tokenizer's."""
    sequences, texts = (_only(row.get(name)) for name in ("sequences", "messages"))
    if not isinstance(sequences, dict) or not isinstance(texts, list):
        raise MixtureError(
            f"{place} has other than one sequence with its messages: only episodes of one context are read"
        )
    ids, roles = (
        found if isinstance(found := sequences.get(name), list) else [] for name in ("token_ids", "token_role")
    )
    numbers = [*ids, *roles]
    known = all(isinstance(each, int) for each in numbers) and all(
        0 <= each < tokenizer.vocabulary_size for each in ids
    )
    if not ids or len(ids) != len(roles) or not known or not set(roles) <= set(TokenRole):
        raise MixtureError(
            f"{place} has no tokens and roles of this tokenizer: export with --tokens from a policy that has it"
        )
    views = [(_VIEWS[view["role"]], view["text"]) for view in message_views(tokenizer, ids, roles)]
    if views != [(each.get("role"), each.get("text")) for each in texts if isinstance(each, dict)]:
        raise MixtureError(
            f"{place} has tokens whose text differs from its messages: they are of another tokenizer than the base"
            " policy's"
        )
    episode = _text(row, "episode", place)
    if episode is not None and not _EPISODE.fullmatch(episode):
        raise MixtureError(f"{place}: episode is {episode!r:.60}: write the 32 digits of an export, or leave it out")
    prompts = user_messages(views[0][1])
    calls = row.get("tool_calls")
    named = [str(each.get("name")) for each in calls if isinstance(each, dict)] if isinstance(calls, list) else []
    tools = [_encodable(name, f"{place}: tool_calls") for name in named]
    return Encoded(ids, roles, prompts, tools, _text(row, "task", place), episode)


def _only(found: object) -> object:
    return found[0] if isinstance(found, list) and len(found) == 1 else None


def _text(row: Mapping[str, Any], key: str, place: str) -> str | None:
    value = row.get(key)
    if value is not None and not isinstance(value, str):
        raise MixtureError(f"{place}: {key} is {value!r:.60}: write a text, or leave it out")
    return value and _encodable(value, f"{place}: {key}")


def _encodable(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise MixtureError(f"{place} has a lone surrogate, which no text can hold: correct the escape") from None
    return text


def encode_chat(row: Mapping[str, Any], place: str, tokenizer: ChatTokenizer) -> Encoded:
    """Tokens and roles of a row with OpenAI's messages, as the agent loop records them. Raises MixtureError."""
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise MixtureError(f"{place} has no messages: write a list of OpenAI's messages in the key messages")
    if any(isinstance(each, list) for each in messages):
        raise MixtureError(f"{place} is an exported episode without tokens: export it with --tokens")
    chat = [_Message(each, f"{place}: message {number}") for number, each in enumerate(messages)]
    begin = next((number for number, each in enumerate(chat) if each.role not in ("system", "user")), len(chat))
    prompts = [each.content for each in chat[:begin] if each.role == "user"]
    if begin == len(chat) or not prompts:
        raise MixtureError(
            f"{place} has no message of the user that is followed by one of the assistant: remove the row"
        )
    ids = tokenizer.prompt(_with_tools([(each.role, each.content) for each in chat[:begin]], row.get("tools"), place))
    found = Encoded(ids, [int(TokenRole.PROMPT)] * len(ids), prompts, [], _text(row, "task_id", place))
    while begin < len(chat):
        turn = chat[begin]
        if turn.role != "assistant":
            raise turn.error(
                f"has the role {turn.role}, expected is the assistant's turn: results of tools follow its calls"
            )
        trained = TokenRole.POLICY if turn.trained else TokenRole.ENVIRONMENT
        _append(found, tokenizer.policy_turn(turn.calls, turn.content), trained)
        found.tools += [call.name for call in turn.calls]
        end = next((number for number in range(begin + 1, len(chat)) if chat[number].role == "assistant"), len(chat))
        if end > begin + 1:
            if end == len(chat):
                raise chat[-1].error(f"is the last one and of the role {chat[-1].role}: end with the assistant's")
            _append(found, tokenizer.reply(_replies(turn, chat[begin + 1 : end])), TokenRole.ENVIRONMENT)
        elif end < len(chat):
            raise chat[end].error("follows another one of the assistant: join them")
        begin = end
    return found


def _append(found: Encoded, ids: Sequence[int], role: TokenRole) -> None:
    found.token_ids += ids
    found.token_role += [int(role)] * len(ids)


def _with_tools(leading: list[tuple[str, str]], tools: object, place: str) -> list[tuple[str, str]]:
    """Messages before the first turn, with the tools listed in the system's as `rollouts.tool_prompt` does."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools)
        except ValueError:
            raise MixtureError(f"{place}: tools is no JSON: write a list of OpenAI's function tools") from None
    if not tools:
        return leading
    if not isinstance(tools, list) or not all(isinstance(each, dict) and "function" in each for each in tools):
        raise MixtureError(f"{place}: tools is no list of OpenAI's function tools: write them so, or leave it out")
    told = _encodable(tools_text(tools), f"{place}: tools")
    if leading[0][0] == "system":
        return [("system", f"{leading[0][1]}\n\n{told}"), *leading[1:]]
    return [("system", told), *leading]


def _replies(turn: _Message, following: Sequence[_Message]) -> list[tuple[str, str]]:
    """(role, content) of the messages between two turns; results of tools in the order of their calls, which is that of
    the messages if one has no id.
    """
    if not turn.calls:
        for each in following:
            if each.role == "tool":
                raise each.error("is a tool's result, but the assistant's turn before has no call")
        return [(each.role, each.content) for each in following]
    other = next((each for each in following if each.role != "tool"), None)
    if other is not None or len(following) != len(turn.calls):
        raise (other or following[-1]).error(
            f"follows {len(turn.calls)} calls with {len(following)} messages: each call needs one message of the"
            " role tool"
        )
    named = {each.answers: each for each in following}
    if None not in named and None not in turn.ids:
        twice = next((each for each in turn.ids if turn.ids.count(each) > 1), None)
        if twice is not None:
            raise turn.error(f"has two calls with the id {twice!r:.60}: give each its own, or leave the ids out")
        missing = [each for each in turn.ids if each not in named]
        if missing:
            raise following[0].error(
                f"and those after it have no tool_call_id {missing[0]!r:.60}: name the calls that they answer"
            )
        following = [named[each] for each in turn.ids]
    return [("tool", each.content) for each in following]


class _Message:
    """One checked message of OpenAI's chat format."""

    def __init__(self, values: object, place: str) -> None:
        self._place = place
        if not isinstance(values, dict):
            raise self.error("is no object with role and content")
        other = sorted(key for key, value in values.items() if key not in _KEYS and value is not None)
        if other:
            raise self.error(f"has the key {other[0]!r}, which is not read: remove it, or write it into content")
        self.role = str(values.get("role"))
        if self.role not in ("system", "user", "assistant", "tool"):
            raise self.error(f"has the role {self.role!r}: use system, user, assistant or tool")
        self.content = self._content(values.get("content"))
        self.answers = self._id(values.get("tool_call_id"), "tool_call_id")
        weight = values.get("weight")
        if weight not in (None, 0, 1):
            raise self.error(f"has the weight {weight!r:.40}: write 0 or 1, or leave it out")
        self.trained = weight != 0
        calls = values.get("tool_calls") or []
        if not isinstance(calls, list) or (calls and self.role != "assistant"):
            raise self.error("has tool_calls that are no list, or not the assistant's")
        self.ids = [self._id(each.get("id") if isinstance(each, dict) else None, "id of a call") for each in calls]
        self.calls = [self._call(each) for each in calls]
        if self.role == "assistant":
            mark = next((mark for mark in SPECIAL_TOKENS if mark in self.content), None)
            if mark is not None:
                raise self.error(f"has {mark} in its content, which would be plain text: write calls into tool_calls")
            if not self.content and not self.calls:
                raise self.error("has neither content nor tool_calls")

    def error(self, fault: str) -> MixtureError:
        """Error that names file, line and message."""
        return MixtureError(f"{self._place} {fault}")

    def _id(self, value: object, key: str) -> str | None:
        if value is not None and not isinstance(value, str):
            raise self.error(f"has the {key} {value!r:.60}: write a text, or leave it out")
        return _encodable(value, self._place) if value else None

    def _content(self, value: object) -> str:
        if isinstance(value, list) and all(isinstance(each, dict) and each.get("type") == "text" for each in value):
            value = "".join(str(each.get("text", "")) for each in value)
        if value is not None and not isinstance(value, str):
            raise self.error(f"has the content {value!r:.60}: only text is read")
        return _encodable(value or "", self._place)

    def _call(self, value: object) -> ToolCallText:
        function = value.get("function") if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            raise self.error('has a call that is not {"type": "function", "function": {"name": ..., "arguments": ...}}')
        name, arguments = _encodable(name, self._place), function.get("arguments")
        try:
            if isinstance(arguments, str):
                arguments = json.loads(arguments)
            canonical_json(arguments)
        except (ValueError, SchemaError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise self.error(f"calls {name} with arguments that are no JSON object")
        return ToolCallText(name, arguments)
