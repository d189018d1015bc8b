"""The dispatch mode under which an engine's loader runs: it sees every operation on the checkpoint's tensors.

A copy of checkpoint elements into a param is recorded and not executed; so is every other write to a param, as one that
we know nothing of. What a loader makes of checkpoint tensors on the way (views, copies, concatenations) is followed;
whatever it computes makes the tensor opaque.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from gpusync.layout.dtypes import SAFETENSORS_DTYPES
from gpusync.layout.frames import NotAffineError
from gpusync.layout.held import (
    Held,
    hold_computed,
    hold_concatenation,
    hold_copy,
    hold_padded,
    hold_source,
    is_whole,
    pieces_of,
)
from gpusync.layout.placement import Piece
from gpusync.layout.record import Record, Write
from gpusync.layout.targets import dtype_name, iterate_attributes, storage_key

aten = torch.ops.aten

# These look at the form of their argument, not at its elements.
_FORM_ONLY = frozenset(
    getattr(aten, name).default
    for name in (
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "new_empty",
        "new_zeros",
        "new_ones",
        "new_full",
        "new_empty_strided",
    )
)


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Enter it, run the loader on `sources`, leave it, and call `finish`. All of it in one thread."""

    def __init__(self, *, params: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.record = Record()
        self._params: dict[int, str] = {}
        for name, tensor in params.items():
            self._params.setdefault(storage_key(tensor), name)
        self._held = {storage_key(tensor): hold_source(name, tensor) for name, tensor in sources.items()}
        self._numbers: dict[float, torch.Tensor] = {}
        self._numbers_used: set[float] = set()
        self._handlers: dict[Any, Callable[..., Any]] = {
            aten.copy_.default: self._copy,
            aten.fill_.Tensor: self._copy,
            aten.fill_.Scalar: self._fill,
            aten._foreach_copy_.default: self._copy_all,
            aten.clone.default: self._clone,
            aten._to_copy.default: self._clone,
            aten.cat.default: self._cat,
            aten.stack.default: self._stack,
            aten.constant_pad_nd.default: self._pad,
            aten._local_scalar_dense.default: self._number,
        }

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        involved = list(_tensors_in([*args, *kwargs.values()]))
        if not any(self._holds(tensor) or self._param(tensor) for tensor in involved):
            return func(*args, **kwargs)
        handler: Callable[..., Any] = self._handlers.get(func, self._any)
        return handler(func, *args, **kwargs)

    def finish(self, model: torch.nn.Module) -> Record:
        """The record. What the loader keeps for itself, or has read as a number, is opaque."""
        for attribute, tensor in iterate_attributes(model):
            held = self._holds(tensor)
            if held is not None:
                self.record.refuse(held.names, f"the loader keeps it as `{attribute}`")
        for held in self._held.values():
            if held.unused:
                self.record.refuse(held.names, "the loader copies it into a tensor that is no parameter")
        for number, tensor in self._numbers.items():
            if number not in self._numbers_used:
                self.record.refuse(self._names([tensor]), "the loader reads it as a number")
        return self.record

    def _copy(self, func: Any, target: torch.Tensor, source: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """`copy_`, and `fill_` with a tensor."""
        param, held = self._param(target), self._holds(source)
        if param is None and held is None and self._holds(target) is None:
            return target.copy_(source)
        source = source.expand(target.shape)  # raises where the copy would
        if param is None:
            self._copy_to_temporary(func, target, source)
        elif held is None:
            self._write_unknown(func, param, target)
        else:
            self._copy_to_param(func, param, target, source, held)
        return target

    def _copy_to_param(self, func: Any, param: str, target: torch.Tensor, source: torch.Tensor, held: Held) -> None:
        held.unused = False
        try:
            if target.dtype not in SAFETENSORS_DTYPES:
                raise NotAffineError(f"its parameter is of {dtype_name(target.dtype)}")
            pieces = pieces_of(held, source, param=param, target=target)
        except NotAffineError as error:
            self._refuse(held.names, error, func)
            pieces = []
        if sum(piece.numel for _, piece in pieces) < target.numel():
            self._write_unknown(func, param, target)
        writes = self.record.writes.setdefault(param, [])
        writes += [Write(tensor=name, piece=piece, operation=str(func)) for name, piece in pieces]

    def _copy_to_temporary(self, func: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """A tensor that is no param is written whole, or is not followed any further."""
        before, held = self._holds(target), self._holds(source)
        if before is not None and (before.is_source or before.unused or held is None or not is_whole(target)):
            self.record.refuse(self._names([target, source]), f"the loader overwrites it: {func}")
            held = None
        if held is not None:
            self._follow(func, target, [source], lambda: hold_copy(held, source, target))
        else:
            self._held[storage_key(target)] = hold_computed(self._names([target, source]), target)
        self._held[storage_key(target)].unused = True

    def _copy_all(self, func: Any, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], *_: Any) -> None:
        for target, source in zip(targets, sources, strict=True):
            self._copy(func, target, source)

    def _fill(self, func: Any, target: torch.Tensor, value: Any) -> torch.Tensor:
        """A number that was read of a checkpoint tensor is that tensor's element."""
        tensor = self._numbers.get(value)
        if tensor is None:
            filled: torch.Tensor = self._any(func, target, value)
            return filled
        self._numbers_used.add(value)
        return self._copy(func, target, tensor)

    def _number(self, func: Any, tensor: torch.Tensor) -> Any:
        """`item()` of a float gives a number that nothing else is, to be known again if it fills a param."""
        held = self._holds(tensor)
        if held is None or held.frame is None or not tensor.is_floating_point():
            return func(tensor)
        number = 1.5 + (len(self._numbers) + 1) * 2.0**-52
        self._numbers[number] = tensor.reshape(())
        return number

    def _clone(self, func: Any, tensor: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        """`clone`, `contiguous`, `to`. What is held moves to no device: its elements are not there."""
        held = self._holds(tensor)
        if held is None:
            copied: torch.Tensor = func(tensor, **kwargs)
            return copied
        form = _empty(tensor).clone(memory_format=kwargs.get("memory_format") or torch.preserve_format)
        dtype = kwargs.get("dtype") or tensor.dtype
        copy = torch.empty_strided(form.size(), form.stride(), dtype=dtype, device="meta")
        return self._follow(func, copy, [tensor], lambda: hold_copy(held, tensor, copy))

    def _cat(self, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        if not self._names(tensors):
            copied: torch.Tensor = func(tensors, dim)
            return copied
        form = torch.cat([_empty(tensor) for tensor in tensors], dim)
        joined = torch.empty(form.shape, dtype=form.dtype, device="meta")
        parts = [(self._holds(tensor), tensor) for tensor in tensors if tensor.dim() == joined.dim()]
        return self._follow(
            func, joined, tensors, lambda: hold_concatenation(parts, dim % max(joined.dim(), 1), joined)
        )

    def _stack(self, func: Any, tensors: Sequence[torch.Tensor], dim: int = 0) -> torch.Tensor:
        return self._cat(aten.cat.default, [tensor.unsqueeze(dim) for tensor in tensors], dim)

    def _pad(self, func: Any, tensor: torch.Tensor, pad: Sequence[int], value: Any = 0) -> torch.Tensor:
        held = self._holds(tensor)
        if held is None or min(pad, default=0) < 0:
            padded: torch.Tensor = self._any(func, tensor, pad, value)
            return padded
        skipped = tensor.dim() - len(pad) // 2
        before = [0] * skipped + list(pad[::2][::-1])
        after = [0] * skipped + list(pad[1::2][::-1])
        shape = [b + size + a for b, size, a in zip(before, tensor.shape, after, strict=True)]
        padded = torch.empty(shape, dtype=tensor.dtype, device="meta")
        return self._follow(func, padded, [tensor], lambda: hold_padded(held, tensor, before, padded))

    def _any(self, func: Any, *args: Any, **kwargs: Any) -> Any:
        """Every other operation: a view, something computed, or a write of something unknown, which is not executed."""
        involved = list(_tensors_in([*args, *kwargs.values()]))
        names = self._names(involved)
        written = _written(func, args, kwargs)
        if any(self._holds(tensor) or self._param(tensor) for tensor in written):
            self.record.refuse(names, f"the loader computes with it: {func}")
            for tensor in written:
                self._write_any(func, tensor, names)
            return _returned(func, written)
        result = func(*args, **kwargs)
        if names and func not in _FORM_ONLY:
            made = list(_tensors_in([result]))
            fresh = [tensor for tensor in made if self._holds(tensor) is None]
            if fresh or not made:
                self.record.refuse(names, f"the loader computes with it: {func}")
            for tensor in fresh:
                self._held[storage_key(tensor)] = hold_computed(names, tensor)
        return result

    def _write_any(self, func: Any, tensor: torch.Tensor, names: frozenset[str]) -> None:
        param = self._param(tensor)
        if param is None:
            self._held[storage_key(tensor)] = hold_computed(names, tensor)
        else:
            self._write_unknown(func, param, tensor)

    def _write_unknown(self, func: Any, param: str, target: torch.Tensor) -> None:
        size, offset, stride = tuple(target.shape), int(target.storage_offset()), tuple(target.stride())
        dtype = SAFETENSORS_DTYPES.get(target.dtype)
        if dtype is None:
            dtype, size, offset, stride = "U8", (target.untyped_storage().nbytes(),), 0, (1,)
        piece = Piece(
            param=param,
            dtype=dtype,
            size=size,
            src_offset=0,
            src_stride=(0,) * len(size),
            dst_offset=offset,
            dst_stride=stride,
        )
        self.record.writes.setdefault(param, []).append(Write(tensor=None, piece=piece, operation=str(func)))

    def _follow(
        self, func: Any, made: torch.Tensor, of: Sequence[torch.Tensor], hold: Callable[[], Held]
    ) -> torch.Tensor:
        """`made` holds what `hold` says, or, where that cannot be followed, something computed."""
        for tensor in of:
            held = self._holds(tensor)
            if held is not None:
                held.unused = False
        try:
            self._held[storage_key(made)] = hold()
        except NotAffineError as error:
            self._refuse(self._names(of), error, func)
            self._held[storage_key(made)] = hold_computed(self._names(of), made)
        return made

    def _refuse(self, names: frozenset[str], error: NotAffineError, func: Any) -> None:
        self.record.refuse(names, f"{error}: {func}")

    def _names(self, tensors: Iterable[torch.Tensor]) -> frozenset[str]:
        return frozenset().union(*(held.names for held in map(self._holds, tensors) if held is not None))

    def _holds(self, tensor: torch.Tensor) -> Held | None:
        return self._held.get(storage_key(tensor))

    def _param(self, tensor: torch.Tensor) -> str | None:
        return self._params.get(storage_key(tensor))


def _tensors_in(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.layout == torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors_in(value)


def _empty(tensor: torch.Tensor) -> torch.Tensor:
    """The form of a tensor, on no device."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")


def _written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    arguments = _written_arguments(func)
    return list(_tensors_in(args[at] if at < len(args) else kwargs.get(name) for at, name in arguments))


@cache
def _written_arguments(func: Any) -> list[tuple[int, str]]:
    """Position and name of the arguments that an operation writes to, by its schema."""
    return [
        (position, argument.name)
        for position, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _returned(func: Any, written: Sequence[torch.Tensor]) -> Any:
    returns = len(func._schema.returns)
    return None if returns == 0 else written[0] if returns == 1 else tuple(written[:returns])
