"""What a capture holds and where it came from: the contract between the plugin, the datasets and the trainers.

A :class:`CaptureSpec` travels as JSON inside every dump, in a dataset's manifest, and through every exporter.
Two captures may stand in one dataset when their specs have the same :attr:`~CaptureSpec.digest`.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
import xxhash
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from sglang_capture.layers import canonical_layers, check_layers

LastHidden = Literal["none", "post", "pre", "both"]
"""Which last hidden state: after the final norm (``post``), before it (``pre``), both, or none."""

LAST_HIDDEN_CHOICES: tuple[str, ...] = get_args(LastHidden)

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""The engine dtypes a capture can have, by the name that specs and manifests use."""

PROMPT_LINEAGE = "prompt_lineage"
"""The key of a sample's metadata that says what made its ids and its loss mask (docs/prompts.md)."""

LAST_HIDDEN_KEYS = {"post": "last_hidden_state", "pre": "last_hidden_state_prenorm"}
"""The tensor's name in dumps and shards, by kind."""


class SpecError(ValueError):
    """A spec that cannot be read, or that does not fit what it stands beside."""


class CaptureSpec(BaseModel):
    """What the tensors of a capture are, and their lineage.

    The fields of :data:`IDENTITY` must agree within a dataset; the others only say where a capture came from, and may
    differ between captures of one dataset (an engine restarted with other ranks, say).
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    convention: Literal["hf_hidden_states_index"] = "hf_hidden_states_index"
    layers: tuple[int, ...] = Field(description="hidden-state indices, ascending")
    last_hidden: LastHidden
    hidden_size: int = Field(gt=0)
    num_layers: int = Field(gt=0, description="decoder layers of the target")
    vocab_size: int = Field(gt=0)
    dtype: str = Field(description="bfloat16, float16 or float32")
    architecture: str
    model_path: str
    weights_digest: str = Field(
        default="",
        description="xxh3-128 over the weight files (headers, 512 bytes of each tensor) and config; empty if unknown",
    )
    quantization: str = Field(
        default="",
        description="what the server rounds beyond its files: weights (--quantization), KV cache; empty: nothing",
    )
    revision: str = Field(default="", description="the Hub revision, if known")
    sglang_version: str = ""
    plugin_version: str = ""
    ranks: dict[str, int] = Field(default_factory=dict, description="tp, dp, pp sizes of the server")
    created: str = Field(default="", description="when the server loaded the model, ISO 8601, UTC")

    @field_validator("layers")
    @classmethod
    def _canonical(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return canonical_layers(value)

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str) -> str:
        if value not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}; found {value!r}")
        return value

    def model_post_init(self, _context: object) -> None:
        check_layers(self.layers, self.num_layers)

    @classmethod
    def from_json(cls, text: str | bytes) -> CaptureSpec:
        """Read a spec from its JSON.

        Raises:
            SpecError: it is no JSON, or a field is missing or wrong; the message names the fields.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            faults = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'spec'}: {e['msg']}" for e in error.errors())
            raise SpecError(f"not a capture spec: {faults}") from error

    def to_json(self) -> str:
        return self.model_dump_json()

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def last_hidden_keys(self) -> tuple[str, ...]:
        """Names of the last-hidden-state tensors that come with the layers, post before pre."""
        kinds = {"none": (), "post": ("post",), "pre": ("pre",), "both": ("post", "pre")}[self.last_hidden]
        return tuple(LAST_HIDDEN_KEYS[kind] for kind in kinds)

    @property
    def bytes_per_token(self) -> int:
        """Payload bytes of one token: its id (int64), its layers and its last hidden states."""
        vectors = len(self.layers) + len(self.last_hidden_keys)
        return 8 + vectors * self.hidden_size * self.torch_dtype.itemsize

    @property
    def digest(self) -> str:
        """xxh3-64 (16 hex digits) of the fields in :data:`IDENTITY`; equal digests may share a dataset.

        Weights are named by their digest where there is one, so that one model at two paths stays one model.
        """
        identity = self.model_dump(include=set(IDENTITY), mode="json")
        if not self.weights_digest:
            identity["model"] = [self.model_path, self.revision]
        text = repr(sorted(identity.items()))
        return xxhash.xxh3_64_hexdigest(text.encode())

    def differences(self, other: CaptureSpec) -> list[str]:
        """The identity fields in which two specs differ, as ``field: mine / theirs`` lines; empty if they may mix."""
        if self.digest == other.digest:
            return []
        fields = [*IDENTITY, *(() if self.weights_digest and other.weights_digest else ("model_path", "revision"))]
        pairs = ((name, getattr(self, name), getattr(other, name)) for name in fields)
        return [f"{name}: {mine} / {theirs}" for name, mine, theirs in pairs if mine != theirs]


IDENTITY = (
    "convention",
    "layers",
    "last_hidden",
    "hidden_size",
    "num_layers",
    "vocab_size",
    "dtype",
    "architecture",
    "weights_digest",
    "quantization",
)
"""The fields of a spec that all samples of a dataset share."""
