"""What a server says of itself at set-up: what its commits survive, and whether it may come to a halt."""

from __future__ import annotations

import re
import warnings
from typing import Final

from perdure.backends.libsql.hrana import Client, ServerError, Statement, Step
from perdure.errors import PerdureWarning
from perdure.store import Durability

_FULL: Final = 2
_SQLD: Final = re.compile(r"sqld (\d+)\.(\d+)\.(\d+)")
# Since then it may forget who may write, where checkpoints follow commits: see `turn`.
_FORGETFUL: Final = (0, 24, 32)


async def durability_of(client: Client) -> Durability:
    """`disk` if the server waits for its disk at every commit. One that does not tell may do anything."""
    return "disk" if await _setting(client, "synchronous") >= _FULL else "process"


async def warn_of_halts(client: Client, label: str) -> None:
    """Warn when the server may stop writing for good: what one process writes waits in line there, but several are too many."""
    if await _setting(client, "wal_autocheckpoint") == 0:
        return
    found = _SQLD.match(await client.server_version())
    if found is not None and tuple(map(int, found.groups())) >= _FORGETFUL:
        message = (
            f"{label}: {found[0]} may stop writing for good when four processes or more write at once; "
            "start it with --checkpoint-interval-s 60, which prevents that"
        )
        warnings.warn(message, PerdureWarning, stacklevel=2)


async def _setting(client: Client, name: str) -> int:
    """The value of a PRAGMA, or 0 when the server does not tell."""
    try:
        (told,) = (await client.batch([Step(Statement(f"PRAGMA {name}"))])).given()
        return int(told.rows[0][0] or 0)
    except (ServerError, IndexError, ValueError):
        return 0
