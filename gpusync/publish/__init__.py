"""The trainer's side: publishes versions of a stream, deltas and full ones, from one process or from many ranks."""

from gpusync.publish.prune import PruneReport, prune_stream
from gpusync.publish.publisher import Publisher, publish_directories
from gpusync.publish.report import PublishReport
from gpusync.publish.retention import PrunePlan, plan_prune
from gpusync.publish.tensors import CheckpointTensors, StoredBytes

__all__ = [
    "CheckpointTensors",
    "PrunePlan",
    "PruneReport",
    "PublishReport",
    "Publisher",
    "StoredBytes",
    "plan_prune",
    "prune_stream",
    "publish_directories",
]
