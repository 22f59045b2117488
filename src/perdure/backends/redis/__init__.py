"""Runs in Redis or Valkey: every verb one Lua script on one server, or on one slot of a cluster."""

from __future__ import annotations

from perdure.backends.redis.store import RedisStore

__all__ = ["RedisStore"]
