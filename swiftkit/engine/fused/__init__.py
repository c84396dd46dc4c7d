"""The decoder layer of the Llama shape with hand-written forward and backward: see `layer.FusedLlamaLayer`."""
