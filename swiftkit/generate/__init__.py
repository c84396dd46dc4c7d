"""KV cache by slots, sampling, decoding, and conversations."""
