"""Quantized models: calibration layer by layer, GPTQ, AWQ, rounding, FP8, and what they cost."""
