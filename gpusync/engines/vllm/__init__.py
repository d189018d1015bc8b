"""vLLM: a plugin by its entry-point group `vllm.general_plugins`, a worker extension and a middleware, and no patch.

Started with `--worker-extension-cls gpusync.engines.vllm.WorkerExtension --middleware gpusync.engines.vllm.Middleware`.
The middleware adds the routes to the API server (`server`); each worker, which is one rank, prepares beside its loop
and commits in it (`rank`), where the engine's `collective_rpc` calls it (`worker`).
"""

from gpusync.engines.vllm.plugin import register
from gpusync.engines.vllm.server import Middleware
from gpusync.engines.vllm.worker import WorkerExtension

__all__ = ["Middleware", "WorkerExtension", "register"]
