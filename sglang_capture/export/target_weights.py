"""The target's own embedding table and output head, for formats that store them, or what they compute.

Read from the model's safetensors files, one tensor at a time, without loading the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch

from sglang_capture.export.base import ExportError, ExportUsageError
from sglang_capture.export.final_norm import check_same_model, read_config, read_weight, weight_files
from sglang_capture.spec import DTYPES, CaptureSpec

_EMBEDDING: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"

_SCALED: Final = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
"""Fields in configs of models whose logits are not just ``lm_head`` times the last hidden state."""


class TargetWeights:
    """The two ``[V, H]`` matrices of the target in the directory ``model``.

    Raises:
        ExportUsageError: it is no model's directory, or not the model that was captured.
    """

    def __init__(self, model: str, spec: CaptureSpec) -> None:
        self._directory, self._spec = Path(model), spec
        self.config = read_config(self._directory)
        check_same_model(self._directory, self.config, spec)
        self._files = weight_files(self._directory)

    @property
    def model_type(self) -> str:
        """``model_type`` of the config, empty if it names none."""
        return str(self.config.get("model_type") or "")

    def embeddings(self) -> torch.Tensor:
        """The input embeddings, ``[V, H]``, in the model's dtype.

        Raises:
            ExportError: there is no such tensor, or it has another shape.
        """
        return self._read(self._only(_EMBEDDING))

    def head(self) -> torch.Tensor:
        """The matrix that turns last hidden states (post-norm) into logits, ``[V, H]``, in the model's dtype.

        Raises:
            ExportError: there is no such tensor, it has another shape, or the logits are more than that product.
        """
        language = _language_model(self.config)
        if special := [name for name in _SCALED if language.get(name) not in (None, 1, 1.0)]:
            raise ExportError(
                f"the logits of {self._directory} are not its output head's product alone (its config has "
                f"{special[0]} = {language[special[0]]}), so they cannot be computed from captures here"
            )
        if bias := self._names("lm_head.bias"):
            raise ExportError(f"the output head of {self._directory} has a bias ({bias[0]}), which is not read here")
        if not self._names(_HEAD) and language.get("tie_word_embeddings", self.config.get("tie_word_embeddings")):
            return self.embeddings()
        return self._read(self._only(_HEAD))

    def _names(self, suffix: str) -> list[str]:
        """The tensors of that name outside the decoder layers: a multi-token-prediction layer may have its own."""
        return [name for name in self._files if f".{name}".endswith(f".{suffix}") and ".layers." not in f".{name}"]

    def _only(self, suffix: str) -> str:
        names = self._names(suffix)
        if len(names) != 1:
            raise ExportUsageError(
                f"expected one tensor {suffix} outside the layers of {self._directory}, found "
                f"{', '.join(names) or 'none'}: name the target's directory with --model"
            )
        return names[0]

    def _read(self, name: str) -> torch.Tensor:
        tensor = read_weight(self._directory, name)
        expected = (self._spec.vocab_size, self._spec.hidden_size)
        if tuple(tensor.shape) != expected or tensor.dtype not in DTYPES.values():
            raise ExportError(
                f"{name} of {self._directory} is {tensor.dtype} {list(tensor.shape)}, expected {list(expected)} of "
                "float32, float16 or bfloat16: a quantized head or a padded vocabulary is not read here"
            )
        return tensor


def _language_model(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return _language_model(text) if isinstance(text, Mapping) else config
