"""What the calls of a body do: steps and transactions, waits, fan-out and children; and what is left to do when it has ended."""
