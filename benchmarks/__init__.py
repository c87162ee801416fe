"""Benchmarks of `remat`: one script per claim, models that the tests use too."""
