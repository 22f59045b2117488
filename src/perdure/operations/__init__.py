"""What an operator asks of a fleet: describe, select, check, fork and change runs, and whether a runtime is well."""
