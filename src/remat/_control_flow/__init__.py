"""Loops, branches and nested checkpoints, opened so that a policy reaches inside."""
