from __future__ import annotations

import pytest

from perdure import open_key_value_store
from perdure.errors import StoreClosed
from perdure.testing.keyvalue import key_value_tests
from tests.kv.places import MemoryPlace

test_key_values = key_value_tests(MemoryPlace)


async def test_a_store_in_memory_is_closed_like_any_other() -> None:
    kv = open_key_value_store("memory:")
    await kv.set("a", "1")
    await kv.close()
    await kv.close()
    for verb in (kv.get, kv.delete, kv.exists, kv.keys):
        with pytest.raises(StoreClosed, match="it was closed; open a new one"):
            await verb("a")
    with pytest.raises(StoreClosed, match="it was closed; open a new one"):
        await kv.set("a", "1")
