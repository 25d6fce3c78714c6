"""What the numbers should be: Hugging Face transformers on the same weights, in float32, one prompt at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

CONTROL_TOKENS = 16
"""Drawn prompts use ids from here on: the first few of a vocabulary are its control tokens."""


@dataclass(frozen=True)
class Run:
    """One forward of one prompt of ``T`` tokens through ``n`` layers."""

    hidden_states: list[Tensor]
    """``n + 1`` of ``[T, H]``: by hidden-state index, and at the end the output of the final norm."""
    prenorm: Tensor
    """``[T, H]``: what the final norm was given."""
    logprobs: Tensor
    """``[T, V]``: row ``t`` is over the token at ``t + 1``."""
    router_margin: float
    """How near the closest decision of a router was to a tie; infinite without routers."""


@dataclass
class _Seen:
    prenorm: Tensor | None = None
    margins: list[float] = field(default_factory=list)


class Oracle:
    """A model directory, loaded once; the last prompts' runs are kept, since tests ask several things of one.

    Args:
        sees: it is a model for images and text.
    """

    _KEPT = 8

    def __init__(self, model_dir: Path | str, *, sees: bool = False) -> None:
        from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

        loader = AutoModelForImageTextToText if sees else AutoModelForCausalLM
        self._model: Any = loader.from_pretrained(
            model_dir, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
        ).eval()
        self.vocab_size: int = self._model.config.get_text_config().vocab_size
        self._runs: dict[tuple[int, ...], Run] = {}

    def run(self, input_ids: Sequence[int]) -> Run:
        key = tuple(input_ids)
        if key not in self._runs:
            while len(self._runs) >= self._KEPT:
                self._runs.pop(next(iter(self._runs)))
            self._runs[key] = self._forward(key)
        return self._runs[key]

    def run_with(self, input_ids: Sequence[int], images: Mapping[str, Tensor]) -> Run:
        """The same for a prompt with images, in the form in which the model takes them."""
        return self._forward(tuple(input_ids), images)

    def hidden_states(self, input_ids: Sequence[int]) -> list[Tensor]:
        return self.run(input_ids).hidden_states

    def prenorm(self, input_ids: Sequence[int]) -> Tensor:
        return self.run(input_ids).prenorm

    def router_margin(self, input_ids: Sequence[int]) -> float:
        return self.run(input_ids).router_margin

    def draw_prompt(self, length: int, generator: torch.Generator, min_margin: float = 1e-4) -> list[int]:
        """Random ids for which no router decision is so close that rounding could turn it.

        Nearly every prompt of the tiny model is safe; of another model, a long one may never be.
        """
        for _ in range(20):
            drawn = torch.randint(CONTROL_TOKENS, self.vocab_size, (length,), generator=generator).tolist()
            if self.router_margin(drawn) >= min_margin:
                return drawn
        raise RuntimeError(f"20 random prompts of {length} tokens, and none with a router margin of {min_margin}")

    def _forward(self, input_ids: tuple[int, ...], images: Mapping[str, Tensor] | None = None) -> Run:
        with _one_thread(), torch.no_grad(), self._watching() as seen:
            out = self._model(torch.tensor([input_ids]), output_hidden_states=True, use_cache=False, **(images or {}))
        if seen.prenorm is None:
            raise RuntimeError("the final norm was never called")
        return Run(
            hidden_states=[state[0] for state in out.hidden_states],
            prenorm=seen.prenorm,
            logprobs=out.logits[0].log_softmax(-1),
            router_margin=min(seen.margins, default=float("inf")),
        )

    @contextmanager
    def _watching(self) -> Iterator[_Seen]:
        seen = _Seen()

        def at_norm(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.prenorm = args[0][0].clone()

        def at_router(router: nn.Module, args: tuple[Tensor, ...]) -> None:
            seen.margins.append(_margin(router, args[0]))

        handles = [self._model.get_decoder().norm.register_forward_pre_hook(at_norm)]
        for module in self._model.modules():
            if hasattr(module, "top_k") and hasattr(module, "weight"):
                handles.append(module.register_forward_pre_hook(at_router))
        try:
            yield seen
        finally:
            for handle in handles:
                handle.remove()


def _margin(router: Any, hidden_states: Tensor) -> float:
    """The smallest gap, over the tokens, between what a router chooses and the next it does not.

    Worked out here a second time, from the router's weights. Most choose by a softmax, which keeps the order of the
    logits; DeepSeek-V3 chooses groups by the sum of their two best experts, then experts within the groups chosen.
    """
    logits = hidden_states.reshape(-1, hidden_states.shape[-1]) @ router.weight.T
    if not hasattr(router, "e_score_correction_bias"):
        return _gap(logits, router.top_k)
    grouped = (logits.sigmoid() + router.e_score_correction_bias).view(len(logits), router.num_group, -1)
    group_scores = grouped.topk(2, dim=-1).values.sum(-1)
    gaps = []
    if router.topk_group < router.num_group:
        gaps.append(_gap(group_scores, router.topk_group))
    chosen = group_scores.topk(router.topk_group, dim=-1).indices
    mask = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, chosen, True)
    allowed = grouped.masked_fill(~mask[..., None], float("-inf")).flatten(1)
    gaps.append(_gap(allowed, router.top_k))
    return min(gaps)


def _gap(scores: Tensor, k: int) -> float:
    """Between the ``k``-th best and the next, at the row where it is smallest."""
    if k >= scores.shape[-1]:
        return float("inf")
    best = scores.topk(k + 1, dim=-1).values
    return float((best[:, k - 1] - best[:, k]).min())


@contextmanager
def _one_thread() -> Iterator[None]:
    """On cores shared with a server, a second thread makes small matrices slower by far."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
