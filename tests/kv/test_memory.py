from perdure.testing.keyvalue import key_value_tests
from tests.kv.places import MemoryPlace

test_key_values = key_value_tests(MemoryPlace)
