"""Measurements of perdure beside its peers and what it is built on: `make bench`, described in docs/benchmarks.md.

A *workload* has *sides*: the same *work* done by several *contenders*. Every contender is a process of its own that gets orders
through a pipe, and every round goes through all sides in turn. What comes back are *samples*; *bars* are what their ratios have
to reach.
"""
