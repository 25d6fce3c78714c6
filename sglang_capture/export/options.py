"""What can be asked of an export beside its format. Each format says which of these it takes."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel, ConfigDict, Field


class ExportOptions(BaseModel):
    """The options of an export; one that is not given leaves the format as its trainer expects it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str | None = Field(
        default=None, min_length=1, description="directory of the target's weights, for what cannot be made without"
    )
    draft_vocab_size: int | None = Field(
        default=None, gt=0, description="tokens of the draft's vocabulary: the most frequent supervised ones"
    )
    seq_length: int | None = Field(default=None, gt=1, description="longer samples are cut to so many tokens")
    fp8: bool = Field(default=False, description="store hidden states as float8_e4m3fn, with a scale for each token")

    @property
    def given(self) -> frozenset[str]:
        """The names of the options that were given."""
        return frozenset(name for name in ExportOptions.model_fields if getattr(self, name) not in (None, False))


NO_OPTIONS: Final = ExportOptions()


def flag(option: str) -> str:
    """How the command spells an option."""
    return "--" + option.replace("_", "-")
