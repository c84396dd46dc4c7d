"""The one training loop, optimizer and schedule, checkpoints, logging, plots, the run folder."""
