"""Driving a run: replay, steps, waits, records, and what listeners hear of it."""
