"""Bounds on what a stream may ask of a reader. Each is far above what real checkpoints need."""

from __future__ import annotations

MAX_HEADER_BYTES = 100_000_000  # the safetensors library's own limit
MAX_INDEX_BYTES = 100_000_000

# Python objects take up to thirty times the bytes of the JSON text they come from, so a text is also bounded by the
# number of its commas and opening brackets: a header of 250,000 tensors passes.
MAX_JSON_NODES = 2_000_000

MAX_NAME_BYTES = 4096  # a tensor's name, as UTF-8
MAX_FILE_NAME_BYTES = 255  # what Linux filesystems take
MAX_RANK = 64  # dimensions of a tensor
MAX_OFFSET = 2**63 - 1  # offsets, sizes and dimensions: what a file offset can hold
MAX_VERSION = 10**12
