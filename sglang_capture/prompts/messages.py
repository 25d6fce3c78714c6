"""A conversation as a chat template takes it: OpenAI's messages, checked, and free of what tables add to them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from sglang_capture.nesting import MOST_LEVELS, too_deep
from sglang_capture.prompts.errors import RowError

Message = dict[str, Any]

THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Where a message may carry what the model thought before it spoke; which of them is read, is the template's."""


def tidy_messages(messages: object) -> list[Message]:
    """The conversation as the chat template shall see it.

    Keys without a value are left out: a table gives every message all keys, and templates ask whether a key is there.
    Arguments of tool calls that are JSON text become what they say, and no content becomes an empty one, as SGLang's
    chat route does it.

    Raises:
        RowError: this is no conversation of texts; the message says which of its messages is malformed.
    """
    if not isinstance(messages, list) or not messages:
        raise RowError(f"messages must be a list of one or more messages; found {messages!r:.80}")
    _check_depth(messages, "messages")
    tidied = []
    for number, message in enumerate(messages, start=1):
        _check_message(message, f"message {number}")
        tidied.append(_tidy(message))
    return tidied


def tidy_tools(tools: object) -> list[Any] | None:
    """The tools that the model is told of, which some files keep as JSON text; ``None`` if there is none.

    Raises:
        RowError: they are no list.
    """
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError:
            raise RowError(f"tools must be a list, or JSON text of one; found {tools!r:.80}") from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise RowError(f"tools must be a list, or JSON text of one; found {tools!r:.80}")
    _check_depth(tools, "tools")
    return [_without_nulls(tool) for tool in tools]


def _tidy(message: Message) -> Message:
    tidied = {key: value for key, value in message.items() if value is not None}
    tidied["content"] = _tidy_content(message.get("content"))
    if calls := tidied.get("tool_calls"):
        tidied["tool_calls"] = [_tidy_call(call) for call in calls]
    else:
        tidied.pop("tool_calls", None)
    return tidied


def _tidy_content(content: Any) -> Any:
    """No content is an empty one, and a single text needs no list: many templates take nothing but text."""
    if content is None:
        return ""
    return content[0].get("text") or "" if isinstance(content, list) and len(content) == 1 else content


def _tidy_call(call: Any) -> Any:
    call = _without_nulls(call)
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        return call
    return {**call, "function": {**function, "arguments": arguments}}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _check_depth(value: object, name: str) -> None:
    if too_deep(value):
        raise RowError(f"{name} may have {MOST_LEVELS} objects and lists inside each other; found more: flatten them")


def _check_message(message: object, name: str) -> None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise RowError(f'{name} must look like {{"role": "user", "content": "…"}}; found {message!r:.80}')
    if message.get("tool_calls") is not None and not isinstance(message["tool_calls"], list):
        raise RowError(f"{name}: tool_calls must be a list; found {message['tool_calls']!r:.80}")
    for key in THOUGHTS:
        if isinstance(message.get(key), str):
            _check_encodable(message[key], f"{name}: {key}")
    content = message.get("content")
    if isinstance(content, str):
        _check_encodable(content, name)
    elif isinstance(content, list):
        _check_parts(content, name)
    elif content is not None or not any(message.get(key) for key in ("tool_calls", *THOUGHTS)):
        raise RowError(f"{name} needs a content that is text; found {content!r:.80}")


def _check_parts(parts: Sequence[object], name: str) -> None:
    """A picture that only a placeholder stands for would be captured as if it had been seen: refuse it."""
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            raise RowError(f"{name} holds a part that is no text ({part!r:.60}); only text is laid out here")


def _check_encodable(text: str, name: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{name} holds half a surrogate pair at character {error.start}: it is no valid text") from None
