"""The address of a libSQL database, and the token that may be in its URL."""

from __future__ import annotations

import ipaddress
from typing import Final, NamedTuple

from perdure.backends.base.address import HIDDEN, parse_server_url

_ENCRYPTED: Final = {"libsql": True, "https": True, "wss": True, "http": False, "ws": False}
_OPTIONS: Final = frozenset({"authToken", "tls"})
_FORM: Final = "libsql://host, https://host, http://host, wss://host or ws://host"


class LibsqlAddress(NamedTuple):
    """A server, and the path of the database on it."""

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
        """The HTTP URL of the database, without a token."""
        return f"{'https' if self.is_encrypted else 'http'}://{self.authority}{self.path}"

    @property
    def is_private(self) -> bool:
        """Whether nobody on the way can read what is sent: it is encrypted, or does not leave this machine."""
        return self.is_encrypted or _is_loopback(self.host)

    @property
    def label(self) -> str:
        """How messages name the store."""
        return f"libSQL store {self.url}"


class LibsqlTarget(NamedTuple):
    """An address, and the token for it if there is one. Its representation hides the token.

    `is_plain_wanted` says that the caller has switched encryption off, and not only written `http`.
    """

    address: LibsqlAddress
    token: str | None
    is_plain_wanted: bool = False

    def check_token(self) -> None:
        """Raise `ValueError` when the token would cross a network in plain text without being asked to."""
        if self.token and not self.address.is_private and not self.is_plain_wanted:
            raise ValueError(
                f"the token would be sent to {self.address.authority} without encryption; use libsql:// or https://, or pass "
                "tls=False if all of the way there is trusted"
            )

    @property
    def secrets(self) -> tuple[str, ...]:
        """What no message may show."""
        return (self.token,) if self.token else ()

    def __repr__(self) -> str:
        return f"LibsqlTarget({self.address!r}, token={'***' if self.token else None})"


def is_remote(url: str) -> bool:
    """Whether the URL names a server, and not a file."""
    return url.partition("://")[0].lower() in _ENCRYPTED and "://" in url


def parse_url(url: str, *, tls: bool | None = None) -> LibsqlTarget:
    """The address and token in a URL. Raises `ValueError` without repeating it.

    `libsql://` is encrypted unless `tls=False` or its option `tls=0` says no.
    """
    parts = parse_server_url(url, "libSQL", _ENCRYPTED, _FORM)
    if not parts.host:
        raise ValueError(f"a libSQL URL reads {_FORM} {HIDDEN}")
    if parts.user or parts.password or parts.fragment or not parts.options.keys() <= _OPTIONS:
        raise ValueError(f"a libSQL URL has no user, password, fragment or options but authToken and tls {HIDDEN}")
    is_encrypted = _is_encrypted(parts.scheme, parts.options.get("tls"), tls=tls)
    address = LibsqlAddress(parts.host, parts.port or _default_port(is_encrypted), parts.raw_path.rstrip("/"), is_encrypted)
    is_plain_wanted = tls is False or parts.options.get("tls") == "0"
    return LibsqlTarget(address, parts.options.get("authToken") or None, is_plain_wanted)


def _is_encrypted(scheme: str, option: str | None, *, tls: bool | None) -> bool:
    if option not in {None, "0", "1"}:
        raise ValueError(f"tls in a libSQL URL must be 0 or 1, not {option!r}")
    wanted = tls if tls is not None else None if option is None else option == "1"
    if wanted is None or scheme == "libsql":
        return _ENCRYPTED[scheme] if wanted is None else wanted
    if wanted != _ENCRYPTED[scheme]:
        raise ValueError(f"tls={wanted} contradicts {scheme}://; use libsql:// or the other scheme")
    return wanted


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _default_port(is_encrypted: bool) -> int:  # noqa: FBT001 - a field, not an option
    return 443 if is_encrypted else 80
