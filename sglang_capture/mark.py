"""How a request is marked for capture: parsed and validated here for the engine, built here for clients.

A mark is the flat dictionary that SGLang carries untouched as a request's ``custom_params``: inside
``sampling_params`` on ``/generate``, at the top level on ``/v1/completions`` and ``/v1/chat/completions``. It must stay
flat: SGLang's typed decoding rejects nested lists.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import xxhash

from sglang_capture.layers import LayerError, canonical_layers
from sglang_capture.spec import LAST_HIDDEN_CHOICES, LastHidden

CAPTURE_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}", re.ASCII)
"""1–128 of ``A–Z a–z 0–9 . _ -``, not starting with ``.``: what may become a file's name."""


KEYS = ("capture", "capture_layers", "capture_last_hidden", "capture_token")
"""The keys of a mark; others that begin with ``capture`` are misspelt, and what else stands there is not ours."""


class MarkError(ValueError):
    """A mark that asks for something impossible; the request itself is served all the same."""


@dataclass(frozen=True)
class Mark:
    """A valid mark. ``None`` stands for "as the server is set"."""

    capture_id: str | None = None
    layers: tuple[int, ...] | None = None
    last_hidden: LastHidden | None = None


def is_capture_id(text: object) -> bool:
    """Whether ``text`` may be a capture id, and so a file's name."""
    return isinstance(text, str) and CAPTURE_ID.fullmatch(text) is not None


def safe_id(text: object) -> str:
    """``text`` itself where it is a capture id, else a name made from its digest; never anything path-like."""
    if is_capture_id(text):
        return cast(str, text)
    return "unnamed-" + xxhash.xxh3_64_hexdigest(repr(text).encode("utf-8", "backslashreplace"))


def shortened(text: str, most: int) -> str:
    """``text``, cut to ``most`` characters if it is longer; what a client sends has no bound."""
    return text if len(text) <= most else text[: most - 3] + "..."


def parse_mark(custom_params: object, *, token: str | None = None) -> Mark | None:
    """The mark in a request's ``custom_params``, or ``None`` if it is not marked.

    Args:
        custom_params: whatever the client sent; ``capture`` absent, ``None`` or ``False`` means not marked.
        token: the secret that marks must carry, where the server has one; compared in constant time.

    Raises:
        MarkError: it is marked, but a key is misspelt, a value is malformed or the secret is missing or wrong.
    """
    if not isinstance(custom_params, Mapping):
        return None
    capture = custom_params.get("capture")
    if capture is None or capture is False:
        return None
    _check_token(custom_params.get("capture_token"), token)
    _check_keys(custom_params)
    return Mark(
        capture_id=_parse_id(capture),
        layers=_parse_layers(custom_params.get("capture_layers")),
        last_hidden=_parse_last_hidden(custom_params.get("capture_last_hidden")),
    )


def refused_id(custom_params: object, request_id: object) -> str:
    """The name under which the refusal of a malformed mark is recorded: its own id if that is one, else one made."""
    capture = custom_params.get("capture") if isinstance(custom_params, Mapping) else None
    return capture if isinstance(capture, str) and is_capture_id(capture) else safe_id(request_id)


def build_mark(
    capture_id: str | None = None,
    *,
    layers: Iterable[int] | None = None,
    last_hidden: LastHidden | None = None,
    token: str | None = None,
) -> dict[str, Any]:
    """The ``custom_params`` that mark a request.

    Raises:
        MarkError: a value is malformed (found here, before anything is sent).
    """
    mark: dict[str, Any] = {"capture": True if capture_id is None else capture_id}
    if layers is not None:
        mark["capture_layers"] = list(layers)
    if last_hidden is not None:
        mark["capture_last_hidden"] = last_hidden
    if token is not None:
        mark["capture_token"] = token
    parse_mark(mark, token=token)
    return mark


def _check_token(found: object, expected: str | None) -> None:
    if expected is None:
        return
    if not isinstance(found, str):
        raise MarkError("this server wants capture_token in the mark; none was found")
    if not hmac.compare_digest(found.encode("utf-8", "backslashreplace"), expected.encode()):
        raise MarkError("capture_token is not the one this server wants")


def _check_keys(custom_params: Mapping[object, object]) -> None:
    """A wish that was passed over would be a capture of other layers than its owner believes."""
    for key in custom_params:
        if isinstance(key, str) and key.startswith("capture") and key not in KEYS:
            raise MarkError(f"a mark has the keys {', '.join(KEYS)}; found {_shown(key)}")


def _parse_id(capture: object) -> str | None:
    if capture is True:
        return None
    if not isinstance(capture, str):
        raise MarkError(f"capture must be true or a capture id; found {_shown(capture)}")
    if not is_capture_id(capture):
        raise MarkError(
            "a capture id is 1–128 of A–Z a–z 0–9 . _ - and does not start with a dot; "
            f"found {_shown(capture)} ({len(capture)} characters)"
        )
    return capture


def _parse_layers(layers: object) -> tuple[int, ...] | None:
    if layers is None:
        return None
    if not isinstance(layers, (list, tuple)):
        raise MarkError(f"capture_layers must be a list of hidden-state indices; found {_shown(layers)}")
    try:
        return canonical_layers(layers)
    except LayerError as error:
        raise MarkError(f"capture_layers: {error}") from error


def _parse_last_hidden(kind: object) -> LastHidden | None:
    if kind is None:
        return None
    if not isinstance(kind, str) or kind not in LAST_HIDDEN_CHOICES:
        raise MarkError(f"capture_last_hidden must be one of {', '.join(LAST_HIDDEN_CHOICES)}; found {_shown(kind)}")
    return cast(LastHidden, kind)


def _shown(value: object) -> str:
    """A value as an error may show it: short, and safe in a log line."""
    return shortened(ascii(value), 80)
