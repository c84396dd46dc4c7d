"""What is on disk: models and adapters, read and written."""
