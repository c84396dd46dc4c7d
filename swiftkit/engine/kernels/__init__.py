"""Kernels of the fused layer: each file has a public function, its plain torch reference, and beside it
(`*_triton.py`) the Triton kernel of the same signature, which is loaded on a GPU only."""
