"""A self-test of a running server: two prompts, and whether its captures can be trusted.

A short prompt is sent several times, and a longer one that begins with it and is cut into chunks. Every row must be
there; at index 0 it must be its token's, on both sides of a cut; the same prompt must give the same rows, though the
second time the server's cache holds it; the longer prompt must begin with the rows of the shorter, since no row depends
on what comes after it; and the state after the final norm must be the norm of the one before it.

What this cannot prove is that the rows under index ``i`` are those of layer ``i``: that takes a second computation
(:mod:`.verify`). It costs a prefill of some thousand tokens and leaves nothing in the spool.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from sglang_capture.client import EngineError, ServerInfo
from sglang_capture.consistency import Agreement, agreement, norm_faults, prompt_faults, row_faults, token_faults
from sglang_capture.dump import Dump
from sglang_capture.probe import ProbeError, Prober
from sglang_capture.spec import CaptureSpec

Take = Callable[[Sequence[int]], Dump]
"""Has a prompt captured, with index 0 and both last hidden states."""

_SHORT_TOKENS: Final = 200
_DISTINCT_TOKENS: Final = 32
"""Few enough that each comes again on both sides of every cut."""
_MOST_TOKENS: Final = 1 << 16
_SPARE_TOKENS: Final = 16
"""Left of the longest prompt: a token is generated, and releases count differently."""
_SHOWN_FAULTS: Final = 3


State = Literal["ok", "warn", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One result; ``advice`` says what to do where something can be done."""

    name: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Prompts:
    """What is sent.

    Attributes:
        long: begins with ``short``.
        sendings: of the short one.
        cut: the chunk size that the long one exceeds; ``None`` if it is computed in one piece, and ``remark`` says why.
        blind: whether other prompts may be cut all the same.
    """

    short: list[int]
    long: list[int]
    sendings: int
    cut: int | None
    remark: str = ""
    blind: bool = False


def run_self_test(prober: Prober, draw: random.Random | None = None) -> Iterator[Finding]:
    """All findings, each as soon as it is known; the last one is the verdict. ``draw`` makes the prompts."""
    layers = tuple(sorted({0, *prober.spec.layers}))
    spec = prober.spec.model_copy(update={"layers": layers, "last_hidden": "both"})
    prompts = choose_prompts(prober.info, spec, prober.status.free_bytes, draw or random.Random())
    yield from examine(lambda ids: prober.take(ids, layers=layers, last_hidden="both"), prompts)


def choose_prompts(info: ServerInfo, spec: CaptureSpec, free_bytes: int, draw: random.Random) -> Prompts:
    """Two prompts of ordinary tokens, as long as they must be and as the server and its spool allow.

    Half of the spool's free space is left to others. With several engines behind one address the short prompt is sent
    once more than there are engines, so that one of them gets it twice.
    """
    fits = free_bytes // 2 // spec.bytes_per_token
    accepted = min(limit for limit in (info.longest_prompt, info.room, _MOST_TOKENS) if limit) - _SPARE_TOKENS
    chunk = info.chunk_size
    # Some servers make a chunk up to a quarter larger than they say.
    wanted = chunk + chunk // 4 + 64 if chunk else 2 * _SHORT_TOKENS
    length = max(2, min(wanted, accepted, fits))
    short = min(_SHORT_TOKENS, chunk or _SHORT_TOKENS, length // 2)
    long = _draw(spec.vocab_size, length, draw)
    cut: tuple[int | None, str, bool]
    if chunk is None:
        cut = (None, "the server does not say into which chunks it cuts a prompt", True)
    elif chunk == 0:
        cut = (None, "this server never cuts a prompt into chunks", False)
    elif length > chunk:
        cut = (chunk, "", False)
    elif accepted <= chunk:
        cut = (None, f"the longest prompt that it takes fits into one chunk of {chunk:,}", False)
    else:
        cut = (None, f"half of the free spool would not hold a prompt longer than a chunk of {chunk:,}", True)
    return Prompts(long[:short], long, info.dp_size + 1, *cut)


def _draw(vocabulary: int, length: int, draw: random.Random) -> list[int]:
    """Random ids, no two neighbours alike, from the middle of the vocabulary: its ends hold control tokens."""
    low, high = vocabulary // 4, max(vocabulary // 2, vocabulary // 4 + 2)
    ids = draw.sample(range(low, high), min(_DISTINCT_TOKENS, high - low))
    drawn = [draw.choice(ids)]
    while len(drawn) < length:
        drawn.append(draw.choice([one for one in ids if one != drawn[-1]]))
    return drawn


def examine(take: Take, prompts: Prompts) -> Iterator[Finding]:
    """Send the prompts and look at what comes back."""
    states: list[State] = []
    for finding in _findings(take, prompts):
        states.append(finding.state)
        yield finding
    yield _verdict("wrong" if "wrong" in states else "warn" if "warn" in states else "ok")


def _findings(take: Take, prompts: Prompts) -> Iterator[Finding]:
    try:
        shorts = [take(prompts.short) for _ in range(prompts.sendings)]
        long = take(prompts.long)
    except (ProbeError, EngineError) as error:
        yield Finding("capture", "warn" if error.retriable else "wrong", str(error))
        return
    dumps = [*shorts, long]
    counts = " + ".join(f"{dump.tokens:,}" for dump in dumps)
    others = [fault for dump in shorts for fault in prompt_faults(dump, prompts.short)]
    others += prompt_faults(long, prompts.long)
    if others:
        yield _finding("rows", others, "")
        return
    yield _finding(
        "rows",
        [fault for dump in dumps for fault in row_faults(dump)],
        f"{counts} of each state, none missing, NaN, Inf, zero or there twice",
    )
    yield _finding(
        "tokens",
        [fault for dump in dumps for fault in token_faults(dump)],
        "every row of index 0 is that of its token",
        "Rows stand beside the wrong tokens, or this model's embeddings are not of one token each",
    )
    again = [agreement(dump, shorts[0]) for dump in shorts[1:]]
    yield _finding(
        "again",
        [fault for one in again for fault in one.faults],
        f"the same prompt {len(shorts)} times gave the same rows, {_nearness(again)}",
        _ONCE_MORE,
    )
    begins = agreement(long, shorts[0])
    pieces = "in one piece" if prompts.cut is None else f"in chunks of {prompts.cut:,}"
    yield _finding(
        "prefix",
        begins.faults,
        f"{long.tokens:,} tokens {pieces} begin with the rows of their first {len(prompts.short):,} alone, "
        f"{_nearness([begins])}",
        _ONCE_MORE,
    )
    if prompts.remark:
        yield Finding("chunks", "warn" if prompts.blind else "ok", prompts.remark)
    yield _finding(
        "norm",
        [fault for dump in dumps for fault in norm_faults(dump)],
        "the last hidden state after the norm is the norm of the one before it",
        "The two may be exchanged, or of different rows; or this model's final norm is no RMS norm",
    )


_ONCE_MORE: Final = "Run it again, with other prompts: a nearly tied router of experts does this once, a fault always"


def _nearness(found: Sequence[Agreement]) -> str:
    worst = max(one.worst for one in found)
    return "bit for bit" if all(one.identical for one in found) else f"within {worst:.0e}"


def _finding(name: str, faults: list[str], good: str, advice: str = "") -> Finding:
    if not faults:
        return Finding(name, "ok", good)
    shown = "; ".join(dict.fromkeys(faults[:_SHOWN_FAULTS]))
    more = f"; and {len(faults) - _SHOWN_FAULTS} more" if len(faults) > _SHOWN_FAULTS else ""
    return Finding(name, "wrong", shown + more, advice)


def _verdict(state: State) -> Finding:
    found = {
        "ok": "captures from this server can be trusted to be whole, in their places, repeatable and causal. Whether a "
        "layer is the one it is called takes a second computation: `sglang-capture verify` on a few captures",
        "warn": "not all could be tried, so this says little",
        "wrong": "captures from this server cannot be trusted",
    }
    return Finding("verdict", state, found[state])
