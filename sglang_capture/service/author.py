"""Having the target write answers before they are captured: data on which a draft sees what the target itself says."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from sglang_capture.client import Answer, EngineError, EngineUnreachable
from sglang_capture.errors import CaptureError
from sglang_capture.prompts import ChatTokenizer, Layout, Prompt, RowError, TooLong
from sglang_capture.prompts.lengths import lay_out
from sglang_capture.prompts.rows import check_vocabulary, lineage_of
from sglang_capture.prompts.transcript import Transcript
from sglang_capture.service.engine import Engine
from sglang_capture.service.options import GenerateOptions
from sglang_capture.service.problems import ProblemError
from sglang_capture.service.tokenizers import Tokenizers
from sglang_capture.spec import PROMPT_LINEAGE

GENERATION_KEY = "generation"
"""Where a sample's metadata says how its answers were written."""

Result = TypeVar("Result")

_MASK_RULE = "generated/1"
_ATTEMPTS = 3
_PAUSE_SECONDS = 2.0


@dataclass(frozen=True)
class Assignment:
    """What is to be written: the answers of a row, whose ``content`` is as formats.canonical gives it."""

    content: Mapping[str, Any]
    options: GenerateOptions
    layout: Layout


class Author:
    """Has the engine's model write answers."""

    def __init__(self, engine: Engine, tokenizers: Tokenizers):
        self._engine = engine
        self._tokenizers = tokenizers

    async def write(self, prompt: Prompt, assignment: Assignment, vocab_size: int) -> Prompt:
        """``prompt`` with the ids of questions and answers, and a mask that covers what was written.

        An answer that was cut (``length``) ends the conversation. How the answers were written goes into the
        metadata; the digest stays that of the request.

        Raises:
            ProblemError: the row cannot be laid out or is too long, there is no tokenizer, or the engine fails.
        """
        try:
            return await self._write(prompt, assignment, vocab_size)
        except TooLong as error:
            raise ProblemError("too-long", str(error)) from error
        except RowError as error:
            raise ProblemError("invalid-row", str(error)) from error
        except EngineUnreachable as error:
            raise ProblemError("engine-unreachable", str(error)) from error
        except EngineError as error:
            raise ProblemError("capture-failed" if error.retriable else "engine-error", str(error)) from error
        except CaptureError as error:
            raise ProblemError("no-tokenizer", str(error)) from error

    async def _write(self, prompt: Prompt, assignment: Assignment, vocab_size: int) -> Prompt:
        options, most = assignment.options, await self._most_tokens(assignment.layout)
        transcript = await self._lend(assignment, lambda tokenizer: _begin(assignment, tokenizer))
        reasons: list[str] = []
        while await self._lend(assignment, lambda _: transcript.advance()):
            check_vocabulary(replace(prompt, input_ids=transcript.ids), vocab_size)
            room = min(options.max_new_tokens, most - len(transcript.ids))
            if room < 1:
                break
            answer = await self._generate(transcript.ids, room, options.temperature)
            await self._lend(assignment, partial(_add, transcript, answer))
            reasons.append(answer.finish_reason)
            if answer.finish_reason != "stop":
                break
        if not reasons:
            raise TooLong(f"its {len(transcript.ids)} tokens leave no room for an answer: {most} are the most")
        return await self._lend(
            assignment, lambda tokenizer: _written(prompt, transcript, assignment, reasons, tokenizer)
        )

    async def _lend(self, assignment: Assignment, work: Callable[[ChatTokenizer | None], Result]) -> Result:
        """What ``work`` makes of the tokenizer, which bare ids do without."""
        return work(None) if "input_ids" in assignment.content else await self._tokenizers.apart(work)

    async def _most_tokens(self, layout: Layout) -> int:
        """Most tokens that questions and answers may have together, so that the engine takes them as a prompt."""
        longest = await self._engine.longest_prompt()
        limits = [layout.max_length, None if longest is None else longest - 1]
        return min((limit for limit in limits if limit is not None), default=2**31)

    async def _generate(self, ids: list[int], most: int, temperature: float) -> Answer:
        for attempt in range(1, _ATTEMPTS):
            try:
                return await self._engine.client().generate(ids, max_new_tokens=most, temperature=temperature)
            except EngineUnreachable:
                raise
            except EngineError as error:
                if not error.retriable:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS * attempt)
        return await self._engine.client().generate(ids, max_new_tokens=most, temperature=temperature)


def _begin(assignment: Assignment, tokenizer: ChatTokenizer | None) -> Transcript:
    content = assignment.content
    if tokenizer is None:
        return Transcript.behind(content["input_ids"])
    if "messages" in content:
        return Transcript(content["messages"], tokenizer, tools=content.get("tools"))
    return Transcript.behind(tokenizer.encode_text(content["text"]))


def _add(transcript: Transcript, answer: Answer, _tokenizer: ChatTokenizer | None) -> None:
    transcript.add(answer.ids, answer.end)


def _written(
    prompt: Prompt, transcript: Transcript, assignment: Assignment, reasons: list[str], tokenizer: ChatTokenizer | None
) -> Prompt:
    ids, mask = lay_out(*transcript.written, Layout(only_last_turn=assignment.layout.only_last_turn))
    generation = {"finish_reason": reasons[-1], "answers": len(reasons), **assignment.options.model_dump()}
    metadata = {**prompt.metadata, GENERATION_KEY: generation}
    if tokenizer is not None and "messages" in assignment.content:
        metadata[PROMPT_LINEAGE] = lineage_of(tokenizer, assignment.layout, _MASK_RULE)
    return replace(prompt, input_ids=ids, text=None, loss_mask=mask, metadata=metadata)
