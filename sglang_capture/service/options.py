"""How prompts are laid out and answered, as clients ask for it: the same for one capture and for a job."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from sglang_capture.prompts import Layout


class GenerateOptions(BaseModel):
    """How the target writes the answers."""

    model_config = ConfigDict(extra="forbid")

    max_new_tokens: int = Field(default=4096, ge=1, description="most tokens of one answer")
    temperature: float = Field(default=1.0, ge=0, description="0: always the likeliest token")


class LayoutOptions(BaseModel):
    """What of a conversation is captured, and what of it is learned."""

    model_config = ConfigDict(extra="forbid")

    max_length: int | None = Field(
        default=None, ge=1, description="most tokens; a longer conversation ends with the last answer that is whole"
    )
    only_last_turn: bool = Field(default=False, description="the loss mask covers only the last answer")
    generate: GenerateOptions | None = Field(
        default=None, description="the target writes the answers first; the loss mask covers what it wrote"
    )

    def layout(self) -> Layout:
        return Layout(self.max_length, self.only_last_turn)
