"""What a call can end with besides its answer. Every error carries gRPC's status code and the router's message."""
from __future__ import annotations

import grpc


class Error(Exception):
    """Of a code that has no class of its own: INTERNAL, UNAUTHENTICATED …"""

    def __init__(self, code: grpc.StatusCode, message: str):
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message


class InvalidRequest(Error):
    """The same request would fail again; the message names the field, its value and the limit."""


class Overloaded(Error):
    """RESOURCE_EXHAUSTED: a queue is full, the request is larger than any pool, or this client does not read."""


class DeadlineExceeded(Error):
    """`timeout` has passed."""


class Cancelled(Error):
    """By Answer.cancel, or by the operator."""


class Unavailable(Error):
    """No router answered for as long as the client's patience lasts."""


_CLASSES = {
    grpc.StatusCode.INVALID_ARGUMENT: InvalidRequest,
    grpc.StatusCode.NOT_FOUND: InvalidRequest,
    grpc.StatusCode.ALREADY_EXISTS: InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: InvalidRequest,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Overloaded,
    grpc.StatusCode.DEADLINE_EXCEEDED: DeadlineExceeded,
    grpc.StatusCode.CANCELLED: Cancelled,
    grpc.StatusCode.UNAVAILABLE: Unavailable,
}


def make_error(code: grpc.StatusCode, message: str) -> Error:
    return _CLASSES.get(code, Error)(code, message)
