"""The values that all parts of perdure share: runs and their journal, ids, lengths of time, clocks."""
