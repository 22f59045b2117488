"""Runs in this process's memory."""
