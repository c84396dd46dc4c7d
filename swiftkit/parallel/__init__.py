"""Several processes: meshes, shards and their collectives, launching; the doctor; job files."""
