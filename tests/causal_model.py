"""A few lines of torch that hand out rows as a right server would: of their tokens, causal, repeatable, normed."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_capture.dump import Dump
from sglang_capture.spec import CaptureSpec


class CausalModel:
    """Embeddings, layers in which a token sees the mean of those before it, and a final RMS norm; all random."""

    def __init__(self, spec: CaptureSpec) -> None:
        generator = torch.Generator().manual_seed(0)
        self._embeddings = torch.randn(spec.vocab_size, spec.hidden_size, generator=generator)
        self._mixers = torch.randn(spec.num_layers, spec.hidden_size, spec.hidden_size, generator=generator)
        self._norm = torch.rand(spec.hidden_size, generator=generator) + 0.5

    def dump(self, spec: CaptureSpec, input_ids: Sequence[int], capture_id: str = "x") -> Dump:
        ids = torch.tensor(input_ids)
        states = [self._embeddings[ids]]
        seen = torch.arange(1, len(ids) + 1)[:, None]
        for mixer in self._mixers:
            past = states[-1].cumsum(dim=0) / seen
            states.append(states[-1] + torch.tanh((states[-1] + past) @ mixer / spec.hidden_size**0.5))
        pre = states[-1]
        last = {
            "last_hidden_state": pre * (pre.pow(2).mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * self._norm,
            "last_hidden_state_prenorm": pre,
        }
        return Dump(
            capture_id=capture_id,
            request_id="",
            spec=spec,
            input_ids=ids,
            hidden_states=torch.stack([states[index] for index in spec.layers], dim=1).to(spec.torch_dtype),
            last_hidden={key: last[key].to(spec.torch_dtype) for key in spec.last_hidden_keys},
        )
