"""The text of a diagnosis, its JSON and its exit status."""

from __future__ import annotations

import json

import pytest

from rollbook.inspect.doctor import CheckStatus, Diagnosis, Finding, format_report

HOSTILE = "a\x1b[31m\x07/\u202ex\n/0/0/\ud800"


def finding(severity: str, **changes: object) -> Finding:
    values: dict[str, object] = {
        "check": "duplicates",
        "severity": severity,
        "title": f"titled {HOSTILE}",
        "detail": f"detailed {HOSTILE}",
        "recommendation": "do something " * 20,
        "steps": (3, 9),
        "uids": tuple(f"{HOSTILE}{i}" for i in range(9)),
        "count": 1234,
        "filter": "duplicate and step >= 3",
        "share": 0.5,
    }
    return Finding(**(values | changes))  # type: ignore[arg-type]


def diagnosis(*severities: str) -> Diagnosis:
    examined = (
        CheckStatus("duplicates", "triggered", "titled"),
        CheckStatus("nans", "passed", "0 records have NaN/Inf values"),
        CheckStatus("zero-variance", "explained", f"explained by duplicates: {HOSTILE}"),
        CheckStatus("stale-data", "skipped", "no policy versions recorded"),
    )
    return Diagnosis(f"run {HOSTILE}", tuple(finding(severity) for severity in severities), examined, 5000, (0, 9))


def test_nothing_from_the_records_reaches_the_terminal_raw() -> None:
    text = "\n".join(format_report(diagnosis("high"), verbose=True))
    assert all(character.isprintable() or character == "\n" for character in text)
    assert "\\x1b[31m" in text
    assert "\\u202e" in text
    text.encode()


def test_what_is_printed() -> None:
    text = format_report(diagnosis("high", "low"), width=60)
    assert text[0].endswith("5,000 records, steps 0 to 9; 3 of 4 checks ran")
    first = [line for line in text if line.startswith(("high ", "low "))]
    assert len(first) == 2
    assert first[0].endswith("[duplicates]")
    assert any("filter: duplicate and step >= 3" in line for line in text)
    assert any("and 3 more" in line for line in text)
    assert "Skipped:" in text
    assert "  stale-data: no policy versions recorded" in text
    assert "Passed:" not in text
    assert all(len(line) <= 60 for line in text if line.startswith("  Recommendation") or "do something" in line)


def test_a_healthy_run_says_so() -> None:
    text = format_report(diagnosis(), verbose=True)
    assert "No findings (3 of 4 checks ran)." in text
    assert "  nans: 0 records have NaN/Inf values" in text


def test_strict_json() -> None:
    exported = diagnosis("high").as_dict()
    assert json.loads(json.dumps(exported, allow_nan=False)) == exported
    assert exported["findings"][0]["steps"] == [3, 9]
    assert exported["checks"][3] == {
        "check": "stale-data",
        "status": "skipped",
        "reason": "no policy versions recorded",
    }
    assert diagnosis().as_dict()["healthy"] is True


@pytest.mark.parametrize(
    ("severities", "fail_on", "status"),
    [
        ((), "low", 0),
        (("low",), "low", 1),
        (("low",), "medium", 0),
        (("medium", "low"), "medium", 1),
        (("medium",), "high", 0),
        (("high",), "high", 1),
        (("high",), "never", 0),
    ],
)
def test_exit_status(severities: tuple[str, ...], fail_on: str, status: int) -> None:
    assert diagnosis(*severities).status(fail_on) == status


def test_exit_status_of_what_is_no_severity() -> None:
    with pytest.raises(ValueError, match="fail_on"):
        diagnosis().status("bad")
