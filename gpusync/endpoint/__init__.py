"""Updates over HTTP: the service that queues them, its routes, a client, and a fleet of engines updated as one.

`Service` and `Routes` know no web framework: an engine's own server hands them requests, `asgi_app` and `serve_forever`
make a server of their own. What ranks do lies behind `Backend`. Nothing here imports torch.
"""

from gpusync.endpoint.backend import Backend, Outcome, Status, Update
from gpusync.endpoint.confine import Roots, confine
from gpusync.endpoint.errors import (
    EndpointError,
    ForbiddenPathError,
    RemoteError,
    RequestError,
    UnauthorizedError,
    UnreachableError,
    UpdateTimeoutError,
)
from gpusync.endpoint.messages import AbortRequest, CommitRequest, PullRequest
from gpusync.endpoint.routes import HttpReply, HttpRequest, Routes
from gpusync.endpoint.service import Defaults, Service
from gpusync.endpoint.wire import error_as_dict, error_from_dict

__all__ = [
    "AbortRequest",
    "Backend",
    "CommitRequest",
    "Defaults",
    "EndpointError",
    "ForbiddenPathError",
    "HttpReply",
    "HttpRequest",
    "Outcome",
    "PullRequest",
    "RemoteError",
    "RequestError",
    "Roots",
    "Routes",
    "Service",
    "Status",
    "UnauthorizedError",
    "UnreachableError",
    "Update",
    "UpdateTimeoutError",
    "confine",
    "error_as_dict",
    "error_from_dict",
]
