"""Solvers: schedules of a program within a memory budget, and bounds on them all."""
