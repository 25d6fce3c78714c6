"""What is asked for, checked before anything is sent: a prompt, its layers, and what its capture will be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import xxhash

from sglang_capture.catalog import CaptureRow, origin, pack_mask
from sglang_capture.dump import reserved_bytes
from sglang_capture.errors import CaptureError
from sglang_capture.layers import LayerError, canonical_layers
from sglang_capture.prompts import Prompt, RowError, TooLong, canonical, check_vocabulary, parse_row
from sglang_capture.prompts.rows import content_id, identity, parse_ids
from sglang_capture.service.author import Assignment
from sglang_capture.service.options import LayoutOptions
from sglang_capture.service.problems import ProblemError
from sglang_capture.service.tokenizers import Tokenizers
from sglang_capture.spec import CaptureSpec, LastHidden, SpecError
from sglang_capture.spool import PROBE_PREFIX, SpoolStatus, is_probe

RESERVED_IDS = frozenset({"jobs", "shards", "export"})
"""Ids that cannot be asked for: below ``/capture/`` these are routes."""

_SPECIAL_TOKENS = 8
"""Most tokens that a tokenizer puts around a text by itself."""


@dataclass(frozen=True)
class Ask:
    """A capture to make: the prompt, and what the client wants otherwise than the server is set."""

    prompt: Prompt
    layers: tuple[int, ...] | None = None
    last_hidden: LastHidden | None = None
    assignment: Assignment | None = None
    """The answers that the target writes first; with them, the prompt's digest is that of the request."""

    @property
    def capture_id(self) -> str:
        return self.prompt.capture_id

    @property
    def digest(self) -> str:
        """What the record keeps to know the same request again: of what is sent, and of the loss mask."""
        if self.assignment is not None:
            return self.prompt.digest
        mask = b"" if self.loss_mask is None else self.loss_mask
        return xxhash.xxh3_128_hexdigest(self.prompt.digest.encode() + mask)

    @cached_property
    def sent(self) -> str:
        """What its dump is known by, of whatever request it is."""
        if self.prompt.input_ids is not None:
            return origin.of_ids(self.prompt.input_ids)
        return origin.of_text(self.prompt.text or "")

    @property
    def loss_mask(self) -> bytes | None:
        return None if self.prompt.loss_mask is None else pack_mask(self.prompt.loss_mask)

    def spec(self, status: SpoolStatus) -> CaptureSpec:
        """What the capture will be, on the server of ``status``.

        Raises:
            ProblemError: the model has no such layer, or a token id is outside its vocabulary.
        """
        spec = expected_spec(status, self.layers, self.last_hidden)
        try:
            check_vocabulary(self.prompt, spec.vocab_size)
        except RowError as error:
            raise ProblemError("invalid-row", str(error)) from error
        return spec

    @property
    def is_tokenized(self) -> bool:
        """Whether it is known how many tokens will be run."""
        return self.prompt.input_ids is not None

    def most_bytes(self, spec: CaptureSpec) -> int:
        """Most bytes its dump can take: a text has at most a token for each byte."""
        if self.prompt.input_ids is not None:
            return reserved_bytes(len(self.prompt.input_ids), spec)
        return reserved_bytes(len((self.prompt.text or "").encode()) + _SPECIAL_TOKENS, spec)

    def is_of(self, row: CaptureRow) -> bool:
        """Whether a record with a dump can be told to be of this very request.

        A dump that came from elsewhere has no request digest; an id made from what is asked for leads to it, and its
        ids, or the text that its request's id names, prove it. The id alone does not: anybody may give it to a request.
        """
        if row.request_digest is not None:
            return row.request_digest == self.digest
        if self.assignment is not None:
            return False  # answers that are yet to be written prove nothing
        if row.sent != self.sent:
            return False
        return self.loss_mask is None and row.id.startswith(content_id(self.prompt.digest))


class AskReader:
    """Turns requests and rows into asks, with the tokenizer of the server's model. Blocks; safe for threads."""

    def __init__(self, tokenizers: Tokenizers):
        self._tokenizers = tokenizers

    def read(
        self,
        row: Mapping[str, Any],
        options: LayoutOptions,
        *,
        layers: list[int] | None = None,
        last_hidden: LastHidden | None = None,
    ) -> Ask:
        """The ask of one row.

        Where the row has no id and layers or a last hidden state are asked for, they are part of the id that is made:
        the same rows may be captured with several sets of layers.

        Raises:
            ProblemError: the row or the layers cannot be used, or a conversation comes and there is no tokenizer.
        """
        try:
            chosen = None if layers is None else canonical_layers(layers)
            prompt, assignment = self._parse(row, options)
        except LayerError as error:
            raise ProblemError("invalid-request", str(error)) from error
        except TooLong as error:
            raise ProblemError("too-long", str(error)) from error
        except RowError as error:
            raise ProblemError("invalid-row", str(error)) from error
        except CaptureError as error:
            raise ProblemError("no-tokenizer", str(error)) from error
        _check_free(prompt.capture_id)
        if not prompt.named and (chosen is not None or last_hidden is not None):
            asked = xxhash.xxh3_64_hexdigest(repr((chosen, last_hidden)).encode())[:8]
            prompt = replace(prompt, capture_id=f"{prompt.capture_id}-{asked}")
        return Ask(prompt, chosen, last_hidden, assignment)

    def _parse(self, row: Mapping[str, Any], options: LayoutOptions) -> tuple[Prompt, Assignment | None]:
        content, layout = canonical(row), options.layout()
        if options.generate is not None:
            return _unwritten(content, Assignment(content, options.generate, layout))
        if "messages" in content or ("text" in content and layout.max_length is not None):
            return self._tokenizers.with_tokenizer(lambda tokenizer: parse_row(content, tokenizer, layout)), None
        return parse_row(content, None, layout), None


def _unwritten(content: Mapping[str, Any], assignment: Assignment) -> tuple[Prompt, Assignment]:
    """The prompt of answers that are yet to be written, named after what is asked for."""
    if "loss_mask" in content:
        raise RowError(
            "a loss_mask says that the answers are there; to have them written, send the question's ids alone"
        )
    if "input_ids" in content:
        parse_ids(content["input_ids"])
    capture_id, metadata = identity(content)
    asked = {key: value for key, value in content.items() if key in ("messages", "tools", "text", "input_ids")}
    wish = [asked, assignment.options.model_dump(), assignment.layout.max_length, assignment.layout.only_last_turn]
    digest = xxhash.xxh3_128_hexdigest(b"generate" + json.dumps(wish, sort_keys=True, default=str).encode())
    return Prompt(capture_id or content_id(digest), None, None, None, metadata, digest), assignment


def _check_free(capture_id: str) -> None:
    if capture_id in RESERVED_IDS:
        raise ProblemError("invalid-row", f"{capture_id} is the name of a route: give another capture_id")
    if is_probe(capture_id):
        raise ProblemError(
            "invalid-row",
            f"{capture_id} begins with {PROBE_PREFIX}, as the captures do that doctor and verify make and remove: "
            "give another capture_id",
        )


def expected_spec(status: SpoolStatus, layers: tuple[int, ...] | None, last_hidden: LastHidden | None) -> CaptureSpec:
    """The spec that the server of ``status`` gives captures which ask for this.

    Raises:
        ProblemError: its model has no such layer.
    """
    wanted = {"layers": layers, "last_hidden": last_hidden}
    try:
        return CaptureSpec.from_json(
            json.dumps({**status.spec, **{name: value for name, value in wanted.items() if value is not None}})
        )
    except (LayerError, SpecError) as error:
        raise ProblemError("invalid-request", str(error)) from error
