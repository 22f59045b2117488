"""All constructs: they register themselves when their modules are imported."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Final

from tests.fuzz import aimed, anyio_scopes, durable, own_io, plain_asyncio

MODULES: Final = (aimed, anyio_scopes, durable, own_io, plain_asyncio)


def prepare() -> None:
    """Make what bodies use repeatable, where a library is not."""
    if find_spec("anyio") is not None:
        anyio_scopes.keep_scopes_in_order()
