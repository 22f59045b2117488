"""What a lease holder says with its heartbeats of the steps under way: their keys, and when each attempt began.

It is written with every renewal, so its size is bounded: of a thousand branches the longest-running ones are named, and the
others are counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec

# The longest text that a renewal carries for one run.
MAX_BYTES: Final = 4096


class RunningSteps(msgspec.Struct, frozen=True, array_like=True):
    """Key and start of steps, the earliest first, and how many there are in all."""

    count: int = 0
    started: tuple[tuple[str, int], ...] = ()


_decoder: Final = msgspec.json.Decoder(RunningSteps)


def encode_running_steps(steps: Mapping[str, int]) -> bytes | None:
    """The starts by key, in the order of the starts, as a store keeps them; None for no steps."""
    if not steps:
        return None
    named: list[tuple[str, int]] = []
    size = 16  # of the brackets and the count
    for key, started_at in steps.items():
        size += len(msgspec.json.encode((key, started_at))) + 1
        if size > MAX_BYTES:
            break
        named.append((key, started_at))
    return msgspec.json.encode(RunningSteps(len(steps), tuple(named)))


def decode_running_steps(stored: bytes | None) -> RunningSteps:
    """The inverse. Raises `msgspec.MsgspecError` for what is damaged."""
    return RunningSteps() if stored is None else _decoder.decode(stored)
