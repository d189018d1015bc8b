"""What the engine rearranges when it loads, and whether its reload does so again.

Seen while the server starts, when every byte is known to come from the engine's own load. Later it cannot be told:
after a reload that has left out the engine's post-processing, as vLLM's does for experts on a CPU, the bytes are in the
checkpoint's order, and the kernels take them for another.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from gpusync.layout import Demotion, LayoutMap, attach, compare, named_tensors
from gpusync.stream import OpenFiles, read_checkpoint
from gpusync.sync.checkpoints import reader_of


class Packing:
    """`layout` is the traced one without what the load has rearranged."""

    def __init__(self, layout: LayoutMap, model: torch.nn.Module, base_dir: Path) -> None:
        self._model = model
        self._traced = attach(layout, named_tensors(model))[0]
        found = self._find(self._traced, base_dir)
        self.layout = layout.demoted(found)
        names = {each.tensor for each in found}
        self._rearranged = replace(
            self._traced, placements={name: each for name, each in layout.placements.items() if name in names}
        )

    def find_omission(self, directory: Path) -> str | None:
        """Behind a reload from `directory`: what it has not rearranged, in words."""
        if not self._rearranged.placements:
            return None
        found = {each.tensor for each in self._find(self._rearranged, directory)}
        left = [name for name in self._rearranged.placements if name not in found]
        if not left:
            return None
        return (
            f"the engine's reload has left {len(left)} tensors, `{left[0]}` among them, in the checkpoint's order, "
            "which its load had rearranged for its kernels: what it computes is wrong, and it has to be started anew"
        )

    def _find(self, layout: LayoutMap, directory: Path) -> list[Demotion]:
        checkpoint = read_checkpoint(directory, follow_links=True)
        with OpenFiles() as files:
            return list(compare(layout, named_tensors(self._model), reader_of(checkpoint, files)))
