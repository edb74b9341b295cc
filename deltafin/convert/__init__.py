"""Conversion of checkpoints to deltafin's own store; until it exists, snapshots run in place."""
