"""A child process that searches an index's texts for a regular expression, and can be killed.

Run as a file with only the standard library. Standard input is one JSON object, {"path", "pattern", "also" (patterns
that must match too), "flags", "step", "limit", "context", "seconds"}; the output is one line of JSON per match, and a
summary at the end.

Invariant: texts are only read, and the first match of each text is reported.
"""

from __future__ import annotations

import json
import re
import sqlite3
import sys
import time
import zlib
from collections.abc import Iterator
from typing import Any

_RESPONSES = (
    "SELECT samples.n, 'response', bodies.body FROM samples JOIN bodies ON bodies.n = samples.n {where} "
    "ORDER BY samples.step DESC, samples.n"
)
_PROMPTS = (
    "SELECT MIN(samples.n), 'prompt', prompt_bodies.body FROM prompt_bodies "
    "JOIN samples ON samples.prompt = prompt_bodies.prompt {where} "
    "GROUP BY samples.gid ORDER BY samples.step DESC"
)


def matches(job: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield each match as {n, field, before, match, after}, then {total}, `None` if counting ran out of time; only
    {error} for an invalid pattern.
    """
    try:
        # Compiled here, where it can be killed: a short pattern can take minutes to compile.
        pattern, *also = (re.compile(expression, job["flags"]) for expression in (job["pattern"], *job["also"]))
    except (re.error, OverflowError, RecursionError) as error:
        yield {"error": str(error)}
        return
    condition = "WHERE (samples.removed_reason IS NULL OR samples.removed_reason NOT IN ('deleted', 'rewound'))"
    values: list[Any] = []
    if job["step"] is not None:
        condition, values = f"{condition} AND samples.step = ?", [job["step"]]
    end = time.monotonic() + job["seconds"]
    context, yielded, total = job["context"], 0, 0
    connection = sqlite3.connect(f"{job['path']}?mode=ro", uri=True)
    last: tuple[bytes, Any] = (b"", None)  # groups of one prompt are consecutive
    for sql in (_RESPONSES, _PROMPTS):
        for n, field, body in connection.execute(sql.format(where=condition), values):
            if body == last[0]:
                text, match = last[1]
            else:
                text = zlib.decompress(body).decode("utf-8", "surrogatepass")
                match = next(
                    (expression for expression in pattern.finditer(text) if expression.end() > expression.start()), None
                )
                if not all(expression.search(text) for expression in also):
                    match = None
                last = (body, (text, match))
            if match is None:
                continue
            total += 1
            if yielded < job["limit"]:
                yielded += 1
                start, stop = match.span()
                shown = min(stop, start + 4 * context)
                yield {
                    "n": n,
                    "field": field,
                    "before": text[max(0, start - context) : start],
                    "match": text[start:shown],
                    "after": text[stop : stop + context] if shown == stop else text[shown : shown + context],
                }
            elif time.monotonic() > end:
                yield {"total": None}
                return
    yield {"total": total}


def main() -> None:
    """Answer the request on standard input."""
    job = json.loads(sys.stdin.readline())
    try:
        import resource

        # Ends the process if the parent has died.
        resource.setrlimit(resource.RLIMIT_CPU, (int(job["seconds"]) + 5, int(job["seconds"]) + 6))
    except (ImportError, OSError, ValueError):
        pass
    for match in matches(job):
        sys.stdout.write(json.dumps(match) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
