"""DSNs: which store one names, and which of its options are ours and not the server's.

A DSN may hold a password, so no error repeats it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote, urlencode

from perdure.store import FullStore

FORMS: Final = (
    "sqlite:///relative.db, sqlite:////absolute.db, files:directory, memory:, file:local.db, libsql://host, "
    "or the URL of a server: postgresql://..., mysql://..., mongodb://..., redis://..."
)
# Arguments that no DSN can carry: what it leads to, and objects.
_NOT_OPTIONS: Final = frozenset({"url", "path", "directory", "pool", "client"})
_WORDS: Final = {"true": True, "false": False}


class Scheme(NamedTuple):
    """What a DSN of a scheme leads to. Without `located`, the function takes the URL with the server's options in it."""

    make: Callable[..., FullStore]
    located: Callable[[str], tuple[str, ...]] | None = None

    def read(self, dsn: str) -> tuple[tuple[str, ...], dict[str, Any]]:
        """The arguments and keywords for `make`."""
        if self.located is None:
            url, options = without_options(dsn, frozenset(inspect.signature(self.make).parameters) - _NOT_OPTIONS)
            return (url,), options
        location, _, query = dsn.partition(":")[2].partition("?")
        return self.located(location), {name: _value(name, value) for name, value in _pairs(query)}


def opened(dsn: str, schemes: Mapping[str, Scheme]) -> FullStore:
    """The store that a DSN names. Raises `ValueError` and `TypeError` without repeating it."""
    if not isinstance(dsn, str):
        raise TypeError(f"a DSN is a str like {FORMS}, not {type(dsn).__name__}")
    name, colon, _ = dsn.partition(":")
    if not colon or name not in schemes:
        begins = f" that begins with {name + ':'!r}" if colon and name.replace("+", "").isalnum() else ""
        raise ValueError(f"no store for a DSN{begins}; write {FORMS}")
    arguments, options = schemes[name].read(dsn)
    try:
        return schemes[name].make(*arguments, **options)
    except TypeError as reason:
        raise ValueError(f"a {name}: DSN does not take these options: {reason}") from reason


def nowhere(location: str) -> tuple[str, ...]:
    """Nothing, for a store that is nowhere."""
    if location.strip("/"):
        raise ValueError(f"no store for such a DSN; write {FORMS}")
    return ()


def path(location: str) -> tuple[str, ...]:
    """The path as it stands."""
    if not location:
        raise ValueError(f"no store for such a DSN; write {FORMS}")
    return (unquote(location),)


def path_after_slashes(location: str) -> tuple[str, ...]:
    """The path after the empty host of a URL."""
    return path(location.removeprefix("///") if location.startswith("///") else "")


def without_options(dsn: str, names: Collection[str]) -> tuple[str, dict[str, Any]]:
    """The DSN without the options of these names, and those: the others are the server's."""
    place, mark, query = dsn.partition("?")
    if not mark:
        return dsn, {}
    pairs = _pairs(query)
    others = [(name, value) for name, value in pairs if name not in names]
    ours = {name: _value(name, value) for name, value in pairs if name in names}
    if not ours:
        return dsn, {}
    return f"{place}?{urlencode(others)}" if others else place, ours


def _pairs(query: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ValueError("what follows ? in a DSN must read option=value&option=value") from None


def _value(name: str, text: str) -> object:
    if name == "pool_size" and text.isascii() and text.isdigit():
        return int(text)
    return _WORDS.get(text, text) if name in {"auto_migrate", "cluster", "tls"} else text
