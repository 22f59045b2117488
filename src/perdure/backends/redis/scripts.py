"""The Lua scripts: read with the package, known to the server by their hash, sent whole only to a server that knows them not."""

from __future__ import annotations

import hashlib
import pkgutil
from typing import Final, NamedTuple

# By name: to list a directory is not the import system's business, and not possible in every kind of package.
_NAMES: Final = (
    "acquire",
    "cancel",
    "claim",
    "count",
    "create",
    "delete",
    "drop_schedule",
    "due",
    "finish",
    "fire",
    "get",
    "hold",
    "inbox",
    "items",
    "journal",
    "limit_queue",
    "list",
    "purge",
    "put_schedule",
    "queue_limits",
    "record",
    "release",
    "renew",
    "reopen",
    "report",
    "restore",
    "schedules",
    "setup",
    "signal",
    "suspend",
)


class Script(NamedTuple):
    """A script, with what all of them begin with, and the hash by which a server keeps it."""

    text: bytes
    sha: str


def _read(name: str) -> bytes:
    text = pkgutil.get_data(__package__, f"scripts/{name}.lua")
    if text is None:
        raise ImportError(f"the script {name}.lua is missing in this installation of perdure; install it again")
    return text


def _script(text: bytes) -> Script:
    return Script(text, hashlib.sha1(text).hexdigest())  # noqa: S324 - Redis names scripts by their SHA-1


_PRELUDE: Final = _read("prelude")
SCRIPTS: Final = {name: _script(_PRELUDE + b"\n" + _read(name)) for name in _NAMES}
