from __future__ import annotations

import os
from types import ModuleType

import pytest

from tests.servers import libsql, mongo, mysql, postgres


@pytest.mark.parametrize("server", [libsql, mongo, mysql, postgres], ids=lambda server: server.__name__)
def test_the_server_is_ours_unless_the_environment_names_one(server: ModuleType) -> None:
    assert server.shared_server().is_ours == (server.VARIABLE not in os.environ)
