"""Arithmetic over a model, a machine and a layout: memory, bytes moved and time of a step. Torch-free."""
