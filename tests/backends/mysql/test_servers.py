"""The servers that tests start do not disturb each other."""

from concurrent.futures import ThreadPoolExecutor

from tests.servers.mysql import MysqlServer


def test_servers_are_made_side_by_side() -> None:
    """One that starts deletes all temporary tables it finds: each needs a place of its own for them."""
    servers = [MysqlServer(own=True) for _ in range(4)]
    try:
        with ThreadPoolExecutor() as threads:
            for started in [threads.submit(server.start) for server in servers]:
                started.result()
    finally:
        for server in servers:
            server.remove()
