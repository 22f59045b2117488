"""Measurements of perdure beside what it is built on. `make bench` prints medians and ratios of one interleaved run."""
