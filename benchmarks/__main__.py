"""Every benchmark, one after the other: `python -m benchmarks [options]` from the project root."""

from benchmarks import (
    bench_batches,
    bench_book,
    bench_bytes,
    bench_estimators,
    bench_hf,
    bench_plans,
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
