"""How the contract's names and payloads travel: as text, or payloads as bytes."""

from __future__ import annotations

import base64
from typing import Any, Final, Protocol

# What begins a text that holds bytes which are no text. A payload that begins like this is written that way too.
MARK: Final = "base64:"


class Values(Protocol):
    """What a database is given for names (`str`) and payloads (`bytes`), and what is made of what it gives back."""

    # Stands in the database, so that a store of another kind does not misread the payloads.
    kind: int
    # Whether the driver gives back exactly what was written: `str`, `int`, `bytes` and None.
    is_exact: bool

    def __hash__(self) -> int: ...
    def name(self, text: str) -> Any: ...
    def name_from(self, value: Any) -> str: ...
    def payload(self, payload: bytes) -> Any: ...
    def payload_from(self, value: Any) -> bytes: ...


class TextValues:
    """Everything is text. A payload is usually JSON and stays readable."""

    kind = 1
    is_exact = False

    def name(self, text: str) -> Any:
        """As it is."""
        return text

    def name_from(self, value: Any) -> str:
        """Binary columns give bytes."""
        return value if isinstance(value, str) else bytes(value).decode()

    def payload(self, payload: bytes) -> Any:
        """As it is if it is text without NUL, which PostgreSQL does not take; otherwise in base 64."""
        try:
            text = payload.decode()
        except UnicodeDecodeError:
            text = MARK
        if text.startswith(MARK) or "\0" in text:
            return MARK + base64.b64encode(payload).decode()
        return text

    def payload_from(self, value: Any) -> bytes:
        """What `payload` was given."""
        text = self.name_from(value)
        if text.startswith(MARK):
            return base64.b64decode(text.removeprefix(MARK), validate=True)
        return text.encode()


class BytesValues(TextValues):
    """Names are text, payloads are bytes as they are."""

    kind = 2

    def payload(self, payload: bytes) -> Any:
        return payload

    def payload_from(self, value: Any) -> bytes:
        return value.encode() if isinstance(value, str) else bytes(value)


class ExactValues(BytesValues):
    """Names are text and payloads are bytes, in the database and as the driver gives them back."""

    is_exact = True

    def name_from(self, value: Any) -> str:
        return value  # type: ignore[no-any-return]

    def payload_from(self, value: Any) -> bytes:
        return value  # type: ignore[no-any-return]


TEXT: Final[Values] = TextValues()
BYTES: Final[Values] = BytesValues()
EXACT: Final[Values] = ExactValues()
