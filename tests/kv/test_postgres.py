from perdure.testing.keyvalue import key_value_tests
from tests.kv.places import PostgresPlace

test_key_values = key_value_tests(PostgresPlace)
