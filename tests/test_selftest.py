"""The self-test passes what a right server hands out, and names each way in which another is wrong."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from causal_model import CausalModel
from factories import make_spec

from sglang_capture.client import EngineUnreachable, ServerInfo
from sglang_capture.dump import Dump
from sglang_capture.probe import ProbeError
from sglang_capture.selftest import Finding, Prompts, choose_prompts, examine
from sglang_capture.spec import CaptureSpec

CHUNK = 64


def spec_of(dtype: str) -> CaptureSpec:
    return make_spec(layers=(0, 2, 3), last_hidden="both", hidden_size=16, num_layers=5, dtype=dtype)


def right_server(dtype: str = "float32") -> Callable[[Sequence[int]], Dump]:
    spec = spec_of(dtype)
    model = CausalModel(spec)
    return lambda ids: model.dump(spec, ids)


INFO = ServerInfo("m", "m", "m", "0.5.23", "A", longest_prompt=4000, chunk_size=CHUNK, room=16384)


def prompts_for(info: ServerInfo = INFO, free_bytes: int = 1 << 30) -> Prompts:
    return choose_prompts(info, spec_of("float32"), free_bytes, random.Random(1))


def self_test(take: Callable[[Sequence[int]], Dump]) -> dict[str, Finding]:
    return {finding.name: finding for finding in examine(take, prompts_for())}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_right_server_passes(dtype: str) -> None:
    found = self_test(right_server(dtype))
    assert list(found) == ["rows", "tokens", "again", "prefix", "norm", "verdict"]
    assert {finding.state for finding in found.values()} == {"ok"}, found
    assert "64 + 64 + 144" in found["rows"].found
    assert "in chunks of 64" in found["prefix"].found
    assert "sglang-capture verify" in found["verdict"].found


def moved(dump: Dump, step: int, only: slice = slice(None)) -> Dump:
    """Rows of every state (within ``only``) exchanged for those of a neighbour."""

    def move(rows: torch.Tensor) -> torch.Tensor:
        result = rows.clone()
        result[only] = rows.roll(step, dims=0)[only]
        return result

    last = {key: move(rows) for key, rows in dump.last_hidden.items()}
    return replace(dump, hidden_states=move(dump.hidden_states), last_hidden=last)


def with_rows(dump: Dump, where: slice, value: float, *, last: bool = False) -> Dump:
    damaged = replace(
        dump,
        hidden_states=dump.hidden_states.clone(),
        last_hidden={key: rows.clone() for key, rows in dump.last_hidden.items()},
    )
    (damaged.last_hidden["last_hidden_state"] if last else damaged.hidden_states[:, 1])[where] = value
    return damaged


def cut(dump: Dump, tokens: int, *, ids: bool) -> Dump:
    last = {key: rows[:tokens] for key, rows in dump.last_hidden.items()}
    short = replace(dump, hidden_states=dump.hidden_states[:tokens], last_hidden=last)
    return replace(short, input_ids=short.input_ids[:tokens]) if ids else short


def exchanged(dump: Dump) -> Dump:
    post, pre = dump.last_hidden.values()
    return replace(dump, last_hidden={"last_hidden_state": pre, "last_hidden_state_prenorm": post})


def with_layers(dump: Dump, *slots: int) -> Dump:
    return replace(dump, hidden_states=dump.hidden_states[:, list(slots)])


def without_the_first_chunk(dump: Dump) -> Dump:
    """The rows of the second chunk in the place of the first, as an offset that is not advanced leaves them."""
    return moved(dump, -CHUNK, slice(0, CHUNK))


def one_row_for_all_tokens(dump: Dump) -> Dump:
    hidden = dump.hidden_states.clone()
    hidden[:, 0] = hidden[0, 0]
    return replace(dump, hidden_states=hidden)


ALWAYS = {
    "rows of the token before": (lambda dump: moved(dump, 1), {"tokens"}),
    "rows of the token after": (lambda dump: moved(dump, -1), {"tokens"}),
    "an all-zero row": (lambda dump: with_rows(dump, slice(5, 6), 0), {"rows"}),
    "NaN": (lambda dump: with_rows(dump, slice(5, 6), torch.nan), {"rows", "again", "prefix"}),
    "Inf in the last state": (lambda dump: with_rows(dump, slice(5, 6), torch.inf, last=True), {"rows", "norm"}),
    "the last row is missing": (lambda dump: cut(dump, dump.tokens - 1, ids=False), {"rows"}),
    "the last token is missing": (lambda dump: cut(dump, dump.tokens - 1, ids=True), {"rows"}),
    "another prompt": (lambda dump: replace(dump, input_ids=dump.input_ids.flip(0)), {"rows"}),
    "the last states exchanged": (exchanged, {"norm"}),
    "one layer under two names": (lambda dump: with_layers(dump, 0, 1, 1), {"rows"}),
    "no embeddings at index 0": (lambda dump: with_layers(dump, 1, 1, 2), {"tokens"}),
    "the same row for all tokens": (one_row_for_all_tokens, {"rows", "tokens"}),
}


@pytest.mark.parametrize("fault", ALWAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_fault_in_every_capture_is_found(fault: str, dtype: str) -> None:
    damage, checks = ALWAYS[fault]
    model = right_server(dtype)
    found = self_test(lambda ids: damage(model(ids)))
    assert checks <= {name for name, finding in found.items() if finding.state == "wrong"}, found
    assert found["verdict"].state == "wrong" and "cannot be trusted" in found["verdict"].found


LONG_ONLY = {
    "the second chunk in the place of the first": (without_the_first_chunk, {"tokens", "prefix"}),
    "shifted behind the cut": (lambda dump: moved(dump, 1, slice(CHUNK, None)), {"tokens"}),
    "nothing behind the cut": (lambda dump: with_rows(dump, slice(CHUNK, None), 0), {"rows"}),
    "the last row is missing": (lambda dump: cut(dump, dump.tokens - 1, ids=False), {"rows"}),
    "one row twice at the cut": (lambda dump: moved(dump, 1, slice(CHUNK, CHUNK + 1)), {"rows", "tokens"}),
}


@pytest.mark.parametrize("fault", LONG_ONLY)
def test_a_fault_of_chunks_alone_is_found(fault: str) -> None:
    damage, checks = LONG_ONLY[fault]
    model = right_server()
    found = self_test(lambda ids: damage(model(ids)) if len(ids) > CHUNK else model(ids))
    assert checks <= {name for name, finding in found.items() if finding.state == "wrong"}, found


def test_a_cache_that_takes_rows_away_is_found() -> None:
    model, seen = right_server(), set[tuple[int, ...]]()

    def take(ids: Sequence[int]) -> Dump:
        again = tuple(ids) in seen
        seen.add(tuple(ids))
        return moved(model(ids), 3) if again else model(ids)

    found = self_test(take)
    assert found["again"].state == "wrong" and "index 0: " in found["again"].found


def test_an_embedding_is_the_same_bit_for_bit_in_any_precision() -> None:
    model, sent = right_server("bfloat16"), 0

    def take(ids: Sequence[int]) -> Dump:
        nonlocal sent
        sent += 1
        dump = model(ids)
        if sent == 2:
            dump.hidden_states[:, 0, :1] *= 1 + 2**-7  # one number of each row, by as little as bfloat16 can
        return dump

    found = self_test(take)
    assert {name for name, finding in found.items() if finding.state == "wrong"} == {"again", "verdict"}
    assert found["again"].found.startswith("index 0: 64 of 64 rows differ")


def test_rows_that_depend_on_what_comes_later_are_found() -> None:
    model = right_server()

    def take(ids: Sequence[int]) -> Dump:
        dump = model(ids)
        return replace(dump, hidden_states=dump.hidden_states * torch.tensor([1.0, 1.0, 1 + len(ids) / 1e5])[:, None])

    found = self_test(take)
    wrong = {name: finding.found for name, finding in found.items() if finding.state == "wrong"}
    assert wrong.keys() == {"prefix", "verdict"}
    assert wrong["prefix"].startswith("index 3: 64 of 64 rows differ") and "first at position 0" in wrong["prefix"]


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ProbeError("spool full", retriable=True), "warn"),
        (ProbeError("it captured nothing: no layer"), "wrong"),
        (EngineUnreachable("http://x", "gone"), "warn"),
    ],
    ids=["for want of room", "refused", "unreachable"],
)
def test_a_capture_that_does_not_come_ends_it(error: Exception, state: str) -> None:
    def take(ids: Sequence[int]) -> Dump:
        raise error

    found = self_test(take)
    assert found["capture"] == Finding("capture", state, str(error))
    assert found.keys() == {"capture", "verdict"} and found["verdict"].state == state


def test_the_longer_prompt_crosses_a_chunk_and_begins_with_the_shorter() -> None:
    prompts = prompts_for()
    assert (len(prompts.short), len(prompts.long), prompts.cut, prompts.remark) == (64, 144, 64, "")
    assert prompts.long[:64] == prompts.short
    assert all(one != other for one, other in zip(prompts.long, prompts.long[1:], strict=False))
    assert 25 < len(set(prompts.long)) <= 32 and all(128 <= one < 256 for one in prompts.long)


def test_a_server_of_several_engines_gets_the_short_prompt_once_more_than_it_has_engines() -> None:
    assert prompts_for(replace(INFO, dp_size=4)).sendings == 5


ROW = spec_of("float32").bytes_per_token


@pytest.mark.parametrize(
    ("changes", "free_bytes", "length", "blind", "remark"),
    [
        ({"chunk_size": 0}, 1 << 30, 400, False, "never cuts"),
        ({"chunk_size": None}, 1 << 30, 400, True, "does not say"),
        ({"chunk_size": 8192}, 1 << 30, 3984, False, "the longest prompt that it takes fits into one chunk of 8,192"),
        ({"chunk_size": 8192, "longest_prompt": 1 << 20, "room": 512}, 1 << 30, 496, False, "fits into one chunk"),
        ({}, 2 * 50 * ROW, 50, True, "half of the free spool would not hold"),
        ({}, 0, 2, True, "half of the free spool would not hold"),
        ({"longest_prompt": None, "room": None, "chunk_size": 1 << 20}, 1 << 40, 65520, False, "fits into one chunk"),
    ],
)
def test_where_no_chunk_can_be_crossed_it_says_why(
    changes: dict[str, int | None], free_bytes: int, length: int, blind: bool, remark: str
) -> None:
    prompts = prompts_for(replace(INFO, **changes), free_bytes)  # type: ignore[arg-type]
    assert (len(prompts.long), prompts.cut, prompts.blind) == (length, None, blind)
    assert remark in prompts.remark and 1 <= len(prompts.short) < length
    found = {finding.name: finding for finding in examine(right_server(), prompts)}
    assert found["chunks"].state == ("warn" if blind else "ok")
    assert found["verdict"].state == found["chunks"].state
