"""Which database a MongoDB URL names, without the credentials in it."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from perdure.backends.base import retries
from perdure.backends.base.address import HIDDEN, ServerUrl, check_options, kind_of, parse_server_url

DEFAULT_DATABASE: Final = "perdure"
_SCHEMES: Final = ("mongodb", "mongodb+srv")
_FORM: Final = "mongodb://user:password@host/database"
# The driver's own defaults are to wait 30 seconds for a server, and to open a hundred connections.
_SETTINGS: Final[dict[str, Any]] = {
    "serverSelectionTimeoutMS": 5_000,
    "connectTimeoutMS": 5_000,
    "maxPoolSize": 20,
}


class MongoAddress(NamedTuple):
    """Where a database is. `secrets` are kept to be taken out of messages, and never shown."""

    hosts: str
    database: str
    secrets: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """For messages."""
        return f"MongoDB store {self.hosts}/{self.database}"

    def __repr__(self) -> str:
        return f"MongoAddress({self.hosts!r}, {self.database!r})"


def parse_address(url: str, database: str | None) -> MongoAddress:
    """The database that a URL names, in its path unless it is given. Raises `ValueError` without repeating the URL."""
    parts = _parse(url)
    return MongoAddress(parts.hosts.lower(), database or parts.database or DEFAULT_DATABASE, parts.secrets)


def check_source(url: object, client: object) -> None:
    """Raise TypeError or ValueError, with what to pass instead, unless there is a URL or an asynchronous client."""
    if url is not None and not isinstance(url, str):
        raise TypeError(
            f"the first argument is the URL of a MongoDB server, not {kind_of(url)}; pass a client as client=, or {_FORM}"
        )
    if url is None and client is None:
        raise ValueError(f"pass a URL or a client: a URL that reads {_FORM}, or client=pymongo.AsyncMongoClient(...)")
    import pymongo
    from pymongo.common import VALIDATORS

    if isinstance(url, str):
        check_options([name.lower() for name in _parse(url).options], VALIDATORS, "MongoDB")

    if isinstance(client, pymongo.MongoClient) or type(client).__name__ == "AsyncIOMotorClient":
        kind = type(client).__name__
        raise TypeError(f"a {kind} cannot be used; pass client=pymongo.AsyncMongoClient(url), or the URL itself")


def address_of(url: str | None, client: object, database: str | None) -> MongoAddress:
    """Return where the store is. A borrowed client need not know its hosts yet; a URL beside it only names the database."""
    named = None if url is None else parse_address(url, database)
    if client is None and named is not None:
        return named
    return MongoAddress(f"client {id(client)}", database or (DEFAULT_DATABASE if named is None else named.database))


def settings_for(url: str) -> dict[str, Any]:
    """The settings for the driver, without those that the URL sets. By its own default it would wait for ever for a reply."""
    settings = {**_SETTINGS, "socketTimeoutMS": int(retries.REPLY_WITHIN * 1000)}
    set_in_url = {name.lower() for name in _parse(url).options}
    return {name: value for name, value in settings.items() if name.lower() not in set_in_url}


def _parse(url: str) -> ServerUrl:
    parts = parse_server_url(url, "MongoDB", _SCHEMES, _FORM, strict=False)
    if not parts.hosts:
        raise ValueError(f"a MongoDB URL reads {_FORM} {HIDDEN}")
    return parts
