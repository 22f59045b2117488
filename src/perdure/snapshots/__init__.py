"""A run as plain JSON: writing it, reading it without trusting it, and starting a run from it."""
