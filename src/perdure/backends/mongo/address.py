"""Which database a MongoDB URL names, without the credentials in it."""

from __future__ import annotations

import re
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl, unquote

from perdure.backends.base.address import HIDDEN

DEFAULT_DATABASE: Final = "perdure"
# Not `urlsplit`: that ends the credentials at the first slash, and of a password that was not escaped would show the half before.
_URL: Final = re.compile(
    r"(?P<scheme>mongodb(?:\+srv)?)://(?:(?P<login>.*)@)?(?P<hosts>[^/?@]+)(?:/(?P<path>[^?]*))?(?:\?(?P<query>.*))?"
)
# The driver's own defaults are to wait 30 seconds for a server and for ever for a reply, and to open a hundred connections.
_SETTINGS: Final[dict[str, Any]] = {
    "serverSelectionTimeoutMS": 5_000,
    "connectTimeoutMS": 5_000,
    "socketTimeoutMS": 30_000,
    "maxPoolSize": 20,
}


class MongoAddress(NamedTuple):
    """Where a database is. `password` is kept to be taken out of messages, and is never shown."""

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
    """The database that a URL names, in its path unless it is given. Raises `ValueError` without repeating the URL."""
    found = _parts(url)
    _, _, password = (found["login"] or "").partition(":")
    return MongoAddress(
        found["hosts"].lower(), database or unquote(found["path"] or "") or DEFAULT_DATABASE, unquote(password) or None
    )


def check_source(url: object, client: object) -> None:
    """Raise TypeError or ValueError, with what to pass instead, unless there is a URL or an asynchronous client."""
    if url is not None and not isinstance(url, str):
        kind = type(url).__name__
        raise TypeError(f"the first argument is the URL of a MongoDB server, not a {kind}; pass a client as client=")
    if url is not None and client is not None:
        raise ValueError("pass a URL or a client, not both: with client=, database= names the database, 'perdure' by default")
    if url is None and client is None:
        raise ValueError("pass a URL or a client: stores.mongo(url) or stores.mongo(client=...)")
    import pymongo

    if isinstance(client, pymongo.MongoClient) or type(client).__name__ == "AsyncIOMotorClient":
        kind = type(client).__name__
        raise TypeError(f"a {kind} cannot be used; pass client=pymongo.AsyncMongoClient(url), or the URL itself")


def address_of_client(client: object, database: str | None) -> MongoAddress:
    """The address of a borrowed client, which need not know its hosts yet."""
    return MongoAddress(f"client {id(client)}", database or DEFAULT_DATABASE, None)


def settings_for(url: str) -> dict[str, Any]:
    """The settings for the driver, without those that the URL sets."""
    set_in_url = {name.lower() for name, _ in parse_qsl(_parts(url)["query"] or "", keep_blank_values=True)}
    return {name: value for name, value in _SETTINGS.items() if name.lower() not in set_in_url}


def _parts(url: str) -> re.Match[str]:
    found = _URL.fullmatch(url) if isinstance(url, str) else None
    if found is None:
        raise ValueError(f"a MongoDB URL reads mongodb://host/database {HIDDEN}")
    return found
