"""Which database a MongoDB URL names, without the credentials in it."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

DEFAULT_DATABASE: Final = "perdure"
_URL: Final = re.compile(
    r"(?P<scheme>mongodb(?:\+srv)?)://(?:(?P<login>.*)@)?(?P<hosts>[^/?@]+)(?:/(?P<path>[^?]*))?(?:\?(?P<query>.*))?"
)
# What the driver would otherwise do: wait 30 seconds for a server, for ever for an answer, and open a hundred connections.
_SETTINGS: Final[dict[str, Any]] = {
    "serverSelectionTimeoutMS": 5_000,
    "connectTimeoutMS": 5_000,
    "socketTimeoutMS": 30_000,
    "maxPoolSize": 20,
}


class MongoAddress(NamedTuple):
    """Where a database is. `password` is kept to be taken out of messages, and shown nowhere."""

    hosts: str
    database: str
    password: str | None

    @property
    def label(self) -> str:
        """For messages."""
        return f"MongoDB store {self.hosts}/{self.database}"

    def __repr__(self) -> str:
        return f"MongoAddress({self.hosts!r}, {self.database!r})"


def parse_address(url: str, database: str | None) -> MongoAddress:
    """The place that a URL names; its path says the database unless that is given. Raises `ValueError` without repeating it."""
    found = _parts(url)
    _, _, password = (found["login"] or "").partition(":")
    return MongoAddress(
        found["hosts"].lower(), database or unquote(found["path"] or "") or DEFAULT_DATABASE, unquote(password) or None
    )


def settings_for(url: str) -> dict[str, Any]:
    """The driver's settings where the URL does not say something else."""
    said = {name.lower() for name, _ in parse_qsl(_parts(url)["query"] or "", keep_blank_values=True)}
    return {name: value for name, value in _SETTINGS.items() if name.lower() not in said}


def _parts(url: str) -> re.Match[str]:
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    if found is None:
        raise ValueError("a MongoDB URL is mongodb://host/database (it is not repeated here, as it may hold a password)")
    return found
