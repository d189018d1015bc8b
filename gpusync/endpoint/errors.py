"""What can go wrong between a caller and an endpoint. What goes wrong in an update keeps its own class."""

from __future__ import annotations

from gpusync.errors import GpusyncError


class EndpointError(GpusyncError):
    """A request could not be made, taken or answered."""


class RequestError(EndpointError):
    """The request itself is wrong: no JSON, a field missing or of another type."""


class ForbiddenPathError(RequestError):
    """A directory of the request is not below the roots that this endpoint allows."""


class UnauthorizedError(EndpointError):
    """The endpoint wants a token, and this is not it."""


class UpdateTimeoutError(EndpointError):
    """The answer did not come in time. The work may still go on: asking again for the same target joins it."""


class UnreachableError(EndpointError):
    """No answer of an endpoint came from this address."""


class RemoteError(EndpointError):
    """An endpoint failed with something that is no error of this package, or of a version of it that is not known."""
