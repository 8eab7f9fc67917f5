"""Every benchmark, one after the other: `python -m benchmarks [options]` from the project root."""

import tempfile

from benchmarks import (
    bench_batches,
    bench_book,
    bench_bytes,
    bench_capacity,
    bench_estimators,
    bench_hf,
    bench_overlap,
    bench_plans,
    bench_ray,
    bench_saver,
    bench_tokens,
    bench_viewer_page,
    harness,
)

if __name__ == "__main__":
    harness.main(
        bench_bytes.run,
        bench_hf.run,
        bench_batches.run,
        bench_plans.run,
        bench_estimators.run,
        bench_tokens.run,
        bench_book.run,
        bench_saver.run,
        bench_viewer_page.run,
    )
    # These have pages of their own in `results`, which this run leaves as they are.
    with tempfile.TemporaryDirectory(prefix="rollbook-bench-") as out:
        for benchmark in (bench_ray, bench_capacity, bench_overlap):
            benchmark.main(["--out", out])
