"""Which request a dump is of: what was sent, as a short text that is in the record, in the request's id and (where ids
were sent) can be made from the dump itself.

An id names a record, and anybody may mark a request with it. So a dump under the id proves nothing: the rows of one
content must never stand beside the loss mask of another.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Sequence

import numpy as np
import xxhash
from numpy.typing import NDArray

_IDS = "ids-"
_TEXT = "text-"
_NAMED_TEXT = re.compile(_TEXT + "[0-9a-f]{32}(?=-)")


def of_ids(ids: Sequence[int] | NDArray[np.int64]) -> str:
    """What a prompt of these token ids is known by."""
    return _IDS + xxhash.xxh3_128_hexdigest(np.asarray(ids, dtype="<i8").tobytes())


def of_text(text: str) -> str:
    """What a prompt that the engine tokenises is known by."""
    return _TEXT + xxhash.xxh3_128_hexdigest(text.encode())


def new_request_id(sent: str) -> str:
    """An id for one request with this content. Ids must differ: an earlier request may still be in the engine."""
    return f"{sent}-{uuid.uuid4().hex}"


def proven(sent: str | None, *, ran: str, request_id: str) -> bool:
    """Whether a dump is of the content ``sent``: it holds those ids, or its request's id says so."""
    return sent is not None and (ran == sent or request_id.startswith(f"{sent}-"))


def told_by(*, ran: str, request_id: str) -> str:
    """What a dump that was not asked for here is known by: the text that its request's id names, else its ids."""
    named = _NAMED_TEXT.match(request_id)
    return named[0] if named else ran


def altered(sent: str | None, *, ran: str) -> bool:
    """Whether ids were sent and others were run."""
    return sent is not None and sent.startswith(_IDS) and sent != ran
