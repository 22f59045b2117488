"""Keys of steps: how a scope's name and a key inside it become one text that no other pair gives.

A key outside any scope is stored as it is written, so that it reads the same everywhere. Inside a scope it is `/scope/key` with
the parts escaped. A plain key that begins like one of these is escaped too, which keeps the two apart.
"""

from __future__ import annotations

from perdure.records import check_id


def escape(part: str) -> str:
    """`part` without slashes, so that parts can be joined by them."""
    return part.replace("%", "%25").replace("/", "%2F")


def full_key(scope: tuple[str, ...], key: object) -> str:
    """The key as it is recorded."""
    text = check_id(key, "a step's key")
    if not scope:
        return text if text[0] not in "/%" else check_id(escape(text), "a step's key")
    return check_id("/" + "/".join(escape(part) for part in (*scope, text)), "a step's key with its scope")
