"""Stores that a user wrote, driven like every other."""
