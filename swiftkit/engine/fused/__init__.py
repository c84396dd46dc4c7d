"""The decoder layer of the Llama shape with a hand-written backward: see `layer.FusedLlamaLayer`."""
