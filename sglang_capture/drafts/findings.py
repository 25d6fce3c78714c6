"""One fact that was compared."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field

State = Literal["same", "different", "unknown"]


class Finding(BaseModel):
    """One fact that must fit."""

    what: str
    state: State
    expected: str = Field(description="what the dataset, the trainer or the release of SGLang wants")
    found: str = Field(description="what the draft says, or is fed, or the dataset holds for it")
    remedy: str = Field(default="", description="what to do if it does not fit")


def finding(what: str, same: bool, expected: str, found: str, remedy: str) -> Finding:
    """The same, or different and what to do."""
    return Finding(
        what=what, state="same" if same else "different", expected=expected, found=found, remedy="" if same else remedy
    )
