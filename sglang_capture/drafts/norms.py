"""Norms that a draft was trained with, and SGLang runs only if it reads the field that names them.

Sources: ``models/llama_eagle3.py`` and ``models/kimi_k25_eagle3.py`` of 0.5.15 to 0.5.23; for what the fields mean,
speculators' ``Eagle3SpeculatorConfig``, and its trainer, which has ``norm_before_residual`` on unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from sglang_capture.drafts.configs import DraftConfig
from sglang_capture.drafts.findings import Finding, finding
from sglang_capture.drafts.loading import LLAMA_EAGLE3, class_served
from sglang_capture.drafts.releases import holds, is_known

NORM_BEFORE_FC_SINCE: Final = "0.5.17"
"""The first release whose ``LlamaForCausalLMEagle3`` reads ``norm_before_fc``; no other class does."""


def check_norms(draft: DraftConfig, version: str) -> Iterator[Finding]:
    """The norms of an EAGLE-3 draft that are on; nothing for a release that is not known."""
    if draft.kind != "eagle3" or not is_known(version):
        return
    yield from _before_residual(draft, version)
    nested = draft.raw.get("eagle_config")
    inner: Mapping[str, Any] = nested if isinstance(nested, Mapping) else {}
    name = class_served(draft)
    if inner.get("norm_before_fc", draft.raw.get("norm_before_fc")):
        reads = name == LLAMA_EAGLE3 and holds(version, NORM_BEFORE_FC_SINCE)
        remedy = f"serve a {LLAMA_EAGLE3} with SGLang {NORM_BEFORE_FC_SINCE} or later, or train with norm_before_fc off"
        yield _read("norm_before_fc", reads, f"{name} of SGLang {version}", remedy)
    for field in ("fc_norm", "norm_output"):
        top, inside = draft.raw.get(field), inner.get(field)
        if top or inside:
            remedy = f'write "{field}": true beside eagle_config: in it, SGLang passes it by'
            yield _read(field, bool(top), f"{name} of SGLang {version}", remedy)


def _before_residual(draft: DraftConfig, version: str) -> Iterator[Finding]:
    on = draft.raw.get("norm_before_residual")
    expected = f"off: SGLang {version} takes the residual before hidden_norm, and does not read the field"
    remedy = "train with norm_before_residual off for SGLang (speculators: --no-norm-before-residual)"
    if on is None and draft.trainer == "speculators":
        found = "no such field; speculators trains with it on unless told otherwise"
        yield Finding(
            what="norm_before_residual",
            state="unknown",
            expected=expected,
            found=found,
            remedy=f'write "norm_before_residual": false if it was trained so; else {remedy}',
        )
    elif on is not None:
        found = "on: its residual is the normed hidden state" if on else "off"
        yield finding("norm_before_residual", not on, expected, found, remedy)


def _read(field: str, reads: bool, reader: str, remedy: str) -> Finding:
    found = f"on, and read by {reader}" if reads else f"on, and not read by {reader}"
    return finding(field, reads, "a field that SGLang reads where it stands, or off", found, remedy)
