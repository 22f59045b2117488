"""What became of something that was sent to a server and failed."""

from __future__ import annotations

import enum


class WriteFailure(enum.Enum):
    """What became of a statement that failed, and what to do."""

    PERMANENT = enum.auto()  # the same statement would fail again
    RETRY = enum.auto()  # nothing was written; it may succeed now
    UNKNOWN = enum.auto()  # the connection is gone, and with it the answer: it was written, or not


class NotSentError(Exception):
    """There was no connection to send anything on. Its cause says why."""
