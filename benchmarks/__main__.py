"""Every benchmark, one after the other: `python -m benchmarks [options]` from the project root."""

from benchmarks import bench_bytes, bench_hf, harness

if __name__ == "__main__":
    harness.main(bench_bytes.run, bench_hf.run)
