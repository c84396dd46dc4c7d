"""Meshes, shards and their collectives, launching."""
