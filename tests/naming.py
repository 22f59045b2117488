"""Names for parametrised tests that are the same in every process."""

from __future__ import annotations

import re


def short_id(value: object, longest: int = 120) -> str:
    """The value as text, without the places in memory that some show; of a long one the end."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))[-longest:]
