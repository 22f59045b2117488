"""Reading the URL of a server, without repeating it in an error: it may hold a password or a token.

A password with a character that ends the host (`/`, `?` or `#`) has to be written with escapes. Otherwise a part of it would be
read as host or database, and be shown. What gives it away is an `@` after the host, so such a URL is refused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Final, NamedTuple
from urllib.parse import SplitResult, parse_qsl, unquote, unquote_plus, urlsplit

# Ends every error about a URL.
HIDDEN: Final = "(it is not repeated here, as it may hold a password or a token)"
_ESCAPES: Final = "in a user name, a password and an option the characters / ? # @ [ ] % are written %2F %3F %23 %40 %5B %5D %25"
_CONTROL: Final = re.compile("[\0-\x1f\x7f]")
_SECRET_OPTION: Final = re.compile("pass|pwd|token|secret|credential", re.IGNORECASE)


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
    # Texts that no message may show: the password, and options that look like one, as they are written and decoded.
    secrets: tuple[str, ...]

    def __repr__(self) -> str:
        return f"ServerUrl({self.scheme!r}, {self.hosts!r}, {self.path!r})"

    @property
    def database(self) -> str:
        """The path without its slash."""
        return self.path.removeprefix("/")


def parse_server_url(
    url: object, product: str, schemes: Collection[str], form: str, *, noun: str = "URL", strict: bool = True
) -> ServerUrl:
    """The parts of a URL that reads like `form`. Raises errors that name it by `product` and `noun`, without repeating it.

    `strict` refuses a query that is not made of `name=value`; otherwise a name alone is an option with an empty value. Of an
    option that is given twice the last one counts.
    """
    if not isinstance(url, str):
        raise TypeError(f"a {product} {noun} is text that reads {form}, not {kind_of(url)}")
    scheme, mark, _ = url.partition("://")
    if not mark or scheme.lower() not in schemes:
        raise ValueError(f"a {product} {noun} reads {form} {HIDDEN}")
    refuse_ambiguous(url, f"{product} {noun}")
    try:
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=strict and bool(parts.query)))
        return _decode(parts, options)
    except ValueError:
        raise ValueError(f"the {product} {noun} cannot be read; it reads {form}, and {_ESCAPES} {HIDDEN}") from None


def kind_of(given: object) -> str:
    """Return what this is, without showing it: it may hold a password."""
    name = type(given).__name__
    return "None" if given is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def path_text(given: object, takes: str) -> str:
    """Return a path as text. Raises `TypeError` that says what the store `takes`."""
    if not isinstance(given, str | os.PathLike):
        raise TypeError(f"{takes}, not {kind_of(given)}")
    text: str = os.fspath(given)
    return text


def check_options(given: Collection[str], known: Collection[str], product: str) -> None:
    """Raise `ValueError` for an option of a URL that the driver does not know, which would fail later or not be noticed."""
    for number, name in enumerate(given, 1):
        if name not in known:
            similar = get_close_matches(name, known, 1)
            hint = f"did you mean {similar[0]!r}?" if similar else "see the driver's documentation for those it has"
            raise ValueError(f"option {number} of the {product} URL is none that the driver knows; {hint} {HIDDEN}")


def refuse_ambiguous(url: str, what: str) -> None:
    """Raise `ValueError` for a URL that may be read in two ways: an `@` after the host, a second `?`, control characters."""
    rest = url.partition("://")[2]
    authority = re.split("[/?#]", rest, maxsplit=1)[0]
    if "@" in rest[len(authority) :] or rest.count("?") > 1 or _CONTROL.search(url):
        raise ValueError(f"the {what} can be read in two ways: {_ESCAPES} {HIDDEN}")


def _secrets(parts: SplitResult) -> tuple[str, ...]:
    written = [parts.password or ""]
    for pair in parts.query.split("&"):
        name, _, value = pair.partition("=")
        if _SECRET_OPTION.search(name):
            written.append(value)
    return tuple(dict.fromkeys(text for raw in written for text in (raw, unquote(raw), unquote_plus(raw)) if text))


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
        secrets=_secrets(parts),
    )
