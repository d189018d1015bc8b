"""The live path: a rank's weights follow a stream, verified on all ranks or not at all."""

from gpusync.sync.report import Prepared, SyncReport
from gpusync.sync.weights import WeightSync

__all__ = ["Prepared", "SyncReport", "WeightSync"]
