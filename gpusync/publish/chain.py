"""The published versions that a state is made of, and the decoders of their payloads. Writes nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator

from gpusync.codec import DeltaDecoder, open_delta
from gpusync.errors import VersionMissingError
from gpusync.publish.tensors import TensorForm
from gpusync.stream import OpenFiles, PublishedVersion, element_bytes, is_float_order, read_version


def iterate_chain(source_dir: str | os.PathLike[str], version: int) -> Iterator[PublishedVersion]:
    """`version`, then the one it builds on, and so on: to a full version, to 0, or to one that is not there (any more).

    Raises StreamError for a version that is damaged.
    """
    at: int | None = version
    while at:
        try:
            found = read_version(source_dir, at)
        except VersionMissingError:
            return
        yield found
        at = found.index.base_version


def open_decoder(delta: PublishedVersion, name: str, form: TensorForm, files: OpenFiles) -> DeltaDecoder:
    """The decoder of the payload that `delta` has for a tensor of `form`. Errors as `open_delta`."""
    with delta.open_payload(name, files) as payload:
        return open_delta(
            payload,
            encoding=delta.index.delta_encoding or "",
            nbytes=form.nbytes,
            element_bytes=element_bytes(form.dtype),
            float_order=is_float_order(form.dtype),
            where=delta.where(delta.tensors[name]),
        )
