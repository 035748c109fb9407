"""Measurements of torch-anderson; each module prints one table: `python -m experiments.benchmarks.<name>`."""
