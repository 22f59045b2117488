"""Where a libSQL server is, without the credentials in its URL."""

from __future__ import annotations

from typing import Final, NamedTuple
from urllib.parse import parse_qsl, urlsplit

_ENCRYPTED: Final = {"libsql": True, "https": True, "wss": True, "http": False, "ws": False}
_OPTIONS: Final = frozenset({"authToken", "tls"})
_UNSHOWN: Final = "(it is not repeated here, as it may hold a token)"


class LibsqlAddress(NamedTuple):
    """A server, and where on it the database is."""

    host: str
    port: int
    path: str
    is_encrypted: bool

    @property
    def authority(self) -> str:
        """Host and port as HTTP's Host header has them."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _default_port(self.is_encrypted) else f"{host}:{self.port}"

    @property
    def url(self) -> str:
        """The address of the database."""
        return f"{'https' if self.is_encrypted else 'http'}://{self.authority}{self.path}"

    @property
    def label(self) -> str:
        """For messages."""
        return f"libSQL store {self.url}"


class Address(NamedTuple):
    """What a URL says: where, and maybe the token. Shown without that."""

    place: LibsqlAddress
    token: str | None

    def __repr__(self) -> str:
        return f"Address({self.place!r}, token={'***' if self.token else None})"


def is_remote(url: str) -> bool:
    """Whether the URL names a server, and not a file."""
    return url.partition("://")[0].lower() in _ENCRYPTED and "://" in url


def address_of(url: str, *, tls: bool | None = None) -> Address:
    """Where the URL leads; `libsql://` is encrypted unless `tls` or its option `tls=0` says no. Raises `ValueError`."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
        options = dict(parse_qsl(parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)))
    except ValueError:
        raise ValueError(f"the libSQL URL cannot be read {_UNSHOWN}") from None
    if parts.scheme not in _ENCRYPTED or not host:
        raise ValueError(f"a libSQL URL is libsql://host, https://host, http://host, wss://host or ws://host {_UNSHOWN}")
    if parts.username or parts.password or parts.fragment or not options.keys() <= _OPTIONS:
        raise ValueError(f"a libSQL URL has no user, password, fragment or options but authToken and tls {_UNSHOWN}")
    is_encrypted = _is_encrypted(parts.scheme, options.get("tls"), tls=tls)
    place = LibsqlAddress(host, port or _default_port(is_encrypted), parts.path.rstrip("/"), is_encrypted)
    return Address(place, options.get("authToken") or None)


def _is_encrypted(scheme: str, option: str | None, *, tls: bool | None) -> bool:
    if option not in {None, "0", "1"}:
        raise ValueError(f"tls in a libSQL URL must be 0 or 1, not {option!r}")
    wanted = tls if tls is not None else None if option is None else option == "1"
    if wanted is None or scheme == "libsql":
        return _ENCRYPTED[scheme] if wanted is None else wanted
    if wanted != _ENCRYPTED[scheme]:
        raise ValueError(f"tls={wanted} contradicts {scheme}://; use libsql:// or the other scheme")
    return wanted


def _default_port(is_encrypted: bool) -> int:  # noqa: FBT001 - a field, not an option
    return 443 if is_encrypted else 80
