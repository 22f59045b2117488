"""Schedules and queue limits of a namespace: one small file, replaced as a whole.

A schedule that fires moves on and leaves the run that it starts in the same file; only then is the run created. Whoever finds a
run there creates it first, so that a crash in between neither loses it nor starts it twice.
"""

from __future__ import annotations

import os
import zlib
from typing import Final

import msgspec

from perdure.backends.files.disk import opened, read_all, replace_file
from perdure.errors import PersistenceError
from perdure.model.records import QueueLimits, RunRow, Schedule

_MARK: Final = b"perdure settings 1\n"


class Settings(msgspec.Struct, omit_defaults=True):
    """What is in the file. `fired` are runs that were started by a schedule and may not exist yet."""

    schedules: dict[str, Schedule] = {}
    limits: dict[str, QueueLimits] = {}
    fired: list[RunRow] = []


_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(Settings)


class SettingsFile:
    """The file of one namespace. Reading needs no lock, writing that of the settings."""

    def __init__(self, directory: str) -> None:
        self.path = f"{directory}/settings"

    def read(self) -> Settings:
        """What is set."""
        try:
            with opened(self.path, os.O_RDONLY) as fd:
                data = read_all(fd, 0)
        except FileNotFoundError:
            return Settings()
        start = len(_MARK) + 4
        if data[: len(_MARK)] != _MARK or zlib.crc32(data[start:]).to_bytes(4, "little") != data[len(_MARK) : start]:
            raise PersistenceError(f"files store {self.path!r}", "the file is damaged; keep it, and restore it from a backup")
        return _decoder.decode(data[start:])

    def write(self, settings: Settings) -> None:
        """Have these on disk."""
        body = _encoder.encode(settings)
        replace_file(self.path, _MARK + zlib.crc32(body).to_bytes(4, "little") + body)
