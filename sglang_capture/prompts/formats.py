"""The shapes that training rows come in, brought to one.

==============  ======================================================================================================
OpenAI          ``messages``: ``[{"role": …, "content": …}, …]``, and ``tools``
ShareGPT        ``conversations``: ``[{"from": "human", "value": …}, …]`` (or with ``role`` and ``content``), and
                ``tools`` and ``system``
Alpaca          ``instruction``, ``input``, ``output``, and ``system``
plain text      ``text`` or ``prompt``
token ids       ``input_ids``, and ``loss_mask``
==============  ======================================================================================================

A row has exactly one of these, or says nothing certain. A column that the caller names is taken by what it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from sglang_capture.prompts.errors import RowError
from sglang_capture.prompts.messages import tidy_messages, tidy_tools

CONTENT_KEYS = ("messages", "conversations", "instruction", "prompt", "text", "input_ids")
"""The keys of which a row has exactly one."""

ROW_KEYS = (*CONTENT_KEYS, "input", "output", "system", "tools", "loss_mask")
"""All keys that say what a row holds."""

_KEPT = ("id", "capture_id", "metadata")

_SHAREGPT_ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response"), "tool"),
}
_CALL_ROLES = frozenset({"function_call", "tool_call"})


def canonical(row: Mapping[str, Any], column: str | None = None) -> dict[str, Any]:
    """The row with its content under one of ``messages`` (and ``tools``), ``text`` and ``input_ids`` (and
    ``loss_mask``), beside its ``id`` (or ``capture_id``) and ``metadata``.

    Args:
        column: the key that holds the content, whatever other keys the row has; recognised by what it holds.

    Raises:
        RowError: no content, several that could be meant, or one that is malformed.
    """
    key = _named_column(row, column) if column else _only_key(row)
    kept = {name: row[name] for name in _KEPT if row.get(name) is not None and name != key}
    return {**kept, **_content(row, key)}


def _only_key(row: Mapping[str, Any]) -> str:
    found = [key for key in CONTENT_KEYS if row.get(key) is not None]
    if len(found) == 1:
        return found[0]
    what = f"both {' and '.join(found)}" if found else f"only {', '.join(map(repr, row)) or 'an empty object'}"
    hint = "; name the one that is meant with --column" if found else ""
    raise RowError(
        "a row needs exactly one of messages, conversations, instruction, prompt (or text), input_ids; "
        f"found {what:.160}{hint}"
    )


def _named_column(row: Mapping[str, Any], column: str) -> str:
    if row.get(column) is None:
        raise RowError(f"this row has no {column!r}; it has {', '.join(map(repr, row)) or 'nothing'}"[:300])
    return column


def _content(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    reader = _READERS.get(key)
    return reader(row, key) if reader else _by_shape(row, key)


def _by_shape(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A column of another name: a text, a conversation, or ids."""
    value = row[key]
    if isinstance(value, str):
        return _text(row, key)
    first = value[0] if isinstance(value, list) and value else None
    if isinstance(first, dict):
        return _conversation(row, key)
    if type(first) is int:
        return _ids(row, key)
    raise RowError(f"{key} must hold a text, a list of messages, or token ids; found {value!r:.80}")


def _text(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    text = row[key]
    if not isinstance(text, str) or not text:
        raise RowError(f"{key} must be a text that is not empty; found {text!r:.80}")
    if row.get("loss_mask") is not None:
        raise RowError(f"loss_mask needs input_ids, one entry per id; found it beside {key}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{key} holds half a surrogate pair at character {error.start}: it is no valid text") from None
    return {"text": text}


def _ids(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    mask = row.get("loss_mask")
    return {"input_ids": row[key], **({} if mask is None else {"loss_mask": mask})}


def _messages(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    return _laid_open(row, row[key])


def _laid_open(row: Mapping[str, Any], messages: object) -> dict[str, Any]:
    if row.get("loss_mask") is not None:
        raise RowError("loss_mask needs input_ids, one entry per id; a conversation gets its own from the template")
    tools = tidy_tools(row.get("tools"))
    return {"messages": tidy_messages(messages), **({"tools": tools} if tools else {})}


def _conversation(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """ShareGPT's turns; some files have OpenAI's messages under the same key."""
    turns = row[key]
    if not isinstance(turns, list) or not turns:
        raise RowError(f"{key} must be a list of one or more turns; found {turns!r:.80}")
    messages = [_turn(turn, f"turn {number}") for number, turn in enumerate(turns, start=1)]
    system = row.get("system")
    if isinstance(system, str) and system and messages[0].get("role") != "system":
        messages.insert(0, {"role": "system", "content": system})
    return _laid_open(row, _from_the_first_question(messages))


def _from_the_first_question(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Long conversations were split for ShareGPT, and many parts begin with an answer whose question is lost."""
    systems = messages[:1] if messages[0].get("role") == "system" else []
    rest = messages[len(systems) :]
    lost = next((i for i, message in enumerate(rest) if message.get("role") not in ("assistant", "tool")), None)
    if lost is None:
        raise RowError("this conversation has answers and no question")
    return [*systems, *rest[lost:]]


def _turn(turn: object, name: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RowError(f'{name} must look like {{"from": "human", "value": "…"}}; found {turn!r:.80}')
    if turn.get("from") is None:
        return turn
    who, value = turn["from"], turn.get("value")
    if who in _CALL_ROLES:
        return {"role": "assistant", "content": "", "tool_calls": _calls(value, name)}
    if who not in _SHAREGPT_ROLES:
        known = ", ".join(sorted({*_SHAREGPT_ROLES, *_CALL_ROLES}))
        raise RowError(f"{name} is from {who!r:.40}; expected one of {known}")
    if not isinstance(value, str):
        raise RowError(f"{name} needs a value that is text; found {value!r:.80}")
    others = {key: turn[key] for key in turn if key not in ("from", "value")}
    return {**others, "role": _SHAREGPT_ROLES[who], "content": value}


def _calls(value: object, name: str) -> list[dict[str, Any]]:
    """A call as its JSON text (one, or a list of several), as OpenAI's ``tool_calls``."""
    try:
        found = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        found = None
    calls: list[Any] = found if isinstance(found, list) else [found]
    if not calls or not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        raise RowError(
            f'{name} is a call: its value must be JSON like {{"name": …, "arguments": …}}; found {value!r:.80}'
        )
    functions = [{"name": call["name"], "arguments": call.get("arguments") or {}} for call in calls]
    return [{"type": "function", "function": function} for function in functions]


def _instruction(row: Mapping[str, Any], _key: str) -> dict[str, Any]:
    """Alpaca's row as a conversation: what is asked, a blank line, and what it is asked about."""
    fields = {name: row.get(name) or "" for name in ("system", "instruction", "input", "output")}
    for name, value in fields.items():
        if not isinstance(value, str):
            raise RowError(f"{name} must be a text; found {value!r:.80}")
    if not fields["instruction"]:
        found = row.get("instruction")
        raise RowError(f"instruction must be a text that is not empty; found {found!r:.80}")
    question = "\n\n".join(filter(None, (fields["instruction"], fields["input"])))
    turns = [("system", fields["system"]), ("user", question), ("assistant", fields["output"])]
    return _laid_open(row, [{"role": role, "content": content} for role, content in turns if content])


_READERS: dict[str, Callable[[Mapping[str, Any], str], dict[str, Any]]] = {
    "messages": _messages,
    "conversations": _conversation,
    "instruction": _instruction,
    "prompt": _text,
    "text": _text,
    "input_ids": _ids,
}
