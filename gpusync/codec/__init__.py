"""Payloads of changed tensors: decoding them window by window, encoding them, choosing among their forms."""

from gpusync.codec.apply import would_be
from gpusync.codec.choose import UNCHANGED, choose_payload
from gpusync.codec.decoder import ENCODINGS, DeltaDecoder, apply_whole, open_delta
from gpusync.codec.frames import FrameInfo, FrameReader, frame_info
from gpusync.codec.gf01 import (
    FULL,
    FULL_PLANES,
    GF01_MAGIC,
    STEP_PLANES,
    TRANSFORM_NAMES,
    XOR,
    Gf01Decoder,
    encode_gf01,
)
from gpusync.codec.gf01_layout import Gf01Layout
from gpusync.codec.gf01_layout import read_layout as read_gf01_layout
from gpusync.codec.gs01 import GS01_MAGIC, Gs01Decoder
from gpusync.codec.gs01_encode import Gs01Steps, encode_gs01
from gpusync.codec.gs01_packed import GP01_MAGIC
from gpusync.codec.overwrite import OverwriteDecoder, encode_overwrite
from gpusync.codec.payload import U8, MemoryPayload, Payload
from gpusync.codec.windows import WINDOW_BYTES, Windows
from gpusync.codec.xor import XorDecoder, encode_xor

__all__ = [
    "ENCODINGS",
    "FULL",
    "FULL_PLANES",
    "GF01_MAGIC",
    "GP01_MAGIC",
    "GS01_MAGIC",
    "STEP_PLANES",
    "TRANSFORM_NAMES",
    "U8",
    "UNCHANGED",
    "WINDOW_BYTES",
    "XOR",
    "DeltaDecoder",
    "FrameInfo",
    "FrameReader",
    "Gf01Decoder",
    "Gf01Layout",
    "Gs01Decoder",
    "Gs01Steps",
    "MemoryPayload",
    "OverwriteDecoder",
    "Payload",
    "Windows",
    "XorDecoder",
    "apply_whole",
    "choose_payload",
    "encode_gf01",
    "encode_gs01",
    "encode_overwrite",
    "encode_xor",
    "frame_info",
    "open_delta",
    "read_gf01_layout",
    "would_be",
]
