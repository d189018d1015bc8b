"""The entry point, which vLLM calls in each of its processes before it makes anything."""

from __future__ import annotations

import logging
import os

LOG = logging.getLogger(__name__)

PLAIN_LINEARS = "GPUSYNC_VLLM_PLAIN_LINEARS"


def register() -> None:
    """On a CPU, where it is asked for: linear layers keep their weights as they were loaded. vLLM repacks them for
    oneDNN otherwise, into memory that nothing can patch, and drops the originals. Idempotent."""
    if os.environ.get(PLAIN_LINEARS, "") in ("", "0"):
        return
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        from vllm import _custom_ops

        _custom_ops._supports_onednn = False
        LOG.info("gpusync: %s is set, so linear weights are not repacked", PLAIN_LINEARS)
