"""The kernels that speculative decoding calls on the CPU, in torch: SGLang's C++ ones come in its CPU build only.

They are tiny (dozens of integers a step), so they are written to be read. Names, arguments and what they write are
those of the kernels that they stand in for; all write into tensors that they are given.

A draft tree of one request has ``n`` nodes, node 0 being the last token that is certain. It is walked by links: a
node's first child (``next_token``) and that child's next sibling (``next_sibling``), -1 where there is none. What
belongs to request ``b`` of a batch has row ``b``, or the flat places from ``b * n`` on.
"""

from __future__ import annotations

import ctypes

import torch

_QLEN_ONLY = 1
"""``TreeMaskMode.QLEN_ONLY``: a mask over the tree's own nodes; all before them is visible. SGLang's choice on CPUs."""


def assign_req_to_token_pool_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """Enter new cache places, request after request, into the positions ``[start, end)`` of each request's row."""
    taken = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        req_to_token[row, first:last] = out_cache_loc[taken : taken + last - first].to(req_to_token.dtype)
        taken += last - first


def assign_extend_cache_locs_cpu(req_pool_indices, req_to_token, start, end, out_cache_loc, pool_len):
    """The reverse: the cache places of the positions ``[start, end)`` of each request, one request after another."""
    filled = 0
    for row, first, last in zip(req_pool_indices.tolist(), start.tolist(), end.tolist(), strict=True):
        out_cache_loc[filled : filled + last - first] = req_to_token[row, first:last]
        filled += last - first


def assign_draft_cache_locs_contiguous_cpu(
    req_pool_indices, req_to_token, seq_lens, out_cache_loc, pool_len, topk, num_steps
):
    """The places behind each request's tokens that its draft may write: ``num_steps`` for each of ``topk`` branches."""
    assign_extend_cache_locs_cpu(
        req_pool_indices, req_to_token, seq_lens, seq_lens + topk * num_steps, out_cache_loc, pool_len
    )


def build_draft_decode_metadata_cpu(req_to_token, req_pool_indices, seq_lens, topk, num_steps, pool_len):
    """A row of cache places for each branch of each request's draft: the request's tokens, then the branch's own."""
    table = req_to_token.new_zeros((len(seq_lens) * topk, pool_len))
    for number, (row, length) in enumerate(zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)):
        for branch in range(topk):
            places = table[number * topk + branch]
            own = length + branch * num_steps
            places[:length] = req_to_token[row, :length]
            places[length : length + num_steps] = req_to_token[row, own : own + num_steps]
    return table


def build_tree_kernel_efficient_cpu(
    parent_list,
    selected_index,
    verified_seq_len,
    tree_mask,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    topk,
    depth,
    draft_token_num,
    tree_mask_mode,
):
    """The tree of the drafts that were selected: who may see whom, each node's position, and the links.

    A draft is known by its place among all that were scored, ``selected_index``. The first ``topk`` follow node 0; each
    further group of ``topk`` has one parent, of which ``parent_list`` has the place.
    """
    if tree_mask_mode != _QLEN_ONLY:
        raise NotImplementedError(f"tree mask mode {tree_mask_mode} is not what SGLang uses on a CPU")
    n = draft_token_num
    masks = tree_mask[: len(verified_seq_len) * n * n].view(-1, n, n)
    for b, length in enumerate(verified_seq_len.tolist()):
        selected, parents_of_groups = selected_index[b].tolist(), parent_list[b].tolist()
        parents = [-1]
        for place in selected:
            group = place // topk
            parents.append(0 if group == 0 else 1 + selected.index(parents_of_groups[group]))
        masks[b] = _ancestors(parents)
        _write_tree(b, length, masks[b], parents, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling)


def reconstruct_indices_from_tree_mask(
    tree_mask,
    verified_seq_len,
    positions,
    retrieve_index,
    retrieve_next_token,
    retrieve_next_sibling,
    batch_size,
    draft_token_num,
):
    """The same of a tree that is given by its mask, as NGRAM's are."""
    masks = tree_mask.view(batch_size, draft_token_num, draft_token_num)
    for b, length in enumerate(verified_seq_len.tolist()):
        above = masks[b].tril(-1)
        parents = [max(row.nonzero().flatten().tolist(), default=-1) for row in above]
        _write_tree(
            b,
            length,
            above | torch.eye(draft_token_num, dtype=torch.bool),
            parents,
            positions,
            retrieve_index,
            retrieve_next_token,
            retrieve_next_sibling,
        )


def _ancestors(parents):
    """bool ``[n, n]``: row ``i`` has node ``i`` and all above it."""
    mask = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:  # a parent comes before its children, so its row is complete
            mask[node] |= mask[parent]
    return mask


def _write_tree(b, length, mask, parents, positions, retrieve_index, retrieve_next_token, retrieve_next_sibling):
    n = len(parents)
    positions[b * n : (b + 1) * n] = length + mask.sum(-1) - 1
    retrieve_index[b] = torch.arange(b * n, (b + 1) * n)
    first_child, sibling = [-1] * n, [-1] * n
    for node in reversed(range(n)):
        parent = parents[node]
        if parent >= 0:
            sibling[node], first_child[parent] = first_child[parent], node
    retrieve_next_token[b] = torch.tensor(first_child)
    retrieve_next_sibling[b] = torch.tensor(sibling)


def verify_tree_greedy_cpu(
    *,
    predicts,
    accept_index,
    accept_token_num,
    candidates,
    retrive_index,
    retrive_next_token,
    retrive_next_sibling,
    target_predict,
):
    """Follow the target's own best tokens down the tree as far as the draft has them.

    ``accept_index`` gets the nodes on the way, ``predicts`` the target's token after each of them, and
    ``accept_token_num`` how many there are besides node 0.
    """
    for b in range(candidates.shape[0]):
        drafted, wanted = candidates[b].tolist(), target_predict[b].tolist()
        places = retrive_index[b].tolist()
        first_child, sibling = retrive_next_token[b].tolist(), retrive_next_sibling[b].tolist()
        path, child = [0], first_child[0]
        while child != -1 and len(path) < accept_index.shape[1]:
            if drafted[child] == wanted[path[-1]]:
                path.append(child)
                child = first_child[child]
            else:
                child = sibling[child]
        for step, node in enumerate(path):
            accept_index[b, step] = places[node]
            predicts[places[node]] = wanted[node]
        accept_token_num[b] = len(path) - 1


def fill_bonus_tokens_cpu(accept_tokens, accept_lens, bonus_tokens, accept_stride):
    """The last accepted token of each request; the requests' tokens lie ``accept_stride`` apart."""
    last = torch.arange(len(accept_lens)) * accept_stride + accept_lens - 1
    bonus_tokens.copy_(accept_tokens.flatten()[last])


def fill_accept_out_cache_loc_cpu(accept_index, out_cache_loc, accept_out_cache_loc):
    """The cache places of the accepted nodes, without gaps; an index of -1 is none."""
    accepted = accept_index[accept_index >= 0]
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def copy_all_layer_kv_cache_cpu(data_ptrs, strides, tgt_loc, src_loc):
    """Move cache rows, in all layers. The caches come as addresses and the bytes of a row."""
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        rows = [ctypes.string_at(address + place * size, size) for place in src_loc.tolist()]
        for place, row in zip(tgt_loc.tolist(), rows, strict=True):
            ctypes.memmove(address + place * size, row, size)
