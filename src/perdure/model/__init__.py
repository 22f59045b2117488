"""The values that all parts of perdure share: runs and their journal, lengths of time, clocks."""
