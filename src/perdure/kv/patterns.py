"""Patterns of keys: matching them, and the range of keys that a database has to look at.

In a pattern every character stands for itself except `*`, which stands for any text. No part of a pattern ever becomes a LIKE, a
glob or a regular expression: a store asks its database for the range of keys that begin with the pattern's literal prefix, and
`matches` selects among them.
"""

from __future__ import annotations

from typing import NamedTuple


def matches(key: str, pattern: str) -> bool:
    """Whether a key matches a pattern in which only `*` is special. Takes at most time in len(key) * len(pattern)."""
    first, *others = pattern.split("*")
    if not others:
        return key == pattern
    *middle, last = others
    if not key.startswith(first) or len(key) < len(first) + len(last) or not key.endswith(last):
        return False
    # The leftmost place for each part leaves the most room for the others.
    at, end = len(first), len(key) - len(last)
    for part in middle:
        found = key.find(part, at, end)
        if found < 0:
            return False
        at = found + len(part)
    return True


class KeyRange(NamedTuple):
    """The keys from `first` on and before `end`, by their bytes; without an `end`, all the rest."""

    first: str
    end: str | None


def literal_prefix(pattern: str) -> str | None:
    """What every matching key begins with, or None when no key can match, because keys are text without NUL."""
    if not isinstance(pattern, str):
        raise TypeError(f"a pattern must be a str, not {type(pattern).__name__}")
    try:
        pattern.encode()
    except UnicodeEncodeError:
        return None
    return None if "\0" in pattern or not pattern else pattern.partition("*")[0]


def key_range(prefix: str) -> KeyRange:
    """The range of the keys that begin with `prefix`."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return KeyRange(prefix, None)
    last = ord(kept[-1]) + 1
    return KeyRange(prefix, kept[:-1] + chr(0xE000 if last == 0xD800 else last))  # surrogates are no text
