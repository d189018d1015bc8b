"""The one operation of vLLM that sglang's CPU path calls: rotary position embedding, in place."""

import torch


def rotary_embedding(positions, query, key, head_size, cos_sin_cache, is_neox):
    angles = cos_sin_cache.index_select(0, positions.flatten()).float()
    cos, sin = (half.unsqueeze(1) for half in angles.chunk(2, dim=-1))
    width = angles.shape[-1]
    for tensor in (query, key):
        if tensor is None:
            continue
        rotated = tensor.view(positions.numel(), -1, head_size)[..., :width]
        first, second = (
            rotated.float().chunk(2, -1) if is_neox else (rotated[..., ::2].float(), rotated[..., 1::2].float())
        )
        turned = (first * cos - second * sin, second * cos + first * sin)
        rotated.copy_(torch.cat(turned, -1) if is_neox else torch.stack(turned, -1).flatten(-2))
