"""The contract over S3, with compare-and-swap and several processes. By `make chaos` only: it takes minutes.

The same code runs on an obstore in memory in `test_key_value`, and its processes on S3 in `tests/backends`, always.
"""

from __future__ import annotations

import secrets
from functools import cache
from typing import Any

import pytest
from obstore.store import S3Store

from perdure.backends.key_value import KeyValueRunStore
from perdure.store import STANDARD_PARTS, FullStore
from perdure.testing.contract import StoreFactory, contract_tests
from tests.servers.s3 import shared_server

pytestmark = pytest.mark.chaos

BUCKET = "perdure-contract"


@cache
def options() -> dict[str, Any]:
    """How to reach the bucket, once it is there."""
    server = shared_server()
    server.make_bucket(BUCKET)
    return server.options()


class S3Factory(StoreFactory):
    capabilities = STANDARD_PARTS | {"shared", "durable"}

    def __init__(self) -> None:
        self.options = options()
        self.folder = secrets.token_hex(8)

    async def open(self, prefix: str = "") -> FullStore:
        return KeyValueRunStore(S3Store(BUCKET, prefix=self.folder, **self.options), prefix=prefix)


test_contract = contract_tests(S3Factory)
