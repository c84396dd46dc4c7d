"""One short file a method: which batches, which loss, which metrics."""
