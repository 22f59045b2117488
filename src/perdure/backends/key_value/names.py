"""Where things are kept: keys of lower-case letters, digits, `-` and `/` only, whatever the ids look like.

    <root>/r/<run>                   a run's document
    <root>/o/<run>/<incarnation>/    what is too much for the document: chunks of its journal, large payloads
    <root>/x/                        the cards and badges, by which runs are found
    <root>/settings, wake, turn      schedules and limits, who watches, who may claim

A run is named by a hash of its id, so an id can be anything, is never a way out of its place, and differs from any other also
where case does not count. The document says which id it really is.
"""

from __future__ import annotations

import hashlib
import re
import secrets

_SIMPLE = re.compile(r"[a-z0-9-]{0,40}")


def root_of(prefix: str) -> str:
    """The folder of the namespace `prefix`."""
    simple = _SIMPLE.fullmatch(prefix) is not None
    return f"perdure/n-{prefix}" if simple else f"perdure/m-{_hash(prefix, 16)}"


def run_name(run_id: str) -> str:
    """The name of this run."""
    return _hash(run_id, 16)


def short(text: str) -> str:
    """What stands for this text where there is no room for it; another text may, very rarely, have the same."""
    return _hash(text, 6)


def nonce() -> str:
    """A name that nobody else has."""
    return secrets.token_hex(8)


def _hash(text: str, size: int) -> str:
    return hashlib.blake2b(text.encode(), digest_size=size).hexdigest()
