"""Throw-away servers for tests: each on a free loopback port, with a directory of its own, stopped by its process id."""
