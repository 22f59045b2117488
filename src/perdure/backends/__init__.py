"""The stores, one package each, on what they share in `base` and `sql`."""
