"""An item of a stream: what the engine writes for it, and what a reader gets.

To a store an item is a number and some bytes. The engine puts beside the value where it came from, and what a later drive has to
know of everything before it (`body_count`, `seq`): so the last item of a stream tells that, however long the stream is.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

# How many items a stream holds unless the call says otherwise.
MAX_STREAM_ITEMS: Final = 1_000_000


class StreamRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The payload of an `Item`.

    `body_count` is how many of the body's own items the stream has, this one included; what `runtime.retry` made the body go
    another way from does not count. `seq` is the last record that had reached the body. `key` is that of the step, None for an
    item of the body. `index` counts from 0 in each attempt of the step, which `epoch` and `attempt` name together. `generation`
    and `continued_at` are those of the run at that time.
    """

    body_count: int
    seq: int
    epoch: int
    generation: int
    continued_at: int | None
    key: str | None
    attempt: int
    index: int
    is_end: bool
    value: msgspec.Raw


class StreamItem(msgspec.Struct, frozen=True, kw_only=True):
    """An item of a stream as `run.stream(..., details=True)` gives it.

    `key` is that of the step which emitted it, None for an item of the body. `attempt` and `epoch` tell attempts of one step
    apart: a step that was in doubt when its worker was lost runs again under a higher epoch, and its attempts count from 1 again.
    `index` counts from 0 in each attempt: an item of a step with index 0 begins an attempt, and supersedes what earlier ones of
    that step emitted.
    """

    position: int
    value: Any
    key: str | None
    attempt: int
    epoch: int
    index: int


def encode_record(record: StreamRecord) -> bytes:
    """The payload of the item."""
    return msgspec.json.encode(record)


def decode_record(payload: bytes) -> StreamRecord:
    """The record of an item. Raises `msgspec.MsgspecError` for bytes that are none."""
    return msgspec.json.decode(payload, type=StreamRecord)
