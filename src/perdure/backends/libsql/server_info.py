"""What a server reports at set-up: what its commits survive, and whether it may stop writing."""

from __future__ import annotations

import re
import warnings
from typing import Final

from perdure.backends.libsql.hrana import BatchStep, HranaClient, ServerError
from perdure.backends.sql.dialect import SYNCHRONOUS_FULL, Statement
from perdure.errors import PerdureWarning
from perdure.store import Durability

_SQLD: Final = re.compile(r"sqld (\d+)\.(\d+)\.(\d+)")
# Since this version it may lose its write lock, where checkpoints follow commits: see `write_lock`.
_MAY_LOSE_LOCK: Final = (0, 24, 32)


async def durability_of(client: HranaClient) -> Durability:
    """`disk` if the server waits for its disk at every commit. Of one that does not say, nothing is promised."""
    return "disk" if await _setting(client, "synchronous") >= SYNCHRONOUS_FULL else "process"


async def warn_of_lost_lock(client: HranaClient, label: str) -> None:
    """Warn when the server may stop writing for good: `write_lock` prevents that within one process, but not with several."""
    if await _setting(client, "wal_autocheckpoint") == 0:
        return
    found = _SQLD.match(await client.server_version())
    if found is not None and tuple(map(int, found.groups())) >= _MAY_LOSE_LOCK:
        message = (
            f"{label}: {found[0]} may stop writing for good when four processes or more write at once; "
            "start it with --checkpoint-interval-s 60, which prevents that"
        )
        warnings.warn(message, PerdureWarning, stacklevel=2)


async def _setting(client: HranaClient, name: str) -> int:
    """The value of a PRAGMA, or 0 when the server does not say."""
    try:
        (result,) = (await client.batch([BatchStep(Statement(f"PRAGMA {name}"))])).results_or_raise()
        return int(result.rows[0][0] or 0)
    except (ServerError, IndexError, ValueError):
        return 0
