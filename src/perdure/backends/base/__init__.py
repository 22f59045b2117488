"""What every store needs once: connections and their event loop, retries, group commit, leases, claims and addresses."""
