"""Errors of the package: one exception type with the daemon's error codes."""

from __future__ import annotations

from enum import IntEnum


class ErrorCode(IntEnum):
    """The daemon's status codes (ErrorCode in stockpot.thrift, StatusCode in the C++ sources)."""

    INVALID_ARGUMENT = 1  # the request is wrong and stays wrong
    NOT_FOUND = 2
    ALREADY_EXISTS = 3
    RESOURCE_EXHAUSTED = 4  # a limit was met: later or smaller
    UNAVAILABLE = 5  # not now, or no connection
    CORRUPTION = 6  # bytes are not what they claim to be
    INTERNAL = 7


class StockpotError(Exception):
    """A call failed.

    Attributes:
        code: what kind of failure.
        message: for a person; names the thing and what to do.
        retryable: the same call may succeed later, unchanged.
    """

    def __init__(self, code: ErrorCode, message: str, retryable: bool | None = None) -> None:
        """`retryable` follows from the code where it is not given."""
        super().__init__(f"{code.name}: {message}")
        self.code = code
        self.message = message
        self.retryable = (
            code in (ErrorCode.UNAVAILABLE, ErrorCode.RESOURCE_EXHAUSTED)
            if retryable is None
            else retryable
        )
