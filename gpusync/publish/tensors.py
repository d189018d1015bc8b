"""What can be published: tensors of torch and numpy, stored bytes, and the tensors of a checkpoint directory.

Each becomes an `Offer`: a name, a form, and its bytes as they stand in a safetensors file. torch is not imported here;
whoever has a torch tensor has imported it.
"""

from __future__ import annotations

import math
import os
import sys
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpusync.codec import U8, Payload
from gpusync.errors import PublishError
from gpusync.stream import DTYPE_BITS, METADATA_KEY, OpenFiles, read_checkpoint
from gpusync.stream.limits import MAX_NAME_BYTES

# The names torch, numpy and ml_dtypes share for their dtypes, and safetensors' for the same.
_DTYPE_NAMES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "float4_e2m1fn_x2": "F4",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorForm:
    """What a tensor is, but for its name and its bytes. `dtype` is safetensors' name."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int

    def __str__(self) -> str:
        return f"{self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredBytes:
    """A tensor as its bytes, little-endian and contiguous, with its safetensors dtype: for any dtype there is."""

    dtype: str
    shape: tuple[int, ...]
    data: U8 | bytes | bytearray | memoryview


@dataclass(frozen=True, slots=True, kw_only=True)
class FileTensor:
    """A tensor that stays in its file until it is needed."""

    form: TensorForm
    source: Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """One tensor offered for publishing. `data` is u8, 1-D, or can be read; it is not written to.

    `borrowed`: it is memory of the caller's, who may write to it at any time.
    """

    name: str
    form: TensorForm
    data: U8 | Payload
    borrowed: bool = False


class CheckpointTensors(Mapping[str, FileTensor]):
    """The tensors of a checkpoint directory, by name, read when they are needed. Links are followed.

    Errors as `read_checkpoint`. Files stay open until `close`, or until nothing refers to this any more.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._checkpoint = read_checkpoint(directory, follow_links=True)
        self._files = OpenFiles()
        self.close = weakref.finalize(self, self._files.close)

    def __getitem__(self, name: str) -> FileTensor:
        stored = self._checkpoint.tensors[name]
        with self._checkpoint.open_tensor(name, self._files) as source:
            form = TensorForm(dtype=stored.dtype, shape=tuple(stored.shape), nbytes=stored.nbytes)
            return FileTensor(form=form, source=source)

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint.tensors)

    def __len__(self) -> int:
        return len(self._checkpoint.tensors)

    def __enter__(self) -> CheckpointTensors:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


NamedTensors = Mapping[str, Any] | Iterable[tuple[str, Any]]
# What a publisher is given: tensors with their names, or the directory of a checkpoint.
Source = NamedTensors | str | os.PathLike[str]


def iterate_offers(named: Iterable[tuple[str, Any]], *, copy: bool) -> Iterator[Offer]:
    """The offers in order. Without `copy` the caller's memory is borrowed: good for a mapping, whose tensors stay; an
    iterator may fill the same buffer anew for its next step.

    Raises PublishError for what is no tensor, cannot be named so, or comes twice.
    """
    seen: set[str] = set()
    for name, tensor in named:
        offer = make_offer(name, tensor, copy=copy)
        if name in seen:
            raise PublishError("tensor is offered twice by the same rank", tensor=name)
        seen.add(name)
        yield offer


def open_source(source: Source) -> NamedTensors:
    """A checkpoint directory's tensors for its path; anything else as it is. Errors as CheckpointTensors."""
    return CheckpointTensors(source) if isinstance(source, (str, os.PathLike)) else source


def make_offer(name: str, tensor: object, *, copy: bool) -> Offer:
    """`copy`: do not refer to memory of the caller's. Raises PublishError."""
    _check_name(name)
    if isinstance(tensor, FileTensor):
        return Offer(name=name, form=tensor.form, data=tensor.source)
    if isinstance(tensor, StoredBytes):
        data = np.frombuffer(tensor.data, np.uint8) if len(tensor.data) else np.empty(0, np.uint8)
        return _offer(name, tensor.dtype, tensor.shape, data, borrowed=True, copy=copy)
    if isinstance(tensor, (np.ndarray, np.generic)):
        return _offer_numpy(name, np.asarray(tensor), copy=copy)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        return _offer_torch(name, tensor, copy=copy, torch=torch)
    raise PublishError(
        "not a tensor",
        tensor=name,
        expected="a torch tensor, a numpy array or StoredBytes",
        found=type(tensor).__name__,
    )


def _check_name(name: object) -> None:
    if not isinstance(name, str):
        raise PublishError("a tensor's name is no text", found=type(name).__name__)
    try:
        nbytes = len(name.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise PublishError("a tensor's name is no valid text", found=ascii(name)) from error
    if name == METADATA_KEY or nbytes > MAX_NAME_BYTES:
        raise PublishError("a tensor cannot be named so", tensor=name)


def _offer(name: str, dtype: str, shape: Iterable[int], data: U8, *, borrowed: bool, copy: bool) -> Offer:
    form = TensorForm(dtype=dtype, shape=tuple(int(size) for size in shape), nbytes=data.size)
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and math.prod(form.shape) * bits != data.size * 8:
        expected = f"{math.prod(form.shape) * bits / 8:g} bytes for {form}"
        raise PublishError("bytes do not make up the tensor", tensor=name, expected=expected, found=data.size)
    if borrowed and copy:
        return Offer(name=name, form=form, data=data.copy())
    return Offer(name=name, form=form, data=data, borrowed=borrowed)


def _offer_numpy(name: str, array: np.ndarray[Any, np.dtype[Any]], *, copy: bool) -> Offer:
    dtype = _safetensors_dtype(name, array.dtype.name)
    swapped = array.astype(array.dtype.newbyteorder("<")) if array.dtype.byteorder == ">" else array
    stored = np.ascontiguousarray(swapped)
    data = stored.reshape(-1).view(np.uint8)
    return _offer(name, dtype, array.shape, data, borrowed=np.may_share_memory(stored, array), copy=copy)


def _offer_torch(name: str, tensor: Any, *, copy: bool, torch: Any) -> Offer:
    if hasattr(tensor, "full_tensor"):
        raise PublishError("tensor is sharded over ranks; offer its full_tensor()", tensor=name)
    if tensor.device.type == "meta" or tensor.layout != torch.strided:
        found = f"{tensor.layout} on {tensor.device}"
        raise PublishError("tensor has no plain bytes", tensor=name, expected="a dense tensor", found=found)
    dtype = _safetensors_dtype(name, str(tensor.dtype).removeprefix("torch."))
    shape = list(tensor.shape)
    if dtype == "F4":
        # torch counts pairs of them; safetensors counts each.
        shape[-1] *= 2
    host = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    data = host.reshape(-1).view(torch.uint8).numpy()
    borrowed = tensor.device.type == "cpu" and host.data_ptr() == tensor.data_ptr()
    return _offer(name, dtype, shape, data, borrowed=borrowed, copy=copy)


def _safetensors_dtype(name: str, dtype: str) -> str:
    found = _DTYPE_NAMES.get(dtype)
    if found is None:
        raise PublishError("safetensors has no such dtype", tensor=name, found=dtype)
    return found
