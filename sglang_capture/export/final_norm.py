"""The target's own final norm, for datasets that hold the last hidden state before it only.

A trainer that wants the state after the norm multiplies it with the output head and never applies one, so what it gets
must be the very norm of the model: the weight and eps from its files, and a formula that is known for its architecture.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from sglang_capture.export.base import ExportError, ExportUsageError
from sglang_capture.spec import CaptureSpec
from sglang_capture.weights import weights_digest

_NORM: Final = "model.norm.weight"

_WEIGHTS: Final = {
    "DeepseekV2ForCausalLM": _NORM,
    "DeepseekV3ForCausalLM": _NORM,
    "DeepseekV32ForCausalLM": _NORM,
    "KimiK25ForConditionalGeneration": f"language_model.{_NORM}",
    "KimiVLForConditionalGeneration": f"language_model.{_NORM}",
    "LlamaForCausalLM": _NORM,
    "MistralForCausalLM": _NORM,
    "Qwen2ForCausalLM": _NORM,
    "Qwen3ForCausalLM": _NORM,
    "Qwen3MoeForCausalLM": _NORM,
}
"""Architectures whose final norm is ``weight * x / sqrt(mean(x²) + eps)`` with ``eps`` = ``rms_norm_eps`` (their
modeling files in transformers), and the weight's name. Gemma's multiplies with ``1 + weight``: not here."""


@dataclass(frozen=True)
class FinalNorm:
    """RMSNorm, computed in float32.

    Attributes:
        weight: float32 ``[H]``.
        name: the weight's name in the model's files.
        model: where it was read.
    """

    weight: torch.Tensor
    eps: float
    name: str
    model: str

    @classmethod
    def load(cls, model: str, spec: CaptureSpec) -> FinalNorm:
        """Read the norm of the model in the directory ``model``, which captures of ``spec`` must be of.

        Raises:
            ExportError: its norm is not known exactly, or its files cannot be read.
            ExportUsageError: it is another model, or none.
        """
        name = _WEIGHTS.get(spec.architecture)
        if name is None:
            raise ExportError(
                f"the final norm of {spec.architecture} is not one that is known here exactly, so the last hidden "
                f"state after it cannot be made from the one before (known: {', '.join(sorted(_WEIGHTS))}): capture "
                "again with SGLANG_CAPTURE_LAST_HIDDEN=post"
            )
        directory = Path(model)
        config = read_config(directory)
        check_same_model(directory, config, spec)
        eps = config.get("text_config", config).get("rms_norm_eps")
        if not isinstance(eps, float):
            raise ExportError(f"{directory / 'config.json'} has no rms_norm_eps: expected a number, found {eps!r}")
        weight = read_weight(directory, name)
        if weight.shape != (spec.hidden_size,):
            raise ExportUsageError(
                f"{name} in {directory} is {list(weight.shape)}, and the captures have hidden size "
                f"{spec.hidden_size}: name the model that was captured with --model"
            )
        return cls(weight.float(), eps, name, model)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``[T, H]`` before the norm to float32 ``[T, H]`` after it."""
        wide = rows.float()
        return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps) * self.weight

    @property
    def note(self) -> str:
        return (
            "the last hidden state after the final norm was computed from the captured one before it: RMSNorm in "
            f"float32 with {self.name} of {self.model} and eps {self.eps:g}, rounded once; the engine's "
            "own norm differs by rounding"
        )


def weight_files(directory: Path) -> dict[str, str]:
    """The file that holds each tensor of a model, by the tensor's name, from the index if there is one.

    Raises:
        ExportError: there are no safetensors files, or one cannot be read.
    """
    index = directory / "model.safetensors.index.json"
    try:
        if index.exists():
            indexed: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
            return indexed
        files: dict[str, str] = {}
        for path in sorted(directory.glob("*.safetensors")):
            with safe_open(path, framework="pt") as tensors:
                files.update(dict.fromkeys(tensors.keys(), path.name))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ExportError(f"the weights in {directory} cannot be read ({error})") from error
    return files


def read_weight(directory: Path, name: str) -> torch.Tensor:
    """One tensor of a model's safetensors files.

    Raises:
        ExportError: a file cannot be read; ExportUsageError, if no file has such a tensor.
    """
    file = weight_files(directory).get(name)
    if file is None:
        raise ExportUsageError(
            f"{directory} has no tensor {name} in its safetensors files: name the target's directory"
        )
    try:
        with safe_open(directory / file, framework="pt") as tensors:
            weight: torch.Tensor = tensors.get_tensor(name)
    except (OSError, SafetensorError) as error:
        raise ExportError(f"the weights in {directory} cannot be read ({error})") from error
    return weight


def read_config(directory: Path) -> dict[str, Any]:
    """The config of the model in ``directory``. Raises ExportUsageError: there is none."""
    try:
        config: dict[str, Any] = json.loads((directory / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ExportUsageError(
            f"{directory} is no model's directory ({error}): name the one with the target's config.json and weights"
        ) from error
    return config


def check_same_model(directory: Path, config: dict[str, Any], spec: CaptureSpec) -> None:
    """Raises ExportUsageError: captures of ``spec`` are of another model."""
    found = config.get("architectures") or []
    if spec.architecture not in found:
        raise ExportUsageError(
            f"{directory} is a {', '.join(found) or 'model without architecture'}, and the captures are of a "
            f"{spec.architecture}: name the model that was captured with --model"
        )
    digest = weights_digest(str(directory)) if spec.weights_digest else ""
    if digest != spec.weights_digest:
        raise ExportUsageError(
            f"the weights in {directory} are not those of the captures (digest {digest or 'unknown'}, expected "
            f"{spec.weights_digest} of {spec.model_path}): name the model that was captured with --model"
        )
