"""sglang: a plugin by its entry-point group `sglang.srt.plugins`, and no patch.

Every process of the server calls `register`. In the HTTP process it adds the routes (`server`); in each scheduler,
which is one rank, `rank` prepares beside the loop and commits inside the engine's own reload.
"""

from gpusync.engines.sglang.plugin import register

__all__ = ["register"]
