"""An item of a stream: what the engine writes for it, and what a reader gets.

To a store an item is a number and some bytes. The engine puts beside the value where it came from, and what a later drive has to
know of everything before it (`body_count`, `seq`): so the last item of a stream tells that, however long the stream is.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from perdure.model.ids import check_id
from perdure.model.own_names import RESERVED

# The stream of `AttemptEnd`s. It has items beside those of users, which no user reads or writes.
ATTEMPT_ENDS: Final = f"{RESERVED}attempts"
# How many items a stream holds unless the call says otherwise.
MAX_STREAM_ITEMS: Final = 1_000_000


class StreamRecord(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The payload of an `Item`.

    `body_count` is how many of the body's own items the stream has, this one included; what `runtime.retry` made the body go
    another way from does not count. `seq` is the last record that had reached the body. `key` is that of the step, None for an
    item of the body. `index` counts from 0 in each attempt of the step, which `epoch` and `attempt` name together. `generation`
    and `continued_at` are those of the run at that time. `ends_before` is how many `AttemptEnd`s the run had then, so the end of
    this attempt comes after them; None for an item of the body, and for one that was written by a version without such ends.
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
    ends_before: int | None = None


class AttemptEnd(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The payload of an item of `ATTEMPT_ENDS`: how a step that emitted has ended. It is written together with the step's result.

    The journal says the same, but the store drops it when the run starts over with another input, and keeps the streams.
    `attempt` is the one that has succeeded under `epoch`, or 0. The last end of a key holds for all its attempts from
    `first_epoch` on, where the run began with that input. If no end follows an attempt that emitted, it was lost or cancelled.
    """

    key: str
    first_epoch: int
    epoch: int
    attempt: int


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


def check_stream(name: object) -> str:
    """Return the name of a user's stream. Raises `TypeError`, and `ValueError` for a name that is reserved."""
    checked = check_id(name, "a stream's name")
    if checked.startswith(RESERVED):
        raise ValueError(
            f"streams whose names begin with {RESERVED!r} are perdure's own, so {checked!r} cannot be written or read"
        )
    return checked


def encode_record(record: StreamRecord) -> bytes:
    """The payload of the item."""
    return msgspec.json.encode(record)


def decode_record(payload: bytes) -> StreamRecord:
    """The record of an item. Raises `msgspec.MsgspecError` for bytes that are none."""
    return msgspec.json.decode(payload, type=StreamRecord)
