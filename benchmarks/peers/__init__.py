"""One short file a peer: each trains the same workload, or quantizes the same model (`quantize_*`)."""
