"""Driving a run: replay, keyed calls, records, streams, and what listeners hear of it."""
