"""Which characters of a text each of its tokens stands for.

With a tokenizer of the ``tokenizers`` library its offsets tell, but for two habits: many post-processors cut spaces
off them, so that a token of spaces is nowhere; and control tokens may eat the white space beside them
(Phi-3's ``<|assistant|>`` does), which their offsets take in, although they mean the same without it.

A tokenizer in Python has no offsets: where its tokens, decoded, are the text again, the text that the first so many
tokens make tells; else the tokens that a text shares with its own beginning, if it begins with them.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sglang_capture.prompts.errors import RowError
from sglang_capture.prompts.turns import Span, common_prefix

Decode = Callable[[Sequence[int]], str]
Encode = Callable[[str], list[int]]


@dataclass(frozen=True)
class Coverage:
    """Token ``i`` stands for ``text[first[i] : last[i]]``; for nothing if the tokenizer made it up."""

    ids: list[int]
    first: NDArray[np.int64]
    last: NDArray[np.int64]

    def mask(self, spans: Iterable[Span]) -> list[int]:
        """1 for each token with a character of one of ``spans``; one without any goes with what follows it."""
        inside = np.zeros(len(self.ids), dtype=bool)
        for start, stop in spans:
            inside |= np.maximum(self.first, start) < np.minimum(self.last, stop)
            inside |= (self.first == self.last) & (self.first >= start) & (self.first < stop)
        return inside.astype(int).tolist()


def cover(tokenizer: Any, text: str) -> Coverage:
    """The tokens of ``text``, no special ones added, with the characters of each."""
    with _without_post_processor(tokenizer.backend_tokenizer):
        encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids = list(encoding["input_ids"])
    offsets = np.asarray(encoding["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    eaters = {number for number, token in tokenizer.added_tokens_decoder.items() if token.lstrip or token.rstrip}
    for place in np.flatnonzero(np.isin(ids, list(eaters))) if eaters else ():
        first, last = offsets[place]
        eaten = text[first:last]
        if own := eaten.strip():
            start = int(first) + eaten.index(own)
            offsets[place] = start, start + len(own)
    return Coverage(ids, offsets[:, 0], offsets[:, 1])


def tokens_of(ids: list[int], text: str, span: Span, decode: Decode, encode: Encode) -> Span:
    """The tokens with a character of ``text[start:stop]``, told without offsets: the first, and one after the last.

    Raises:
        RowError: it cannot be told.
    """
    if decode(ids) != text:
        return _shared(ids, text[: span[0]], encode), _shared(ids, text[: span[1]], encode)

    def begun(count: int) -> int:
        """Characters that the first ``count`` tokens have a part of; where a part is missing, there is no such text."""
        made = decode(ids[:count])
        whole = common_prefix(made, text)
        return whole + (len(made) > whole)

    def ended(count: int) -> int:
        return common_prefix(decode(ids[:count]), text)

    counts = range(len(ids) + 1)
    return bisect_right(counts, span[0], key=begun) - 1, bisect_left(counts, span[1], key=ended)


def _shared(ids: list[int], beginning: str, encode: Encode) -> int:
    """How many of a text's tokens are those of its ``beginning``."""
    shared = encode(beginning)
    if ids[: len(shared)] != shared:
        raise RowError(
            "the tokens of an assistant's turn cannot be told from those around it with this tokenizer, which does not "
            "say where they stand: use a tokenizer.json of the model, or send input_ids with a loss_mask"
        )
    return len(shared)


@contextmanager
def _without_post_processor(backend: Any) -> Iterator[None]:
    """All it does where no special tokens are added is to cut the offsets."""
    processor = backend.post_processor
    backend.post_processor = None
    try:
        yield
    finally:
        backend.post_processor = processor
