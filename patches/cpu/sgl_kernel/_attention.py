"""The two attention kernels of SGLang's own CPU backend, ``intel_amx``, in torch: the real ones need AMX.

Caches have one row for each place, ``[places, heads, dim]``; ``req_to_token`` has, for each request, the places of its
tokens in order. A latent (MLA) cache has one head, and its values are the first part of its keys.
"""

from __future__ import annotations

import torch
from torch.nn.functional import scaled_dot_product_attention


def decode_attention_cpu(
    query,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    output,
    key,
    value,
    loc,
    attn_logits,
    req_to_token,
    req_pool_indices,
    seq_lens,
    sm_scale,
    logit_cap,
    is_cross_attn,
    window,
    encoder_lens,
    sinks,
):
    """One new token a request: its key and value are entered into the cache, and it sees all of the request's."""
    _refuse(logit_cap, is_cross_attn, window, encoder_lens, sinks)
    if key is not None:
        k_buffer[loc] = key.view(-1, *k_buffer.shape[1:])
        v_buffer[loc] = value.view(-1, *v_buffer.shape[1:])
    for number, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        places = req_to_token[row, :length]
        output[number] = _attend(query[number, None], k_buffer[places], v_buffer[places], sm_scale, None)[0]


def extend_attention_cpu(
    query,
    key,
    value,
    output,
    k_buffer,
    v_buffer,
    k_scale,
    v_scale,
    req_to_token,
    req_pool_indices,
    seq_lens,
    extend_seq_lens,
    extend_start_loc,
    max_extend_len,
    sm_scale,
    logit_cap,
    is_cross_attn,
    window,
    encoder_lens,
    sinks,
    tree_mask,
    is_causal,
):
    """Several new tokens a request: each sees all that came before them, which is in the cache, and of the new ones
    those up to itself, or those that ``tree_mask`` (bool, ``[n, n]`` for each request's ``n``, flat) allows."""
    _refuse(logit_cap, is_cross_attn or not is_causal, window, encoder_lens, sinks)
    masked = 0
    requests = zip(
        *(each.tolist() for each in (req_pool_indices, seq_lens, extend_seq_lens, extend_start_loc)), strict=True
    )
    for row, length, new, start in requests:
        rows, places = slice(start, start + new), req_to_token[row, : length - new]
        among_new = torch.ones(new, new, dtype=torch.bool).tril()
        if tree_mask is not None:
            among_new = tree_mask[masked : masked + new * new].view(new, new)
            masked += new * new
        visible = torch.cat([torch.ones(new, length - new, dtype=torch.bool), among_new], dim=1)
        keys, values = key[rows], value[rows]
        if length > new:  # without cached tokens a latent model attends in another form, of which the cache has nothing
            keys, values = torch.cat([k_buffer[places], keys]), torch.cat([v_buffer[places], values])
        output[rows] = _attend(query[rows], keys, values, sm_scale, visible)


def _attend(query, keys, values, scale, visible):
    """``[new, heads, dim]`` over ``[all, heads, dim]``; several heads of the query may share one of the keys'."""
    attended = scaled_dot_product_attention(
        *(each.movedim(0, 1)[None] for each in (query, keys, values)), visible, scale=scale, enable_gqa=True
    )
    return attended[0].movedim(1, 0)


def _refuse(logit_cap, unusual_mask, window, encoder_lens, sinks):
    """What no model of the test bed uses is not written, and must not be left out silently."""
    if logit_cap or unusual_mask or window or encoder_lens is not None or sinks is not None:
        raise NotImplementedError("the CPU test bed of sglang-capture has plain causal attention only")
