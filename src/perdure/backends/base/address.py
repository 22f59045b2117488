"""Reading the URL of a server, and never repeating it: it may hold a password or a token."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, urlsplit

HIDDEN = "(it is not repeated here, as it may hold a password)"


class ServerUrl(NamedTuple):
    """The parts of a URL that every server's address is made of, decoded."""

    scheme: str
    # Host and port as they are written, without credentials: some drivers take several hosts.
    hosts: str
    host: str | None
    port: int | None
    path: str
    user: str | None
    password: str | None
    fragment: str
    options: dict[str, str]


def parse_server_url(url: object, product: str, schemes: Collection[str], form: str, *, strict: bool = True) -> ServerUrl:
    """The parts of a URL like `form`. Raises `ValueError` without repeating it.

    `strict` refuses a query that is not made of `name=value`. Of an option that is given twice the last one counts.
    """
    if not isinstance(url, str) or url.partition("://")[0].lower() not in schemes or "://" not in url:
        raise ValueError(f"a {product} URL reads {form} {HIDDEN}")
    try:
        parts = urlsplit(url)
        port = None if "," in parts.netloc else parts.port  # of several hosts none is the port
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=strict and bool(parts.query)))
    except ValueError:
        raise ValueError(f"the {product} URL cannot be read; it reads {form} {HIDDEN}") from None
    return _decode(parts, port, options)


def _decode(parts: SplitResult, port: int | None, options: dict[str, str]) -> ServerUrl:
    return ServerUrl(
        scheme=parts.scheme,
        hosts=parts.netloc.rpartition("@")[2],
        host=parts.hostname,
        port=port,
        path=unquote(parts.path),
        user=None if parts.username is None else unquote(parts.username),
        password=None if parts.password is None else unquote(parts.password),
        fragment=parts.fragment,
        options=options,
    )
