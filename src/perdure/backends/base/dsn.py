"""DSNs: which store one names, and which of its options are ours and not the server's.

A DSN may hold a password, so no error repeats it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, Final, Generic, NamedTuple, TypeVar
from urllib.parse import parse_qsl, unquote, urlencode

from perdure.backends.base.address import refuse_ambiguous

T = TypeVar("T")

FORMS: Final = (
    "sqlite:///relative.db, sqlite:////absolute.db, memory:, file:local.db, libsql://host, "
    "or the URL of a server: postgresql://..., mysql://..., mongodb://..., redis://..."
)
# Arguments of a store that no DSN can carry: its location, and objects.
_NOT_OPTIONS: Final = frozenset({"url", "path", "directory", "pool", "client"})
_BOOLEANS: Final = {"true": True, "false": False}


class DsnScheme(NamedTuple, Generic[T]):
    """How a store is made by the DSNs of one scheme.

    `parse_location` reads what follows the scheme. Without it, `make` takes the whole URL with the server's options in it.
    """

    make: Callable[..., T]
    parse_location: Callable[[str], tuple[str, ...]] | None = None

    def make_store(self, dsn: str) -> T:
        """The store that a DSN of this scheme names. Raises `ValueError` for options that it does not take."""
        arguments, options = self._read(dsn)
        try:
            return self.make(*arguments, **options)
        except TypeError as reason:
            raise ValueError(f"a {dsn.partition(':')[0]}: DSN does not take these options: {reason}") from reason

    def _read(self, dsn: str) -> tuple[tuple[str, ...], dict[str, Any]]:
        if self.parse_location is None:
            url, options = split_options(dsn, frozenset(inspect.signature(self.make).parameters) - _NOT_OPTIONS)
            return (url,), options
        location, _, query = dsn.partition(":")[2].partition("?")
        return self.parse_location(location), {name: _parse_value(name, value) for name, value in _parse_query(query)}


def scheme_of(dsn: object, schemes: Collection[str], *, what: str = "store", forms: str = FORMS) -> str:
    """The scheme of a DSN, one of these. Raises `ValueError` and `TypeError`, which name a `what` and show the `forms`."""
    if not isinstance(dsn, str):
        raise TypeError(f"a DSN is a str like {forms}, not {type(dsn).__name__}")
    name, colon, _ = dsn.partition(":")
    if not colon or name not in schemes:
        is_scheme = colon and name.replace("+", "").isalnum() and ("://" in dsn or "@" not in dsn)
        begins = f" that begins with {name + ':'!r}" if is_scheme else ""
        raise ValueError(f"no {what} for a DSN{begins}; write {forms}")
    return name


def no_location(location: str) -> tuple[str, ...]:
    """Return no argument, for a store in memory. Raises `ValueError` if the DSN names a place."""
    if location.strip("/"):
        raise ValueError("a DSN of memory has no place in it; write memory:")
    return ()


def path(location: str) -> tuple[str, ...]:
    """Return the whole location as a path. Raises `ValueError` if it is empty."""
    if not location:
        raise ValueError("a DSN of files names no directory; write files:directory")
    return (unquote(location),)


def path_after_slashes(location: str) -> tuple[str, ...]:
    """Return the path after the empty host of a URL. Raises `ValueError` if there is none."""
    found = location.removeprefix("///")
    if found in ("", location):
        raise ValueError("a DSN of SQLite names no file; write sqlite:///relative.db or sqlite:////absolute.db")
    return (unquote(found),)


def split_options(dsn: str, names: Collection[str]) -> tuple[str, dict[str, Any]]:
    """The DSN without the options of these names, and those options. The others are the server's, and stay in the DSN."""
    url, mark, query = dsn.partition("?")
    if not mark:
        return dsn, {}
    if "@" in query or "?" in query:  # these would be escaped below, and not be noticed
        refuse_ambiguous(dsn, "DSN")
    pairs = _parse_query(query)
    others = [(name, value) for name, value in pairs if name not in names]
    ours = {name: _parse_value(name, value) for name, value in pairs if name in names}
    if not ours:
        return dsn, {}
    return f"{url}?{urlencode(others)}" if others else url, ours


def _parse_query(query: str) -> list[tuple[str, str]]:
    try:
        return parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query))
    except ValueError:
        raise ValueError("what follows ? in a DSN must read option=value&option=value") from None


def _parse_value(name: str, text: str) -> object:
    if name == "pool_size" and text.isascii() and text.isdigit():
        return int(text)
    return _BOOLEANS.get(text, text) if name in {"auto_migrate", "cluster", "tls"} else text
