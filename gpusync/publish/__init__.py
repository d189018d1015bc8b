"""The trainer's side: publishes versions of a stream, deltas and full ones, from one process or from many ranks."""

from gpusync.publish.publisher import Publisher, publish_directories
from gpusync.publish.report import PublishReport
from gpusync.publish.tensors import CheckpointTensors, StoredBytes

__all__ = ["CheckpointTensors", "PublishReport", "Publisher", "StoredBytes", "publish_directories"]
