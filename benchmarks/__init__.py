"""Benchmarks: each peer and each bound beside Rollbook, in one run."""
