"""Choices of OpenAI's answers: of whole completions, and of their parts while they are sampled."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

from contracts.chat import ChatTokenizer
from inference.engines.base import Completion, Piece
from inference.server.api import ChatRequest, CompletionRequest
from inference.server.chat import MessageParts, answer_message

_CUT = "\ufffd"
"""What the bytes of a character decode to until all of them are there."""


def completion_choice(
    body: CompletionRequest, text: str, tokens: list[int], logprobs: list[float], spans: list[tuple[str, int, int]]
) -> dict[str, Any]:
    """Tokens of a completion, or of a part of one, as `body` wants them."""
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": None, "logprobs": None}
    if body.logprobs is not None:
        choice["logprobs"] = {"token_logprobs": logprobs, "tokens": [f"token_id:{token}" for token in tokens]}
    if body.return_token_ids:
        choice |= {"token_ids": tokens, "policy_spans": spans}
    return choice


def chat_choice(body: ChatRequest, tokenizer: ChatTokenizer, made: Completion) -> dict[str, Any]:
    """A whole completion as an assistant's message."""
    message, reason = answer_message(tokenizer.decode(made.token_ids), secrets.token_hex(4))
    return {
        "index": 0,
        "message": message,
        "finish_reason": reason if made.finish_reason == "stop" else made.finish_reason,
        "logprobs": _chat_logprobs(body, tokenizer, made.token_ids, made.logprobs),
    }


class CompletionParts:
    """Choices of the parts of a completion."""

    def __init__(self, body: CompletionRequest, tokenizer: ChatTokenizer | None) -> None:
        """tokenizer: None sends token ids only."""
        self._body, self._text = body, _Text(tokenizer)

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Of the next piece."""
        tokens, reason = piece.token_ids.tolist(), piece.finish_reason
        text = self._text.add(tokens, last=reason is not None)
        made = completion_choice(self._body, text, tokens, piece.logprobs.tolist(), piece.spans)
        return made | {"finish_reason": reason}


class ChatParts:
    """Choices of the parts of a message. Its tool calls come with the last one."""

    def __init__(self, body: ChatRequest, tokenizer: ChatTokenizer) -> None:
        self._body, self._tokenizer = body, tokenizer
        self._text, self._message, self._begun = _Text(tokenizer), MessageParts(), False

    def choice(self, piece: Piece) -> dict[str, Any]:
        """Of the next piece."""
        tokens, reason = piece.token_ids.tolist(), piece.finish_reason
        delta: dict[str, Any] = {"content": self._message.add(self._text.add(tokens, last=reason is not None))}
        ended: str | None = reason
        if reason is not None:
            rest, why = self._message.end(secrets.token_hex(4))
            delta = rest | {"content": delta["content"] + rest["content"]}
            ended = why if reason == "stop" else reason
        if not self._begun:
            delta, self._begun = {"role": "assistant", **delta}, True
        logprobs = _chat_logprobs(self._body, self._tokenizer, tokens, piece.logprobs.tolist())
        return {"index": 0, "delta": delta, "finish_reason": ended, "logprobs": logprobs}


class _Text:
    """Decodes tokens while they come. A character whose bytes are spread over tokens comes with the last of them."""

    def __init__(self, tokenizer: ChatTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []

    def add(self, tokens: list[int], *, last: bool) -> str:
        """Text that is complete with these tokens. last: no more tokens come."""
        if self._tokenizer is None:
            return ""
        self._tokens += tokens
        text = self._tokenizer.decode(self._tokens)
        if text.endswith(_CUT) and not last:
            return ""
        self._tokens.clear()
        return text


def _chat_logprobs(
    body: ChatRequest, tokenizer: ChatTokenizer, tokens: Sequence[int], logprobs: Sequence[float]
) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    pairs = zip(tokens, logprobs, strict=True)
    return {"content": [{"token": tokenizer.decode([token]), "logprob": value} for token, value in pairs]}
