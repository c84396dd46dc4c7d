"""One short file a peer: each trains the same workload through its own library."""
