"""Several GPUs and several nodes: what a machine has, what its links give, and job files for clusters."""
