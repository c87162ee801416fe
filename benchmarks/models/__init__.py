"""Models in plain JAX, measured by the benchmarks and, smaller, by the tests."""
