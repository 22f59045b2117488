from perdure.testing.keyvalue import key_value_tests
from tests.kv.places import MongoPlace

test_key_values = key_value_tests(MongoPlace)
