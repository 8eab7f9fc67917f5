"""Single-file HTML: what is in it, what is not, and that nothing in it can break out, phone home or be read through a
redaction. That browsers show it is tested with browsers."""

from __future__ import annotations

import base64
import gzip
import hashlib
import html
import json
import re
import socket
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rollbook
from rollbook import EID, Experience
from rollbook.inspect.answers import Answers
from rollbook.inspect.html_export import (
    MAX_TRAJECTORIES,
    ExportResult,
    as_iframe,
    export_html,
    response_key,
    write_html,
)
from rollbook.inspect.index import Index
from rollbook.inspect.serialization import decode
from rollbook.inspect.server import Server
from rollbook.inspect.sources import Source, load, open_source
from tests.viewer import story
from tests.viewer.asking import SECONDS, ask, post

Run = tuple[Source, Answers]


def opened(path: str) -> Iterator[Run]:
    source, index = open_source(path), Index()
    load(source, index)
    yield source, Answers(source, index)
    source.close()
    index.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return story.make(tmp_path_factory.mktemp("a-folder-of-this-machine") / "book", steps=6, evaluate=False)


@pytest.fixture(scope="module")
def run(path: str) -> Iterator[Run]:
    yield from opened(path)


@pytest.fixture(scope="module")
def rows(run: Run) -> list[dict[str, Any]]:
    return list(run[1].list(view="samples", limit=400)["rows"])


class Page(HTMLParser):
    """The elements of a file, in order: (tag, attributes, text)."""

    def __init__(self, content: bytes) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.inside = False
        self.feed(content.decode())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), ""))
        self.inside = True

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            tag, attributes, text = self.elements.pop()
            self.elements.append((tag, attributes, text + data))


def payload(content: bytes) -> dict[str, Any]:
    packed = next(text for tag, attributes, text in Page(content).elements if attributes.get("id") == "bundle")
    return dict(json.loads(gzip.decompress(base64.b64decode(packed, validate=True)), parse_constant=_refuse))


def _refuse(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


def frames(content: bytes) -> list[dict[str, Any]]:
    return decode(base64.b64decode(payload(content)["frame"]))


def everything(content: bytes) -> str:
    """All text of a file: what is packed, unpacked."""
    bundle = payload(content)
    shown = [json.dumps({**bundle, "frame": ""}, ensure_ascii=False)]
    for frame in frames(content):
        shown += [
            frame["text"],
            json.dumps({k: v for k, v in frame.items() if isinstance(v, (str, list, dict))}, default=str),
        ]
    return re.sub(r'id="bundle">[^<]*', "", content.decode()) + "\n".join(shown)


def test_a_sample_a_group_and_a_query_open_where_they_should(run: Run, rows: list[dict[str, Any]]) -> None:
    uid, gid = rows[0]["uid"], rows[0]["gid"]
    single = export_html(*run, uids=[uid])
    bundle = payload(single.content)
    assert bundle["start"] == "#/t/" + uid.replace("/", "%2F") and [
        frame["uid"] for frame in frames(single.content)
    ] == [uid]
    assert (single.trajectories, single.redactions, single.size) == (1, 0, len(single.content))
    group = export_html(*run, gid=gid)
    bundle = payload(group.content)
    assert bundle["start"] == "#/group/" + gid.replace("/", "%2F") and group.trajectories == 8
    assert [row["uid"] for row in bundle["responses"][response_key("/api/group", gid=gid)]["rows"]] == [
        frame["uid"] for frame in frames(group.content)
    ]
    queried = export_html(*run, filter="step = 3 and reward > 0.5")
    bundle = payload(queried.content)
    expected = [row["uid"] for row in run[1].list(view="samples", filter="step = 3 and reward > 0.5")["rows"]]
    assert bundle["start"] == "#/samples" and [frame["uid"] for frame in frames(queried.content)] == expected
    assert [row["uid"] for row in bundle["responses"]["/api/list?view=samples"]["rows"]] == expected
    assert {row["gid"] for row in bundle["responses"]["/api/list?view=groups"]["rows"]} == {
        frame["gid"] for frame in frames(queried.content)
    }


def test_what_the_pages_of_it_ask_is_in_it_and_speaks_of_nothing_else(run: Run, rows: list[dict[str, Any]]) -> None:
    gid = rows[0]["gid"]
    responses = payload(export_html(*run, gid=gid).content)["responses"]
    uids = [row["uid"] for row in responses[response_key("/api/group", gid=gid)]["rows"]]
    for uid in uids:
        neighbors = responses[response_key("/api/neighbors", uid=uid)]
        assert neighbors["row"]["uid"] == uid
        assert {neighbors[name] for name in ("previous", "next", "previous_group", "next_group")} <= {*uids, None}
        assert responses[response_key("/api/record", uid=uid)]["uid"] == uid
    run_answer = responses["/api/run"]
    assert (
        run_answer["live"] is False
        and not any(run_answer["features"].values())
        and run_answer["lenses"]
        and run_answer["columns"]
    )
    assert not any("/api/history" in key for key in responses), "who trained on it, and where, stays at home"


def test_values_are_the_records_in_half_precision(run: Run, rows: list[dict[str, Any]]) -> None:
    (trajectory,) = run[0].trajectories([rows[0]["uid"]])
    (frame,) = frames(export_html(*run, uids=[rows[0]["uid"]]).content)
    assert frame["text"] == trajectory.text and frame["ids"].tolist() == trajectory.ids.tolist()
    assert set(frame["arrays"]) == set(trajectory.arrays)
    for name, array in trajectory.arrays.items():
        assert np.allclose(frame["arrays"][name], array, rtol=1e-3, atol=1e-4, equal_nan=True), name
    (two_lenses,) = frames(export_html(*run, uids=[rows[0]["uid"]], fields=["entropy", "logprob"]).content)
    assert set(two_lenses["arrays"]) == {"entropy", "logprob"}


def test_point_11_the_policy_comes_first_and_lets_only_this_script_run(run: Run, rows: list[dict[str, Any]]) -> None:
    elements = Page(export_html(*run, uids=[rows[0]["uid"]]).content).elements
    tags = [tag for tag, _, _ in elements]
    assert tags[:3] == ["html", "head", "meta"]
    assert elements[2][1]["http-equiv"] == "Content-Security-Policy"
    policy = dict(part.strip().split(" ", 1) for part in str(elements[2][1]["content"]).split(";"))
    assert policy["default-src"] == "'none'" and policy["img-src"] == "data: blob:"
    assert policy["base-uri"] == policy["form-action"] == "'none'"
    assert "connect-src" not in policy and "'unsafe-inline'" not in str(policy)
    scripts = [(attributes, text) for tag, attributes, text in elements if tag == "script"]
    assert [attributes.get("type") for attributes, _ in scripts] == ["application/octet-stream", "module"]
    for source, texts in [
        ("script-src", [scripts[1][1]]),
        ("style-src", [t for tag, _, t in elements if tag == "style"]),
    ]:
        hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in texts]
        assert policy[source].split() == hashes
    assert ("robots", "noindex") in [
        (attributes.get("name"), attributes.get("content")) for _, attributes, _ in elements
    ]
    assert not any(name in attributes for _, attributes, _ in elements for name in ("src", "href", "onload", "action"))
    assert set(tags) <= {"html", "head", "meta", "title", "style", "body", "noscript", "script"}


def test_point_1_no_text_of_a_record_can_end_its_element(run: Run, rows: list[dict[str, Any]]) -> None:
    hostile = next(row for row in rows if "__pwn" in run[0].trajectories([row["uid"]])[0].text)
    title = '</title><script>window.__pwn=4</script><meta http-equiv="refresh" content="0;url=http://evil.example">'
    export = export_html(*run, uids=[hostile["uid"]], title=title)
    elements = Page(export.content).elements
    assert len([tag for tag, _, _ in elements if tag == "script"]) == 2
    assert next(text for tag, _, text in elements if tag == "title").strip() == title
    assert b"<script>window.__pwn" not in export.content and b"__pwn=1" not in export.content.partition(b"<script")[0]
    assert story.HOSTILE[:40] in frames(export.content)[0]["text"], "and nothing of it is lost"
    packed = next(text for tag, attributes, text in elements if attributes.get("id") == "bundle")
    assert re.fullmatch(r"[A-Za-z0-9+/=]+", packed)


def test_point_11_nothing_of_this_machine_is_in_it(run: Run, path: str, rows: list[dict[str, Any]]) -> None:
    content = export_html(*run, gid=rows[0]["gid"]).content
    for word in (str(Path(path).parent), "a-folder-of-this-machine", "ledger.sqlite", str(Path.home())):
        assert word not in everything(content), word
    bundle = json.dumps({**payload(content), "frame": "", "media": ""})
    assert not re.search(rf"\b{re.escape(socket.gethostname())}\b", bundle)
    assert not re.search(r"https?://(?!www\.w3\.org)", everything(content))


def test_point_11_images_are_inside_or_left_out(run: Run, rows: list[dict[str, Any]]) -> None:
    seen = next(row for row in rows if row["images"])
    export = export_html(*run, uids=[seen["uid"]])
    bundle = payload(export.content)
    (picture,) = frames(export.content)[0]["pictures"]
    assert export.images == 1 and bundle["media"][picture["sha256"]].startswith("data:image/png;base64,iVBOR")
    without = export_html(*run, uids=[seen["uid"]], images=False)
    assert without.images == 0 and payload(without.content)["media"] == {}
    assert "iVBOR" not in everything(without.content)


SECRET = r"Let me [a-z]+|We need the total"


def test_point_11_what_is_redacted_is_nowhere_and_keeps_its_place(run: Run, rows: list[dict[str, Any]]) -> None:
    gid = next(row["gid"] for row in rows if row["images"])
    plain = export_html(*run, gid=gid)
    names = r"(Ana|Bo|Chen|Dara|Eli|Fatou|Gus|Hana|Ivo|Juno) buys"
    export = export_html(*run, gid=gid, redact=[SECRET, names])
    assert export.redactions > 0
    assert re.search(SECRET, everything(plain.content)) and re.search(names, everything(plain.content))
    assert not re.search(SECRET, everything(export.content)) and not re.search(names, everything(export.content))
    for before, after in zip(frames(plain.content), frames(export.content), strict=True):
        assert after["text"] == re.sub(f"{SECRET}|{names}", lambda match: "█" * len(match[0]), before["text"])
        assert after["ends"].tolist() == before["ends"].tolist()
        assert after["ids"] is None, "ids would tell"
        assert any("redacted" in note for note in after["notes"])
    bundle = payload(export.content)
    assert "█" in bundle["responses"][response_key("/api/group", gid=gid)]["opening"]
    for key, answer in bundle["responses"].items():
        if key.startswith("/api/record"):
            assert not isinstance(answer["tokens"], list)
    # Words of ours stay, so that the pages work.
    assert {segment[0] for frame in frames(export.content) for segment in frame["segments"]} <= {
        "system", "user", "assistant", "tool", "text"
    }  # fmt: skip


def test_point_11_a_redaction_reaches_ids_names_and_keys(tmp_path: Path) -> None:
    secret = "jane@example.com"
    with rollbook.open(tmp_path / "book", tokenizer=story.tokenizer()) as book:
        for number in range(2):
            ids = story.tokenizer().encode(f"write to {secret} and to {secret}").ids
            book.append(
                Experience(
                    eid=EID(batch=1, task=f"mail/{secret}", run=number, suffix="s"),
                    tokens=ids,
                    prompt_length=3,
                    reward=1.0,
                    prompt_text="write to",
                    response_text=f"{secret} and to {secret}",
                    messages=[{"role": "user", "content": [{"type": "text", "text": secret}], "name": secret}],
                    tools=[{"type": "function", "function": {"name": secret}}],
                    info={secret: {"deep": [secret, {"deeper": secret}]}, "ids": ids, "reference": secret},
                    metrics={secret: 1.0},
                    group_size=2,
                )
            )
    for source, answers in opened(str(tmp_path / "book")):
        gid = answers.list(view="groups")["rows"][0]["gid"]
        assert secret in everything(export_html(source, answers, gid=gid).content)
        export = export_html(source, answers, gid=gid, redact=r"\bjane@\w+\.\w+", title="two mails")
        shown = everything(export.content)
        assert secret not in shown and "jane" not in shown and "example.com" not in shown
        bundle = payload(export.content)
        # The id has mail%2Fjane, in which no word begins with jane: as it was written, one does.
        masked = gid.replace("%2F", "/").replace(secret, "█" * len(secret))
        assert bundle["responses"][response_key("/api/group", gid=masked)]["gid"] == masked
        assert frames(export.content)[0]["gid"] == masked
        with pytest.raises(ValueError, match="would be equal"):
            export_html(source, answers, gid=gid, redact=".")


def test_point_11_a_redaction_reaches_numbers_and_every_list_of_ids(tmp_path: Path) -> None:
    vocabulary = story.tokenizer()
    ids = vocabulary.encode("call 5550199").ids
    with rollbook.open(tmp_path / "book", tokenizer=vocabulary) as book:
        book.append(
            Experience(
                eid=EID(batch=1, task=5550199, suffix="s"),
                tokens=ids,
                prompt_length=1,
                reward=0.25,
                truncate_status="of 5550199",
                info={
                    "phone": 5550199,
                    "cents": 5550199.25,
                    "few": ids[:3],
                    "in": [[i] for i in ids],
                    "as": [*map(float, ids)],
                },
                metrics={"accuracy": 0.5},
            )
        )
    for source, answers in opened(str(tmp_path / "book")):
        (row,) = answers.list(view="samples")["rows"]
        assert "5550199" in everything(export_html(source, answers, uids=[row["uid"]]).content)
        export = export_html(source, answers, uids=[row["uid"]], redact=r"\d{7}")
        shown = everything(export.content)
        assert "5550199" not in shown
        (frame,) = frames(export.content)
        assert frame["info"]["phone"] == "█" * 7 and frame["info"]["cents"] == "█" * 7 + ".25"
        for name in ("few", "in", "as"):
            assert "could be token ids" in frame["info"][name]
        assert (frame["reward"], frame["metrics"]) == (0.25, {"accuracy": 0.5}), "what was measured stays"
        # The hash of a prompt, with all of it but a few digits, tells the digits to who tries them all.
        assert row["prompt"] not in shown and re.fullmatch("[a-f]{16}", frame["prompt"])


def test_point_11_a_redaction_reaches_all_of_a_files_row(tmp_path: Path) -> None:
    secret = "jane@example.com"
    names = ("id", "key", "status", "kind", "type", "role", "state", "mime", "sha256", "truncate_status")
    row = {"input": f"write to {secret}", "output": "done", "score": 1.0, "step": 1}
    (tmp_path / "1.jsonl").write_text(json.dumps({**row, **dict.fromkeys(names, secret), secret: 1}) + "\nbroken {\n")
    for source, answers in opened(str(tmp_path / "1.jsonl")):
        (listed,) = answers.list(view="samples")["rows"]
        export = export_html(source, answers, uids=[listed["uid"]], redact="jane@[a-z.]+")
        shown = everything(export.content)
        assert "jane" not in shown and "example.com" not in shown
        (frame,) = frames(export.content)
        # Its id was made of the hash of what it says.
        assert (
            listed["uid"].split("/")[-1] not in shown
            and listed["prompt"] not in shown
            and frame["uid"] != listed["uid"]
        )
        (start,) = re.findall('#/t/[^"]*', everything(export.content))
        assert start == "#/t/" + frame["uid"].replace("/", "%2F")


def test_point_11_what_could_not_be_read_is_not_told(tmp_path: Path) -> None:
    folder = tmp_path / "home-of-ana"
    folder.mkdir()
    (folder / "1.jsonl").write_text(json.dumps({"input": "a", "output": "b", "score": 1.0, "step": 1}) + "\n")
    (folder / "2.json").write_text("{" + " " * 100)
    for source, answers in opened(str(folder)):
        answers.index.set_fact("error", f"BookError: {folder}/ledger.sqlite is damaged")
        assert str(tmp_path) in str(answers.run()["problems"])
        (listed,) = answers.list(view="samples")["rows"]
        export = export_html(source, answers, uids=[listed["uid"]])
        assert (
            str(tmp_path) not in everything(export.content)
            and payload(export.content)["responses"]["/api/run"]["problems"] == []
        )


def test_point_11_a_cut_opening_hides_no_half_of_a_secret(tmp_path: Path) -> None:
    text = "word " * 42 + "the password is correct-horse-battery-staple " + "end " * 80
    with rollbook.open(tmp_path / "book", tokenizer=story.tokenizer()) as book:
        ids = story.tokenizer().encode(text).ids
        book.append(
            Experience(eid=EID(batch=1, task=1, suffix="s"), tokens=[*ids, *ids], prompt_length=len(ids), reward=1.0)
        )
    for source, answers in opened(str(tmp_path / "book")):
        (row,) = answers.list(view="samples")["rows"]
        assert row["opening"].endswith("correct-horse-"), "what is shown is cut inside of the secret"
        shown = everything(
            export_html(source, answers, uids=[row["uid"]], redact="correct-horse-battery-staple").content
        )
        assert "correct" not in shown and "staple" not in shown


def test_point_11_texts_that_cannot_be_searched_are_not_exported_as_redacted(tmp_path: Path) -> None:
    with rollbook.open(tmp_path / "book") as book:
        book.append(Experience(eid=EID(batch=1, task=1, suffix="s"), tokens=[1, 2, 3], reward=1.0))
    for source, answers in opened(str(tmp_path / "book")):
        with pytest.raises(ValueError, match="no tokenizer"):
            export_html(source, answers, uids=["1/1/0/0/s"], redact="x")
        assert export_html(source, answers, uids=["1/1/0/0/s"]).trajectories == 1


def test_what_cannot_be_made_is_said(run: Run, rows: list[dict[str, Any]]) -> None:
    uids = [row["uid"] for row in rows]
    for options, message in [
        ({}, "expected one of uids, gid and filter"),
        ({"uids": uids[:1], "gid": "x"}, "expected one of uids, gid and filter"),
        ({"uids": []}, "no samples"),
        ({"filter": "reward > 100"}, "no samples"),
        ({"uids": uids[: MAX_TRAJECTORIES + 1]}, f"at most {MAX_TRAJECTORIES}"),
        ({"filter": "step >= 0"}, f"288 samples match, expected at most {MAX_TRAJECTORIES}"),
        ({"uids": uids[:1], "redact": "("}, "not a regular expression"),
        ({"uids": uids[:1], "redact": ["a", ""]}, "expected a regular expression"),
        ({"uids": uids[:1], "theme": "pink"}, "theme"),
        ({"uids": uids[:20], "max_mb": 0.01}, "max_mb: the file of 20 trajectories"),
    ]:
        with pytest.raises(ValueError, match=re.escape(message)):
            export_html(*run, **options)
    with pytest.raises(KeyError, match="nobody"):
        export_html(*run, uids=["nobody"])
    with pytest.raises(KeyError, match="nobody"):
        export_html(*run, gid="nobody")


def test_it_is_written_whole_or_not_at_all(run: Run, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    out = tmp_path / "out.html"
    export = write_html(out, *run, uids=[rows[0]["uid"]], theme="dark")
    assert isinstance(export, ExportResult) and out.read_bytes() == export.content
    assert Page(export.content).elements[0][1]["data-theme"] == "dark"
    with pytest.raises(ValueError, match="max_mb"):
        write_html(out, *run, uids=[rows[1]["uid"]], max_mb=0.001)
    assert out.read_bytes() == export.content and list(tmp_path.iterdir()) == [out]
    assert write_html(out, *run, uids=[rows[0]["uid"]], theme="dark").content == export.content, (
        "the same gives the same"
    )


def test_a_notebook_shows_it_in_a_frame_of_its_own(run: Run, rows: list[dict[str, Any]]) -> None:
    export = export_html(*run, uids=[rows[0]["uid"]])
    frame = as_iframe(export.content)
    elements = Page(frame.encode()).elements
    assert [tag for tag, _, _ in elements] == ["iframe"]
    assert elements[0][1]["sandbox"] == "allow-scripts" and str(elements[0][1]["srcdoc"]).encode() == export.content
    assert html.unescape(frame).count("<iframe") == 1


def test_sixteen_long_samples_are_about_a_megabyte(tmp_path: Path) -> None:
    dice = np.random.default_rng(0)
    with rollbook.open(tmp_path / "book", tokenizer=story.tokenizer()) as book:
        size = story.tokenizer().get_vocab_size() - len(story.SPECIAL)
        words = np.minimum(dice.zipf(1.3, (16, 8192)) + 40, size - 1).astype(np.int32)
        entropy = dice.gamma(0.6, 0.5, (16, 7936)).astype(np.float32)
        book.append(
            [
                Experience(
                    eid=EID(batch=1, task=1, run=number, suffix="s"),
                    tokens=words[number],
                    prompt_length=256,
                    reward=float(number % 2),
                    entropy=entropy[number],
                    logprobs=-entropy[number],
                    group_size=16,
                )
                for number in range(16)
            ]
        )
    for source, answers in opened(str(tmp_path / "book")):
        export = export_html(source, answers, gid="1/1", fields=["entropy", "logprob"])
        assert export.trajectories == 16
        assert export.size < 1_600_000


def test_the_address_makes_the_same_file(path: str, run: Run, rows: list[dict[str, Any]]) -> None:
    with Server(path) as running:
        until = time.monotonic() + SECONDS
        while ask(running, "/api/run").json["progress"]["measured"] < len(rows) and time.monotonic() < until:
            time.sleep(0.05)
        response = post(running, "/api/export", {"gid": rows[0]["gid"], "redact": None, "title": None, "images": True})
        assert response.status == 200, response.body
        assert [frame["uid"] for frame in frames(response.body)] == [
            frame["uid"] for frame in frames(export_html(*run, gid=rows[0]["gid"]).content)
        ]
        assert post(running, "/api/export", {"gid": rows[0]["gid"], "redact": "("}).status == 400
        assert post(running, "/api/export", {}).status == 400
        assert post(running, "/api/export", {"gid": "nobody"}).status == 404
        assert post(running, "/api/export", {"path": "/etc/passwd"}).status == 400
