"""Reading the URL of a server, without repeating it in an error: it may hold a password or a token."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

# Ends every error about a URL.
HIDDEN: Final = "(it is not repeated here, as it may hold a password or a token)"


class ServerUrl(NamedTuple):
    """The parts of a URL of which the address of a server is made, decoded."""

    scheme: str
    # Host and port as they are written, without credentials: some drivers take several hosts, separated by commas.
    hosts: str
    # Of several hosts `host` and `port` are None.
    host: str | None
    port: int | None
    # The path begins with a slash, unless it is empty; `raw_path` is not decoded, for another URL.
    path: str
    raw_path: str
    user: str | None
    password: str | None
    fragment: str
    options: Mapping[str, str]

    def __repr__(self) -> str:
        return f"ServerUrl({self.scheme!r}, {self.hosts!r}, {self.path!r})"

    @property
    def database(self) -> str:
        """The path without its slash."""
        return self.path.removeprefix("/")


def parse_server_url(
    url: object, product: str, schemes: Collection[str], form: str, *, noun: str = "URL", strict: bool = True
) -> ServerUrl:
    """The parts of a URL that reads like `form`. Raises `ValueError` that names it by `product` and `noun`, without repeating it.

    `strict` refuses a query that is not made of `name=value`; otherwise a name alone is an option with an empty value. Of an
    option that is given twice the last one counts.
    """
    scheme, mark, _ = url.partition("://") if isinstance(url, str) else ("", "", "")
    if not isinstance(url, str) or not mark or scheme.lower() not in schemes:
        raise ValueError(f"a {product} {noun} reads {form} {HIDDEN}")
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=strict and bool(parts.query)))
        return _decode(parts, options)
    except ValueError:
        raise ValueError(f"the {product} {noun} cannot be read; it reads {form} {HIDDEN}") from None


def _decode(parts: SplitResult, options: dict[str, str]) -> ServerUrl:
    hosts = parts.netloc.rpartition("@")[2]
    has_many = "," in hosts
    return ServerUrl(
        scheme=parts.scheme,
        hosts=hosts,
        host=None if has_many else parts.hostname,
        port=None if has_many else parts.port,
        path=unquote(parts.path),
        raw_path=parts.path,
        user=None if parts.username is None else unquote(parts.username),
        password=None if parts.password is None else unquote(parts.password),
        fragment=parts.fragment,
        options=options,
    )
