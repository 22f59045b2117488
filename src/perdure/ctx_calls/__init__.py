"""The calls of a body: steps and transactions, waits, fan-out and children; and the work that is left when it has ended."""
