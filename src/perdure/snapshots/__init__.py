"""A run as plain JSON: written, read without trust, and turned into a run again."""
