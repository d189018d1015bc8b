"""The weights of a training model by name, one whole tensor at a time, however they are sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gpusync.errors import PublishError

Rename = Callable[[str], str | None]

# What torch puts into the names of what it wraps.
WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


def named_tensors(
    module: torch.nn.Module,
    *,
    group: Any | None = None,
    dtype: torch.dtype | None = None,
    rename: Rename | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of the state dict for `Publisher.publish`: parameters and saved buffers, DTensors gathered whole.

    With a `group`, the one that the publisher has, every rank iterates to the end and gets its share: a tensor goes to
    one rank only. Gathering is a collective, so all ranks of the model iterate, over the same model. One tensor is held
    whole at a time; one that is not sharded or converted is the module's own memory.

    `dtype`: what floating-point tensors are converted to, as the checkpoint that engines start from has them. `rename`
    gives the checkpoint's name for a name of the module, or None for a tensor that is not published (say the second of
    two tied names).
    """
    rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    if rank < 0:
        raise PublishError("this process is not of the publisher's group")
    turn = 0
    for name, tensor in module.state_dict().items():
        if not isinstance(tensor, torch.Tensor):
            continue  # extra state
        published = _published_name(name, rename)
        if published is None:
            continue
        whole = _whole(tensor, dtype)
        if turn % size == rank:
            yield published, whole
        turn += 1
        del whole  # two would be held otherwise, while the next one is gathered


def _published_name(name: str, rename: Rename | None) -> str | None:
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    if name.endswith("_flat_param"):
        raise PublishError("flat parameters of FSDP 1 are not supported", tensor=name, expected="fully_shard (FSDP 2)")
    return name if rename is None else rename(name)


def _whole(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """Converted before it is gathered: fewer bytes travel, and the result is the same, element by element."""
    tensor = tensor.detach()
    if dtype is not None and tensor.is_floating_point():
        tensor = tensor.to(dtype)
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
