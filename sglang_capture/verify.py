"""Verify: recompute some captures, and say how far each kind of row is from what it should be, and where that begins.

Computed again either by transformers on the same weights, or by a second SGLang server (:mod:`.references`); what is
allowed, and how a difference is found, is in :mod:`.comparison`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path

from pydantic import BaseModel, Field

from sglang_capture.comparison import Comparison, Difference, KindReport, RelativeError, Rows, rows_of
from sglang_capture.dump import Dump
from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.oracle import Oracle
from sglang_capture.probe import Prober
from sglang_capture.references import Reference, ServerReference, TransformersReference
from sglang_capture.source import Source
from sglang_capture.verify_sources import open_source

Progress = Callable[[int, int], None]
"""Called with the captures recomputed and how many there will be."""


class VerifyError(CaptureError):
    """There is nothing to compare."""


class NothingToVerifyError(VerifyError, UsageError):
    """A place that was named for its captures, and is empty."""


class VerifyReport(BaseModel):
    """What was compared, and the verdict."""

    ok: bool
    source: str
    model: str = Field(description="what it was compared with: a model of transformers, or a server")
    samples: int
    tokens: int
    with_media: int = Field(
        default=0, description="captures passed by: with images or sound, which a capture does not hold"
    )
    labelled: int = Field(default=0, description="captures passed by: labelled to have NaN or Inf in their rows")
    reference_nonfinite: int = Field(
        default=0, description="captures passed by: what they would be compared with gave NaN or Inf"
    )
    dtype: str = Field(description="of the captures")
    oracle_dtype: str = Field(description="in which they were computed again")
    worst_error: RelativeError
    first_difference: Difference | None = Field(
        description="where it begins: the lowest layer that differs, at its earliest position"
    )
    kinds: list[KindReport]


def verify_dataset(
    source: Path,
    *,
    model: str | None = None,
    sample: int = 8,
    seed: int = 0,
    dtype: str = "float32",
    device: str = "cpu",
    tolerance: float | None = None,
    trust_remote_code: bool = False,
    progress: Progress = lambda done, total: None,
) -> VerifyReport:
    """Recompute ``sample`` captures of a dataset, a spool, one dump, or an export of ours, with transformers.

    Args:
        model: where the weights are; as the captures say by default.
        seed: which captures are taken; the same seed takes the same ones.
        dtype: in which transformers computes.
        device: where it computes, as ``Oracle.load`` takes it.
        tolerance: allow each row this error instead of what the precision allows (index 0 keeps its own bound).

    Raises:
        CaptureError: ``source`` is none of these, is damaged or empty; or the model cannot be loaded, or is another.
    """
    captures, chosen = _chosen(source, sample, seed)
    path = model or captures.load(chosen[0]).spec.model_path
    oracle = Oracle.load(path, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
    return _verify(source, captures, chosen, TransformersReference(oracle, path), tolerance, progress)


def verify_with_server(
    source: Path,
    url: str,
    spool: Path,
    *,
    sample: int = 8,
    seed: int = 0,
    tolerance: float | None = None,
    progress: Progress = lambda done, total: None,
) -> VerifyReport:
    """Have the server at ``url``, whose spool is ``spool``, capture the same prompts, and compare.

    It needs the plugin and the same model; best in float32. Its captures are removed as soon as they are read.

    Raises:
        CaptureError: as :func:`verify_dataset`; or that server does not answer, cannot be read from here, runs another
            model, or refuses a capture.
    """
    captures, chosen = _chosen(source, sample, seed)
    reference = ServerReference(Prober.connect(url, spool))
    return _verify(source, captures, chosen, reference, tolerance, progress)


def verify_dumps(
    dumps: Iterable[Dump],
    reference: Reference,
    *,
    tolerance: float | None = None,
    progress: Callable[[int], None] = lambda done: None,
) -> VerifyReport:
    """Compare ``dumps`` with what ``reference`` computes for their prompts.

    Raises:
        VerifyError: there is no dump.
        CaptureError: one is of another model than the reference's.
    """
    comparison = Comparison(tolerance)
    passed_by = Counter[str]()
    samples, tokens, dtype = 0, 0, ""
    for dump in dumps:
        reference.check(dump.spec)
        if not reference.placeholders.isdisjoint(dump.input_ids.tolist()):
            passed_by["with_media"] += 1
        elif dump.nonfinite_rows:
            passed_by["labelled"] += 1
        elif not _finite(expected := reference.rows(dump), rows_of(dump)):
            passed_by["reference_nonfinite"] += 1
        else:
            comparison.add(dump, expected, reference.dtype)
            samples, tokens, dtype = samples + 1, tokens + dump.tokens, dump.spec.dtype
            progress(samples)
    kinds = comparison.kinds
    if not kinds:
        raise _nothing_compared(passed_by, reference)
    return VerifyReport(
        ok=all(kind.ok for kind in kinds),
        source="",
        model=reference.name,
        samples=samples,
        tokens=tokens,
        **passed_by,
        dtype=dtype,
        oracle_dtype=reference.dtype,
        worst_error=max(kind.worst_error for kind in kinds),
        first_difference=comparison.first_difference,
        kinds=kinds,
    )


def _finite(rows: Rows, kinds: Iterable[str]) -> bool:
    """Whether the rows of these kinds are free of NaN and Inf."""
    return all(bool(rows[name].isfinite().all()) for name in kinds)


def _nothing_compared(passed_by: Counter[str], reference: Reference) -> VerifyError:
    reasons = {
        "with_media": "made with images or sound, which a capture does not hold: they cannot be recomputed",
        "labelled": "labelled to have NaN or Inf in their rows: the engine computed them so, and they are not compared",
        "reference_nonfinite": f"such that {reference.name} itself gives NaN or Inf in {reference.dtype}: look at its "
        "weights, or compute in another dtype",
    }
    if not passed_by:
        return VerifyError("no captures to verify")
    found = "; ".join(f"{count} {reasons[name]}" for name, count in passed_by.items())
    return VerifyError(
        f"all {passed_by.total()} captures taken are passed by: {found}. Take more with --sample, or capture some text"
    )


def _chosen(source: Path, sample: int, seed: int) -> tuple[Source, list[str]]:
    captures = open_source(source)
    chosen = captures.choose(sample, seed)
    if not chosen:
        raise NothingToVerifyError(f"{source} holds no captures: nothing to verify")
    return captures, chosen


def _verify(
    source: Path,
    captures: Source,
    chosen: list[str],
    reference: Reference,
    tolerance: float | None,
    progress: Progress,
) -> VerifyReport:
    report = verify_dumps(
        map(captures.load, chosen), reference, tolerance=tolerance, progress=lambda done: progress(done, len(chosen))
    )
    return report.model_copy(update={"source": str(source)})
