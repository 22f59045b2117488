"""A fuzzer of workflow functions: random programs, run through crashes, by perdure's public API alone.

`programs` makes a tree of constructs from a seed, `constructs` and its neighbours run such a tree as a workflow function that
writes a trace, `process` is one life of a process that drives it, `trial` is one program through several lives, `judge` says what
was wrong with that, and `campaign` runs many programs side by side: `python -m tests.fuzz 0 1000`.

What must hold: the trace of an attempt is a prefix of every later one; no recorded step's function runs again; no run is stopped
by a divergence; nothing is stuck; nothing is left behind; signals are taken in order, none is lost and none is taken twice;
compensations run as the journal says.
"""
