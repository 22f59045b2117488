"""What a pattern asks of a database: the keys from its literal beginning on, up to where that beginning ends.

No text of a pattern ever becomes a LIKE, a glob or a regular expression. What comes back is looked at with `fits`.
"""

from __future__ import annotations

from typing import NamedTuple


class Range(NamedTuple):
    """The keys from `first` on and before `end`, by their bytes; without an `end`, all the rest."""

    first: str
    end: str | None


def literal_beginning(pattern: str) -> str | None:
    """What every key that fits begins with, or None when no key can fit, because keys are text without NUL."""
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern must be a str, not {type(pattern).__name__}")
    try:
        pattern.encode()
    except UnicodeEncodeError:
        return None
    return None if "\0" in pattern or not pattern else pattern.partition("*")[0]


def range_of(beginning: str) -> Range:
    """The range of the keys that begin so."""
    kept = beginning.rstrip("\U0010ffff")
    if not kept:
        return Range(beginning, None)
    last = ord(kept[-1]) + 1
    return Range(beginning, kept[:-1] + chr(0xE000 if last == 0xD800 else last))  # surrogates are no text
