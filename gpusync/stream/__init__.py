"""Reading and writing published streams and checkpoints: files, formats, names. Decodes nothing, trusts nothing."""

from gpusync.stream.checkpoint import Checkpoint, read_checkpoint
from gpusync.stream.dtypes import DTYPE_BITS, element_bytes, is_float_order
from gpusync.stream.files import ByteSource, BytesSource, FileRange, SourceFile
from gpusync.stream.filesystem import filesystem_type, has_atomic_rename, is_local
from gpusync.stream.header import (
    LENGTH_BYTES,
    METADATA_KEY,
    ShardHeader,
    ShortShardError,
    TensorRange,
    TensorSpec,
    encode_header,
    parse_header,
    read_header,
)
from gpusync.stream.identity import read_identity
from gpusync.stream.index import INDEX_NAME, VersionIndex, encode_index, parse_index
from gpusync.stream.open_files import OpenFiles
from gpusync.stream.shards import StoredTensor
from gpusync.stream.version import (
    PublishedVersion,
    check_against,
    compare_duplicates,
    read_index,
    read_version,
)
from gpusync.stream.versions import list_versions, parse_version_dir_name, version_dir_name, version_path
from gpusync.stream.visibility import wait_until_visible
from gpusync.stream.writer import (
    ShardEntry,
    make_version_directory,
    remove_file,
    write_file,
    write_index,
    write_shard,
)

__all__ = [
    "DTYPE_BITS",
    "INDEX_NAME",
    "LENGTH_BYTES",
    "METADATA_KEY",
    "ByteSource",
    "BytesSource",
    "Checkpoint",
    "FileRange",
    "OpenFiles",
    "PublishedVersion",
    "ShardEntry",
    "ShardHeader",
    "ShortShardError",
    "SourceFile",
    "StoredTensor",
    "TensorRange",
    "TensorSpec",
    "VersionIndex",
    "check_against",
    "compare_duplicates",
    "element_bytes",
    "encode_header",
    "encode_index",
    "filesystem_type",
    "has_atomic_rename",
    "is_float_order",
    "is_local",
    "list_versions",
    "make_version_directory",
    "parse_header",
    "parse_index",
    "parse_version_dir_name",
    "read_checkpoint",
    "read_header",
    "read_identity",
    "read_index",
    "read_version",
    "remove_file",
    "version_dir_name",
    "version_path",
    "wait_until_visible",
    "write_file",
    "write_index",
    "write_shard",
]
