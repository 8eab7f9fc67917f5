"""Sixteen samples of 8,192 tokens in a browser: painted, recolored, scrolled together; and the page that holds them.

Run as `python -m benchmarks.bench_viewer_page [--rounds 5] [--n 8192]` from the project root: `--n` is the length of a
sample. Headless Chromium shows the viewer's panes and, in turn, one element for each token with an inline style and a
title, which is how simple viewers do it; every round is a fresh page. Then the group page itself is opened with sixteen
columns, from a server that answers from memory. Writes results/viewer_page.md and .json beside this file.
"""

from __future__ import annotations

import json
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from benchmarks import harness
from benchmarks.harness import Comparison, Options, Report, Times
from rollbook.inspect import serialization
from rollbook.inspect.html_export import load_assets
from rollbook.inspect.trajectory import Segment, Trajectory
from tests.browser.chrome import Chrome, Page

SAMPLES = 16
LENGTH = 8_192
ROUNDS = 5
FIRST_PAINT_MS, RECOLOR_MS, ELEMENTS = 400, 250, 40_000
"""What the page may take at most."""

WAYS = {"viewer": "panes", "elements": "one element per token"}
MEASURED = {
    "paint": "first paint",
    "recolor": "recolor",
    "scroll50": "scrolled frame, p50",
    "scroll95": "scrolled frame, p95",
}
COMPARISONS = (
    Comparison("first paint", "first paint, panes", "first paint, one element per token"),
    Comparison("recolor", "recolor, panes", "recolor, one element per token"),
    Comparison("scrolled frame, p50", "scrolled frame, p50, panes", "scrolled frame, p50, one element per token"),
    Comparison("scrolled frame, p95", "scrolled frame, p95, panes", "scrolled frame, p95, one element per token"),
)
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>panes</title>
<link rel="stylesheet" href="/static/theme.css"><link rel="stylesheet" href="/static/tokens.css">
<link rel="stylesheet" href="/bench.css"><script type="module" src="/bench.js"></script><div
  id="holder"></div></html>"""
STYLE = """#holder { display: grid; grid-template-columns: repeat(8, 1fr); height: 100vh; grid-auto-rows: 50vh; }
.bench-cell { display: flex; flex-direction: column; min-width: 0; min-height: 0;
  } .bench-cell .tk-pane { flex: 1 1 0; }
.bench-plain { white-space: pre-wrap; overflow-wrap: anywhere; padding: 6px 12px; }"""


def samples(count: int, length: int, seed: int) -> list[Trajectory]:
    """A group of long responses: words and sentences, a line's end now and then, a newline token every 30 or so."""
    dice = np.random.default_rng(seed)
    words = [
        " the",
        " area",
        " is",
        " half",
        " of",
        " 7",
        " times",
        " 12",
        ",",
        " so",
        " we",
        " get",
        " wait",
        " let",
        " me",
    ]
    words += [" check", " that", " again", ".", " triangle", " side", " height", " because", "\n", " number", " answer"]
    pieces = np.array(words)
    prompt = ["What", " is", " it", "?", "\n"]
    trajectories = []
    for run in range(count):
        chosen = dice.integers(0, len(words), length)
        chosen[:40] = np.arange(40) % 7  # All begin alike.
        text = prompt + pieces[chosen].tolist()
        ends = np.cumsum([len(piece) for piece in text])
        mask = np.arange(len(text)) >= len(prompt)
        entropy = np.where(mask, dice.gamma(0.5, 0.8, len(text)), np.nan).astype(np.float32)
        mismatch = np.where(mask, dice.normal(0, 0.08, len(text)), np.nan).astype(np.float32)
        trajectories.append(
            Trajectory(
                uid=f"1/0/{run}/0/s",
                gid="1/0",
                step=1,
                task="0",
                run=run,
                prompt="0" * 16,
                text="".join(text),
                ends=ends,
                ids=np.concatenate([np.arange(len(prompt)) + 1000, chosen]),
                prompt_tokens=len(prompt),
                mask=mask,
                arrays={"entropy": entropy, "mismatch": mismatch},
                reward=float(run % 2),
                status="finished",
                segments=[
                    Segment("user", "text", "", 0, len(prompt), False, 0),
                    Segment("assistant", "text", "", len(prompt), len(text), True, 0),
                ],
            )
        )
    return trajectories  # fmt: skip


def answers(trajectories: list[Trajectory]) -> dict[str, Any]:
    """What the group page asks for, from memory."""
    rows = [
        {
            "uid": trajectory.uid, "gid": trajectory.gid, "step": 1, "task": "0", "run": trajectory.run, "turn": 0,
            "reward": trajectory.reward, "scored": 1,
            "parts": {"accuracy": trajectory.reward}, "advantage": None,
            "response_tokens": trajectory.tokens - trajectory.prompt_tokens,
            "entropy": 0.4, "kl_max": None, "mismatch_max": 0.3, "status": trajectory.status, "loop_at": None,
            "nans": 0, "lag": 0,
            "state": "", "removed_reason": None, "group_size": len(trajectories), "evaluation": 0,
        }
        for trajectory in trajectories
    ]  # fmt: skip
    scales = (
        {"kind": "sequential", "low": 0, "high": 2.5, "middle": None},
        {"kind": "diverging", "low": -0.3, "high": 0.3, "middle": 0},
    )
    lenses = [
        {"id": "entropy", "key": "1", "label": "Entropy", "help": "", "scale": scales[0]},
        {"id": "mismatch", "key": "3", "label": "Mismatch", "help": "", "scale": scales[1]},
    ]
    return {
        "/api/run": {
            "name": "bench", "kind": "book", "live": False, "records": len(trajectories), "evaluation": 0, "groups": 1,
            "steps": {"first": 1, "last": 1, "count": 1}, "tokenized": "exact", "lenses": lenses, "columns": [],
            "parts": [],
            "features": {}, "progress": {"measured": 1, "total": 1, "searchable": 1}, "cursor": 1, "version": "0",
        },
        "/api/group": {
            "gid": "1/0", "step": 1, "task": "0", "prompt": "0" * 16, "opening": "What is it?", "label": None,
            "reference": None,
            "evaluation": False, "previous": None, "next": None, "timeline": [], "rows": rows,
        },
    }  # fmt: skip


@contextmanager
def served(trajectories: list[Trajectory]) -> Iterator[str]:
    """The address of a server that has the viewer's files, this benchmark's page, the frame and the answers."""
    files: dict[str, tuple[bytes, str]] = {
        f"/static/{name}": (file.content, file.type) for name, file in load_assets().items()
    }
    frame = serialization.encode(trajectories)
    files |= {
        "/": files["/static/index.html"],
        "/bench.html": (PAGE.encode(), "text/html"),
        "/bench.css": (STYLE.encode(), "text/css"),
        "/bench.js": (Path(__file__).with_name("viewer_page.js").read_bytes(), "text/javascript"),
        "/frame": (frame, "application/octet-stream"),
        "/api/frame": (frame, "application/octet-stream"),
    }
    files |= {path: (json.dumps(answer).encode(), "application/json") for path, answer in answers(trajectories).items()}

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing is logged."""

        def do_GET(self) -> None:
            body, kind = files.get(urlsplit(self.path).path, (b"{}", "application/json"))
            self.send_response(200 if urlsplit(self.path).path in files else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    class Listener(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """A tab that is closed hangs up: nothing to say."""

    server = Listener(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def group_page(page: Page, address: str) -> dict[str, float]:
    """The group page with a column for each sample: opened from another page of the same app, recolored by key."""
    page.goto(f"{address}/#/nowhere")
    page.wait("!!document.querySelector('.failure')")
    measured: dict[str, float] = page.eval(
        """(async () => {
        const painted = () => new Promise((done) => requestAnimationFrame(() => {
          const c = new MessageChannel(); c.port1.onmessage = () => done(); c.port2.postMessage(null); }));
        const pause = (ms) => new Promise((done) => setTimeout(done, ms));
        let start = performance.now();
        history.pushState(null, "", "#/group/1%2F0?cols=16"); dispatchEvent(new PopStateEvent("popstate"));
        while (document.querySelectorAll(".gp-column .tk-chunk").length < 16) await new Promise(requestAnimationFrame);
        await painted();
        const open = performance.now() - start;
        await pause(700);
        const elements = document.querySelectorAll("*").length;
        start = performance.now();
        document.dispatchEvent(new KeyboardEvent("keydown", { key: "3", bubbles: true }));
        await painted();
        const recolor = performance.now() - start;
        await pause(300);
        const pane = document.querySelector(".gp-column .tk-pane");
        pane.dispatchEvent(new WheelEvent("wheel", { bubbles: true }));
        const frames = []; let last = performance.now();
        for (let i = 0; i < 60; i += 1) { pane.scrollTop += 45; await new Promise(requestAnimationFrame);
          const now = performance.now(); frames.push(now - last); last = now; }
        frames.sort((a, b) => a - b);
        return { open, recolor, scroll50: frames[30], scroll95: frames[57], elements };
        })()"""
    )
    return measured


def run(options: Options) -> Report:
    """Both ways in turn, then the group page."""
    length = LENGTH if options.n == 4096 else options.n
    rounds = options.rounds or ROUNDS
    trajectories = samples(SAMPLES, length, options.seed)
    times = Times()
    elements: dict[str, list[int]] = {way: [] for way in WAYS}
    pages: list[dict[str, float]] = []
    with served(trajectories) as address, Chrome() as chrome:
        for round in range(rounds + 1):
            for way in sorted(WAYS, reverse=round % 2 == 0):
                page = chrome.page()
                page.goto(f"{address}/bench.html")
                page.wait("!!window.benchRound")
                measured = page.eval(f"benchRound({json.dumps(way)})")
                page.close()
                if round == 0:
                    continue  # Everything is warmed up once.
                elements[way].append(measured["elements"])
                for key, label in MEASURED.items():
                    times.seconds.setdefault(f"{label}, {WAYS[way]}", []).append(measured[key] / 1e3)
            page = chrome.page()
            measured = group_page(page, address)
            page.close()
            if round:
                pages.append(measured)
    middle = {key: statistics.median(page[key] for page in pages) for key in pages[0]}
    first = times.median_ms("first paint, panes")
    recolor = times.median_ms("recolor, panes")
    within = first < FIRST_PAINT_MS and recolor < RECOLOR_MS and max(elements["viewer"]) < ELEMENTS
    verdict = "met" if within else "MISSED"
    facts = {
        "samples": SAMPLES,
        "tokens each": length,
        "rounds": rounds,
        "elements, panes": max(elements["viewer"]),
        "elements, one element per token": max(elements["elements"]),
        f"paint under {FIRST_PAINT_MS} ms, recolor under {RECOLOR_MS} ms, under {ELEMENTS:,} elements": verdict,
        "group page of 16 columns, request to painted, ms": round_half(middle["open"]),
        "recolored by key, ms": round_half(middle["recolor"]),
        "scrolled together, p50 and p95 ms": f"{middle['scroll50']:.0f} and {middle['scroll95']:.0f}",
        "elements of the page": int(middle["elements"]),
    }
    return Report(
        "Tokens in a browser",
        facts,
        times,
        [times.compare(comparison) for comparison in COMPARISONS if comparison.ours in times.seconds],
    )


def round_half(value: float) -> float:
    """A number of milliseconds to print."""
    return round(value * 2) / 2


def main() -> None:
    """Print the report, and keep it beside the others."""
    report = run(harness.parse(__doc__))
    print(report.markdown())
    folder = Path(__file__).with_name("results")
    (folder / "viewer_page.md").write_text(report.markdown())
    written = {"environment": harness.environment(), "reports": [report.plain()]}
    (folder / "viewer_page.json").write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
