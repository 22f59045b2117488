"""The format of a run's log: a header with a random salt, then frames, each with its length and a keyed checksum.

The checksum also covers the frame's offset, so neither an old frame nor a payload that looks like one is taken for a frame. A log
is created whole (written to a draft, synced, renamed), and one frame at a time is added and synced. So all that a crash can leave
is one bad frame at the very end, which was never acknowledged: a torn tail. It is shorter than it says, or sectors of it were not
written and read as zeros.

Every other bad frame is damage: one with a good frame behind it, and a last one that is whole but whose checksum is wrong. It
was once acknowledged, perhaps as the end of the run, so to cut it off would let a completed run go on. Damage is reported, and
left as it is.
"""

from __future__ import annotations

import hashlib
import os
import struct
from typing import Final, NamedTuple

_BEGIN: Final = b"perdure\x01"
_SALT: Final = 16
_MARK: Final = b"\xf5pd\x1e"
_FRAME: Final = struct.Struct("<4sI16s")
# What a disk writes at once, and how many zeros are no coincidence.
_SECTOR: Final = 512
_LEAST_ZEROS: Final = 32
HEADER: Final = len(_BEGIN) + _SALT
MAX_PAYLOAD: Final = (1 << 32) - 1


class DamagedLog(Exception):
    """The log cannot be read; the argument says why."""


class ScannedFrames(NamedTuple):
    """The payloads of good frames, where the last one ends, and whether a torn tail behind it is whole in length."""

    payloads: list[bytes]
    end: int
    tail_is_whole: bool = False


def new_header() -> bytes:
    """The beginning of a new log, with a salt of its own."""
    return _BEGIN + os.urandom(_SALT)


def make_frame(payload: bytes, header: bytes, offset: int) -> bytes:
    """The payload as the frame at this offset of the log with this header."""
    if len(payload) > MAX_PAYLOAD:
        raise ValueError(f"a record of {len(payload)} bytes is larger than a file can take at once ({MAX_PAYLOAD} bytes)")
    return _FRAME.pack(_MARK, len(payload), _checksum(payload, header, offset)) + payload


def check_header(header: bytes) -> None:
    """Raise `DamagedLog` unless a log begins like this."""
    if len(header) != HEADER or not header.startswith(_BEGIN):
        raise DamagedLog("it does not begin like a log of this version")


def scan(data: bytes, header: bytes, offset: int) -> ScannedFrames:
    """The frames in `data`, which is at `offset` in the log, up to a torn tail. Raises `DamagedLog`."""
    payloads: list[bytes] = []
    at = 0
    while at < len(data):
        payload = _frame_at(data, at, header, offset)
        if payload is None:
            _refuse_damage(data, at, header, offset)
            return ScannedFrames(payloads, offset + at, _is_whole_tail(data[at:], header, offset + at))
        payloads.append(payload)
        at += _FRAME.size + len(payload)
    return ScannedFrames(payloads, offset + at)


def _frame_at(data: bytes, at: int, header: bytes, offset: int) -> bytes | None:
    if len(data) - at < _FRAME.size:
        return None
    mark, length, checksum = _FRAME.unpack_from(data, at)
    payload = data[at + _FRAME.size : at + _FRAME.size + length]
    if mark != _MARK or len(payload) != length or checksum != _checksum(payload, header, offset + at):
        return None
    return payload


def _refuse_damage(data: bytes, bad: int, header: bytes, offset: int) -> None:
    at = data.find(_MARK, bad + 1)
    while at >= 0:
        if _frame_at(data, at, header, offset) is not None:
            raise DamagedLog(f"what stands at byte {offset + bad} is damaged, and good records follow it at byte {offset + at}")
        at = data.find(_MARK, at + 1)


def _is_whole_tail(tail: bytes, header: bytes, offset: int) -> bool:
    """Whether the torn tail at this offset is whole in length, with sectors that were not written. Raises `DamagedLog`."""
    if len(tail) < _FRAME.size or not tail.strip(b"\0"):
        return False
    mark, length, checksum = _FRAME.unpack_from(tail)
    payload = tail[_FRAME.size :]
    if checksum == _checksum(payload, header, offset):
        raise DamagedLog(f"the mark or the length of its last record, at byte {offset}, is damaged")
    if mark == _MARK and length > len(payload):
        return False
    if _has_unwritten_sector(tail, offset):
        return True
    raise DamagedLog(f"its last record, at byte {offset}, is whole and has a wrong checksum")


def _has_unwritten_sector(tail: bytes, offset: int) -> bool:
    """Whether a part of the tail that reaches from one sector's beginning to its end, or to the end of the file, is zeros."""
    first = -(-offset // _SECTOR) * _SECTOR - offset
    starts = [0, *range(first or _SECTOR, len(tail), _SECTOR)]
    parts = [tail[start:end] for start, end in zip(starts, [*starts[1:], len(tail)], strict=True)]
    unwritten = [part for part in [*parts, tail[-_LEAST_ZEROS:]] if len(part) >= _LEAST_ZEROS]
    return any(not part.strip(b"\0") for part in unwritten)


def _checksum(payload: bytes, header: bytes, offset: int) -> bytes:
    digest = hashlib.blake2b(struct.pack("<QI", offset, len(payload)), digest_size=16, key=header)
    digest.update(payload)
    return digest.digest()
