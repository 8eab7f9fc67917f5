"""Revisions: late rewards and feedback with author and time; what is redacted or deleted cannot be read again."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import rollbook
from rollbook.book import (
    AppendResult,
    BookError,
    ConflictError,
    EasyToHard,
    MaxUses,
    Proportional,
    redact_records,
    revision,
)
from tests.book.records import Clock, check, ledger, numbers, record, records, take
from tests.strategies import exact


def test_a_revision_has_an_author_a_time_and_a_reason(url: str) -> None:
    clock = Clock()
    with rollbook.open(url, clock=clock) as book:
        row = record(suffix="a", reward=0.5, info={"i": 0, "judge": "x"})
        book.append(row)
        clock.now += 5
        assert book.revise(row, reward=1.0, info={"note": "fine"}, author="ana", reason="checked by hand") == 1
        revised = book["//0/0/a"]
        assert exact(revised) == exact(row.replace(reward=1.0, info={"i": 0, "judge": "x", "note": "fine"}))
        event = book.history(row.eid)[-1]
        assert (event.kind, event.time, event.reason) == ("revised", 1005.0, "checked by hand")
        assert event.detail == {
            "author": "ana",
            "fields": ["reward", "info"],
            "revision": 1,
            "was": {"reward": 0.5},
            "is": {"reward": 1.0},
        }
        rows = book.sql("select uid, n, time, author, reason, fields from revisions").rows()
        assert rows == [("//0/0/a", 1, 1005.0, "ana", "checked by hand", "reward,info")]
        assert book.where(("reward", "=", 1.0), revision=1).count() == 1
        # What changes nothing is none.
        before = ledger(book)
        assert book.revise("//0/0/a", reward=1.0, author="ana") == 0
        assert ledger(book) == before
        check(book)


def test_many_at_once(url: str) -> None:
    with rollbook.open(url) as book:
        rows = records(3)
        book.append(rows)
        changes = {row.eid.uid: {"reward": float(i), "advantages": torch.full((3,), i)} for i, row in enumerate(rows)}
        assert book.revise(changes, author="maker") == 3
        assert [row.reward for row in book.get(rows)] == [0.0, 1.0, 2.0]
        assert book.revise({}, author="maker") == 0
        before = ledger(book)
        with pytest.raises(KeyError, match="'unknown'"):
            book.revise({"//0/0/0000": {"reward": 5.0}, "unknown": {"reward": 1.0}}, author="ana")
        with pytest.raises(ValueError, match="advantages"):
            book.revise({"//0/0/0000": {"reward": 5.0}, "//0/0/0001": {"advantages": torch.ones(7)}}, author="ana")
        assert ledger(book) == before


def test_what_was_sampled_is_never_revised(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(1))
        before = ledger(book)
        for fields in ({"tokens": [1, 2, 3]}, {"logprobs": torch.zeros(3)}, {"response_text": "x"}, {"eid": None}):
            with pytest.raises(ValueError, match=f"{next(iter(fields))!r} cannot be revised"):
                book.revise("//0/0/0000", author="ana", **fields)
        with pytest.raises(ValueError, match="'rewrd' cannot be revised.*did you mean 'reward'"):
            book.revise("//0/0/0000", author="ana", rewrd=1.0)
        with pytest.raises(ValueError, match="author: got ''"):
            book.revise("//0/0/0000", author="", reward=1.0)
        with pytest.raises(ValueError, match="no field to change"):
            book.revise("//0/0/0000", author="ana")
        with pytest.raises(ValueError, match="and a mapping"):
            book.revise({"//0/0/0000": {"reward": 1.0}}, author="ana", reward=2.0)
        with pytest.raises(ValueError, match="reward"):
            book.revise("//0/0/0000", author="ana", reward="high")
        assert ledger(book) == before


def test_a_revision_returns_a_record_to_training(url: str) -> None:
    with rollbook.open(url) as book:
        book.consumer("other", create=True)
        book.append(records(3))
        take(book, 1)
        book.drop("//0/0/0001", "filtered")
        for i in range(3):
            book.revise(f"//0/0/000{i}", reward=1.0, author="ana", retrain=True)
        counts = book.counts()
        assert (counts.waiting, counts.trained, counts.dropped) == (3, 0, {})
        assert [event.kind for event in book.history("//0/0/0000")] == [
            "admitted",
            "leased",
            "trained",
            "revised",
            "returned",
        ]
        assert book.history("//0/0/0002")[-1].kind == "revised"  # It had not gone.
        assert numbers(take(book, 9)) == [0, 1, 2]
        # Without `retrain` it stays where it is.
        book.revise("//0/0/0000", reward=0.5, author="ana")
        assert not book.lease(1)
        check(book)


def test_a_record_that_is_leased_is_revised_under_its_holder(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(1))
        lease = book.lease(1)
        book.revise("//0/0/0000", reward=1.0, author="ana", retrain=True)
        assert lease.experiences[0].reward == 1.0
        assert lease.ack() == 1
        assert book.counts().trained == 1
        check(book)


def test_samplers_follow_revised_numbers(url: str) -> None:
    with rollbook.open(url, sampler=EasyToHard()) as book:
        book.consumer("errors", create=True, sampler=Proportional(key="info.error", alpha=1.0, beta=1.0))
        book.append([record(suffix=f"{i}", reward=1.0 - i, info={"i": i, "error": 1.0}) for i in range(3)])
        book.revise("//0/0/2", reward=3.0, info={"error": 4.0}, author="ana")
        book.revise("//0/0/0", reward=math.nan, author="ana")
        assert numbers(book.lease(9)) == [2, 1, 0]
        lease = book.lease(9, consumer="errors")
        assert dict(zip(numbers(lease), lease.weights or [], strict=True)) == pytest.approx({0: 1, 1: 1, 2: 0.25})
        check(book)


def test_a_revision_to_nan_and_back(url: str) -> None:
    with rollbook.open(url, sampler=EasyToHard()) as book:
        book.append(records(1, reward=0.5))
        assert book.revise("//0/0/0000", reward=math.nan, author="ana") == 1
        assert book.history("//0/0/0000")[-1].detail["is"] == {"reward": "nan"}
        assert book.revise("//0/0/0000", reward=math.nan, author="ana") == 0
        assert math.isnan(book["//0/0/0000"].reward or 0.0)
        assert book.revise("//0/0/0000", reward=None, author="ana") == 1
        assert book["//0/0/0000"].reward is None
        assert book.where(("reward", "is", None)).count() == 1


def test_two_at_once_are_both_made(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(2))
        gate = threading.Barrier(4)

        def judge(k: int) -> None:
            gate.wait(60)
            for j in range(3):
                book.revise({f"//0/0/000{i}": {"info": {f"judge {k} {j}": i}} for i in range(2)}, author=f"judge {k}")

        threads = [threading.Thread(target=judge, args=(k,)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        for i in range(2):
            info = book[f"//0/0/000{i}"].info
            assert info == {"i": i, **{f"judge {k} {j}": i for k in range(4) for j in range(3)}}
            authors = [event.detail["author"] for event in book.history(f"//0/0/000{i}")[1:]]
            assert sorted(authors) == sorted(f"judge {k}" for k in range(4) for _ in range(3))
        check(book)


def test_revisions_outlive_the_process(durable_url: str) -> None:
    with rollbook.open(durable_url) as book:
        book.append(records(1, reward=0.25))
        book.revise("//0/0/0000", reward=0.5, author="ana")
    with rollbook.open(durable_url) as book:
        assert book["//0/0/0000"].reward == 0.5
        assert book.append(records(1, reward=0.25)) == AppendResult(existing=1)


def test_media_stay_with_a_revised_record(url: str) -> None:
    pixels = torch.arange(3000, dtype=torch.float32)
    with rollbook.open(url) as book:
        book.append([record(suffix=f"{i}", multi_modal_inputs={"pixel_values": pixels}) for i in range(2)])
        book.revise("//0/0/0", reward=1.0, author="ana")
        assert book.sql("select uses from media").rows() == [(2,)]
        book.compact(garbage=0.0)
        for i in range(2):
            assert torch.equal(book[f"//0/0/{i}"].multi_modal_inputs["pixel_values"], pixels)  # type: ignore[index]


# --- deleting and redacting -----------------------------------------------------------------------------------------


def everything_in(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


SECRET = "the launch code is 0000"
PIXELS = np.frombuffer(b"secret pixels 77" * 512, dtype=np.uint8)


def secretive() -> list[rollbook.Experience]:
    return [
        record(
            suffix="a",
            reward=0.5,
            response_text=f"{SECRET} said the model",
            prompt_text="a question",
            messages=[{"role": "user", "content": SECRET}],
            info={"i": 0, "name": SECRET},
            multi_modal_inputs={"pixel_values": torch.from_numpy(PIXELS.copy())},
        ),
        record(suffix="b", info={"i": 1}, response_text="kept"),
    ]


def test_redaction(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(secretive())
        assert (
            redact_records(
                book, "//0/0/a", ["response_text", "messages", "info.name", "multi_modal_inputs"], author="dpo"
            )
            == 1
        )
        redacted = book["//0/0/a"]
        assert redacted.response_text is None and redacted.messages is None and redacted.multi_modal_inputs is None
        assert (
            redacted.info == {"i": 0}
            and redacted.prompt_text == "a question"
            and redacted.tokens.tolist() == [1, 2, 3, 4, 5]
        )
        event = book.history("//0/0/a")[-1]
        assert event.kind == "redacted" and event.detail["author"] == "dpo" and "was" not in event.detail
        assert redact_records(book, "//0/0/a", ["response_text"], author="dpo") == 0
        # What was there does not come back with the same record, nor under its id.
        assert book.append(secretive()) == AppendResult(existing=2)
        assert book["//0/0/a"].response_text is None
        assert book.sql("select response_text from experiences order by seq").rows() == [(None,), ("kept",)]
        for bad in ("tokens", "reward", "response_text.x", "info_name"):
            with pytest.raises(ValueError, match=f"'{bad}' cannot be redacted"):
                redact_records(book, "//0/0/b", [bad], author="dpo")
        check(book)


def test_events_do_not_quote_what_was_redacted_or_deleted(url: str) -> None:
    with rollbook.open(url) as book:
        plain = records(2)
        book.append(plain)
        book.append([row.replace(info={**row.info, "name": SECRET}) for row in plain])
        assert SECRET in str(ledger(book)["events"])
        redact_records(book, "//0/0/0000", ["info.name"], author="dpo")
        book.delete("//0/0/0001", author="dpo")
        assert SECRET not in str(ledger(book))


@pytest.mark.parametrize("method", ["redact", "delete"])
def test_bytes_are_gone_after_compaction(tmp_path: Path, method: str) -> None:
    folder = tmp_path / "book"
    with rollbook.open(folder) as book:
        rows = secretive()
        book.append(rows)
        book.append(rows[0].replace(info={**rows[0].info, "later": SECRET}))
        before = everything_in(folder)
        assert SECRET.encode() in before and PIXELS.tobytes() in before
        if method == "redact":
            fields = ["response_text", "messages", "info.name", "info.later", "multi_modal_inputs"]
            redact_records(book, "//0/0/a", fields, author="dpo")
        else:
            book.delete("//0/0/a", author="dpo")
        book.compact(garbage=1.0, small=0)  # Only what must go.
        assert book["//0/0/b"].response_text == "kept"
    # The ledger's own file and its log too.
    after = everything_in(folder)
    assert SECRET.encode() not in after and PIXELS.tobytes() not in after and b"kept" in after


def test_deletion(url: str) -> None:
    with rollbook.open(url, removers=MaxUses(2)) as book:
        rows = records(4, reward=0.5)
        book.append(rows)
        take(book, 1)
        book.lease(1)
        assert book.delete([rows[0], "//0/0/0001", rows[2].eid], author="ana", reason="asked to") == 3
        assert book.delete(rows[:3], author="ana") == 0
        counts = book.counts()
        assert (counts.admitted, counts.dropped) == (4, {"deleted": 3})
        with pytest.raises(BookError, match=r"//0/0/0000: data was removed \(deleted\)"):
            book["//0/0/0000"]
        assert "//0/0/0000" in book  # Its id is kept, so that it is not admitted again.
        deletion = next(event for event in book.history("//0/0/0000") if event.kind == "deleted")
        assert (deletion.reason, deletion.detail) == ("asked to", {"author": "ana"})
        before = ledger(book)
        assert book.append(rows[:3]) == AppendResult(existing=3)
        # With late fields too, which have nothing left to be added to.
        assert book.append([row.replace(advantages=torch.ones(3)) for row in rows[:3]]) == AppendResult(existing=3)
        assert ledger(book) == before
        with pytest.raises(ConflictError, match=r"//0/0/0000.*removed one \(deleted\)"):
            book.append(rows[0].replace(tokens=torch.tensor([5, 4, 3, 2, 1])))
        with pytest.raises(BookError, match="deleted"):
            book.revise(rows[0], reward=1.0, author="ana")
        with pytest.raises(KeyError, match="'unknown'"):
            book.delete("unknown", author="ana")
        assert numbers(book.lease(9)) == [3]
        book.compact()
        assert numbers(book.where()) == [3]
        assert book.append(rows[:3]) == AppendResult(existing=3)
        check(book)


@pytest.mark.parametrize("removal", ["delete", "redact"])
def test_many_records_are_removed_in_pieces_and_repeating_finishes(
    removal: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("_CHUNK", "_REDACT_CHUNK"):
        monkeypatch.setattr(revision, name, 4)
    with rollbook.open(url) as book:
        rows = records(10, reward=1.0)
        book.append(rows)
        write = book.ledger.write
        sizes: list[int] = []

        def remove(uids: Any) -> int:
            if removal == "delete":
                return book.delete(uids, author="ana")
            return redact_records(book, uids, ["info.i"], author="ana")

        @contextmanager
        def failing(**options: Any) -> Iterator[Any]:
            if len(sizes) == 2:
                raise OSError("the disk is full")
            with write(**options) as tx:
                yield tx
                sizes.append(tx.first("SELECT COUNT(*) FROM events WHERE kind IN ('deleted', 'redacted')")[0])

        with pytest.raises(KeyError, match="unknown"):
            remove([*rows, "unknown"])
        monkeypatch.setattr(book.ledger, "write", failing)
        with pytest.raises(OSError, match="disk is full"):
            remove(rows)
        assert sizes == [4, 8]
        monkeypatch.undo()
        check(book)
        assert remove([*rows, rows[0]]) == 2
        assert remove(rows[:2]) == 0 if removal == "delete" else not any(row.info for row in book)
        assert book.counts().dropped == ({"deleted": 10} if removal == "delete" else {})
        check(book)


def test_a_revised_record_that_was_deleted_is_known_as_it_was_and_as_it_became(url: str) -> None:
    with rollbook.open(url) as book:
        first = record(suffix="a")
        later = first.replace(reward=1.0)
        book.append(first)
        book.append(later)
        book.delete(first, author="ana")
        assert book.append(first) == book.append(later) == AppendResult(existing=1)


def test_evaluation_records_are_revised_and_deleted_too(url: str) -> None:
    with rollbook.open(url) as book:
        book.append(records(2), evaluation=True)
        assert book.revise("//0/0/0000", reward=1.0, author="ana") == 1
        assert book.delete("//0/0/0001", author="ana") == 1
        assert book.counts().evaluation == 2 and book.counts().admitted == 0
        check(book)
