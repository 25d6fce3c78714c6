"""The oracle: the hidden states of a prompt, computed by Hugging Face transformers on the same weights.

One prompt at a time: the rows of several in a batch are not bit for bit what each gives alone. Only the decoder runs,
so no logits are computed. Needs ``pip install 'sglang-capture[transformers]'``.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from sglang_capture.errors import CaptureError, UsageError
from sglang_capture.names import find
from sglang_capture.spec import DTYPES

_PLACEHOLDERS = (
    "image_token_id",
    "image_token_index",
    "media_placeholder_token_id",
    "video_token_id",
    "audio_token_id",
    "audio_token_index",
)
"""How configs name the ids that stand where an image, a video or sound was."""


class OracleError(CaptureError):
    """A model that cannot be loaded, or whose states cannot be told."""


@dataclass(frozen=True)
class States:
    """The hidden states of one prompt of T tokens, each ``[T, H]``.

    Attributes:
        hidden: by hidden-state index, from 0 (embeddings) to n - 1.
        post: the last hidden state after the final norm.
        pre: the last hidden state before the final norm.
    """

    hidden: tuple[torch.Tensor, ...]
    post: torch.Tensor
    pre: torch.Tensor


class Oracle:
    """A transformers model, asked for hidden states.

    Args:
        model: a causal language model, or one that holds such a decoder (an image-text model, given text).
    """

    def __init__(self, model: Any) -> None:
        self._decoder = model.get_decoder()
        self._norm = find_final_norm(model)
        config = model.config.get_text_config()
        self.num_layers: int = config.num_hidden_layers
        self.hidden_size: int = config.hidden_size
        embeddings = model.get_input_embeddings().weight
        self.vocab_size: int = embeddings.shape[0]
        named = (getattr(model.config, name, None) for name in _PLACEHOLDERS)
        self.placeholders: set[int] = {number for number in named if number is not None}
        self._device: torch.device = embeddings.device
        self.dtype = str(embeddings.dtype).removeprefix("torch.")

    @classmethod
    def load(cls, path: str, *, dtype: str = "float32", device: str = "cpu", trust_remote_code: bool = False) -> Oracle:
        """Load the model at ``path``, a directory or a name on the Hub.

        Args:
            dtype: in which to compute: float32, bfloat16 or float16.
            device: like ``cpu`` or ``cuda``, or ``auto`` to spread it over what there is.
            trust_remote_code: run the model's own code, where it brings some.

        Raises:
            UsageError: there is no such model, dtype or device.
            OracleError: transformers is not installed, or cannot load the model.
        """
        _check_dtype(dtype)
        _check_device(device)
        try:
            import transformers
        except ImportError as error:
            raise OracleError(
                "recomputing hidden states needs transformers: pip install 'sglang-capture[transformers]'"
            ) from error
        find(path, "--model")
        if not sys.stderr.isatty():
            transformers.utils.logging.disable_progress_bar()
        options = {"dtype": DTYPES[dtype], "trust_remote_code": trust_remote_code}
        if device == "auto":
            if find_spec("accelerate") is None:
                raise OracleError("--device auto spreads the model with accelerate: pip install accelerate")
            options["device_map"] = "auto"
        try:
            try:
                model = transformers.AutoModelForCausalLM.from_pretrained(path, **options)
            except ValueError as error:
                if "Unrecognized configuration class" not in str(error):
                    raise
                model = transformers.AutoModelForImageTextToText.from_pretrained(path, **options)
            model = model if device == "auto" else model.to(device)
        except (OSError, ValueError, ImportError, RuntimeError) as error:
            raise OracleError(
                f"transformers cannot load {path!r} ({error}): name its directory, or its name on the Hub"
            ) from error
        return cls(model.eval())

    @torch.inference_mode()
    def states(self, input_ids: torch.Tensor) -> States:
        """The states of one prompt, ``[T]`` ids, on the CPU.

        Raises:
            OracleError: an id is outside the vocabulary, or the model does not say its states as transformers' do.
        """
        if (highest := int(input_ids.max())) >= self.vocab_size:
            raise OracleError(
                f"token id {highest} is outside the model's vocabulary of {self.vocab_size}: another model?"
            )
        seen: list[tuple[torch.Tensor, torch.Tensor]] = []
        hook = self._norm.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
        try:
            ids = input_ids.to(self._device)[None]
            states = self._decoder(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
        finally:
            hook.remove()
        if len(states) != self.num_layers + 1 or len(seen) != 1 or not _same(seen[0][1], states[-1]):
            raise OracleError(
                f"{type(self._decoder).__name__} does not give {self.num_layers + 1} hidden states that end with its "
                "final norm's output, so they cannot be told apart: this model cannot be verified"
            )
        rows = [tensor[0].cpu() for tensor in states]
        return States(hidden=tuple(rows[:-1]), post=rows[-1], pre=seen[0][0][0].cpu())


def _check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise UsageError(f"--dtype must be one of {', '.join(DTYPES)}; found {dtype!r}")


def _check_device(device: str) -> None:
    try:
        kind = "cpu" if device == "auto" else torch.device(device).type
    except RuntimeError:
        raise UsageError(f"--device must be cpu, cuda or auto; found {device!r}") from None
    if kind == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: torch finds no GPU here; leave it out, or give cpu")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are equal; a model may give NaN, which equals nothing."""
    return torch.equal(one.nan_to_num(), other.nan_to_num())


def find_final_norm(model: Any) -> torch.nn.Module:
    """The final norm: the last norm that is a direct part of the decoder, beside its layers.

    Raises:
        OracleError: there is none.
    """
    decoder = model.get_decoder()
    norms = [part for part in decoder.children() if "norm" in type(part).__name__.lower()]
    if not norms:
        raise OracleError(f"{type(decoder).__name__} has no norm beside its layers: this model cannot be verified")
    final: torch.nn.Module = norms[-1]
    return final
