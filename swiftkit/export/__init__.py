"""What leaves a run: merged models, uploads, conversions, and the run's report."""
