r"""How things are called: the `_id` of every document, which is text and sorts by its bytes.

A run is called by its id, and in a namespace by its id, a NUL and the namespace. Neither may contain a NUL, so no two meet, and
within a namespace runs sort by their ids. What does not fit into a run's document stands in other collections under the run's
stem: its name, two NULs and its generation, which is a random text made when the run is created or restored. A run that is
deleted and created again has another one, so what is left of the old run is never taken for the new one's.
"""

from __future__ import annotations

import hashlib
from typing import Any


def key_of(namespace: str, name: str) -> str:
    """What the run, queue or schedule is called in its collection."""
    return f"{name}\0{namespace}" if namespace else name


def name_in(key: str) -> str:
    """The id in a run's key."""
    return key.partition("\0")[0]


def stem_of(key: str, generation: str) -> str:
    """What everything of this run begins with."""
    return f"{key}\0\0{generation}"


def numbered(stem: str, number: int) -> str:
    """The entry or inbox row with this number."""
    return f"{stem}\0{number:016x}"


def streamed(stem: str, stream: str, number: int) -> str:
    """The item with this number."""
    return numbered(f"{stem}\0{stream}", number)


def payload_name(stem: str, payload: bytes) -> str:
    """The payload, by what it says."""
    return f"{stem}\0{hashlib.sha256(payload).hexdigest()}"


def below(stem: str) -> dict[str, str]:
    """A condition on `_id`: everything of the run, or of a stream of it."""
    return {"$gte": f"{stem}\0", "$lt": f"{stem}\1"}


def beginning_with(prefix: str) -> dict[str, str]:
    """A condition on `_id`: ids that begin with this text, whatever characters it has."""
    kept = prefix.rstrip("\U0010ffff")
    if not kept:
        return {"$gte": prefix}
    last = ord(kept[-1]) + 1
    return {"$gte": prefix, "$lt": kept[:-1] + chr(0xE000 if last == 0xD800 else last)}  # surrogates are no text


def in_place(key: str, generation: str, **conditions: Any) -> dict[str, Any]:
    """A condition: this run, and no other that was or will be called so."""
    return {"_id": key, "generation": generation, **conditions}
