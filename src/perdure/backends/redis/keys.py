"""The keys of a namespace, all of them in one slot.

Every key of one stem and prefix begins with the same hash tag, `{stem:prefix}`, so all of a namespace lies in one slot of a
cluster and every verb, also one that touches many runs (claim, list, purge, a child that notifies its parent), is one script. A
namespace is therefore as large as one node; several prefixes spread over a cluster. Text of the user stands at the end of a key
or is percent-encoded, and is never read as a pattern.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import quote

from perdure.model.ids import check_namespace

_STEM: Final = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# What a run consists of, as in prelude.lua.
PARTS: Final = ("run", "steps", "inbox", "consumed", "dedupes", "items", "streams")


class Keys:
    """The keys of one namespace. Raises `ValueError` for a stem or prefix that cannot be part of one."""

    def __init__(self, stem: str, prefix: str) -> None:
        if not isinstance(stem, str) or not _STEM.fullmatch(stem):
            raise ValueError(f"table {stem!r} must consist of 1 to 64 letters, digits, '_', '.' and '-'")
        self.stem = stem
        self.prefix = check_namespace(prefix)
        self.root = f"{{{stem}:{quote(prefix, safe='')}}}"
        self.schedules = f"{self.root}:schedules"
        self.workers = f"{self.root}:workers"
        self.limits = f"{self.root}:limits"
        self.starts = f"{self.root}:starts"
        self.channel = f"{self.root}:changed"

    def mark(self, call: str) -> str:
        """Where a script keeps for a minute what it did in this call."""
        return f"{self.root}:call:{call}"

    def of(self, run_id: str, *parts: str) -> list[str]:
        """The keys of these parts of a run, or of all."""
        return [f"{self.root}:{part}:{run_id}" for part in parts or PARTS]
