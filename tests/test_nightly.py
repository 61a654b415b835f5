"""The tool of the long run: what it counts, what it calls passed, and that it names what was not run."""

import sys

import pytest

from tools import nightly


@pytest.mark.parametrize(("text", "counted"), [
    ("=== 3 passed, 1 skipped, 2 warnings in 4.20s ===", {"passed": 3, "skipped": 1}),
    ("1 failed, 2 passed, 3 errors in 95.00s (0:01:35)", {"failed": 1, "passed": 2, "error": 3}),
    ("a.ipynb: ran in 3 s\nb.ipynb: failed\n", {"passed": 1, "failed": 1}),
    ("7 of 9 compiled\n", {"passed": 7, "failed": 2}),
    ("9 of 9 verdicts as written\n", {"passed": 9, "failed": 0}),
    ("Success: no issues found\n", {}),
])  # fmt: skip
def test_the_last_summary_is_counted(text, counted):
    assert nightly.counts(text) == counted


@pytest.mark.parametrize(("program", "result"), [
    ("print('2 of 2 compiled')", "passed"), ("raise SystemExit(3)", "failed"),
    ("print('peers: skipped, nothing here')", "skipped"), ("while True: pass", "stopped"),
])  # fmt: skip
def test_a_step_passes_fails_is_skipped_or_is_stopped(program, result, monkeypatch, tmp_path):
    monkeypatch.setattr(nightly, "LOGS", tmp_path)
    monkeypatch.setattr(nightly, "LIMIT", 0.2 if result == "stopped" else 60)
    monkeypatch.setitem(nightly.STEPS, "peers", nightly.Step("", (sys.executable, "-c", program)))
    monkeypatch.setattr(nightly, "version", lambda step: "0")
    figure = nightly.run("peers")
    assert figure.result == result
    assert figure.counts == ({"passed": 2, "failed": 0} if result == "passed" else {})


def test_the_page_names_what_was_not_run():
    figure = nightly.Figure(12.3, "failed", {"passed": 5, "failed": 1}, "2026-11-29", "abc", "0.10.2")
    text = nightly.page({"lint": figure})
    assert "| lint | Style and types. | **failed** | 5 | 1 | – | 12 | 0.10.2 | 2026-11-29 | abc |" in text
    assert "**Not run yet:** tests, tests-new, " in text
    assert text.count("| not run |") == len(nightly.STEPS) - 1
    assert "Every step has run." in nightly.page(dict.fromkeys(nightly.STEPS, figure))


def test_what_another_checkout_ran_stays_on_the_page():
    before = nightly.page({"leaks": nightly.Figure(266.0, "passed", {"passed": 56}, "2026-11-28", "abc", "0.10.2")})
    text = nightly.page({"lint": nightly.Figure(2.0, "passed", {}, "2026-11-29", "def", "0.10.2")}, before)
    (row,) = (line for line in text.splitlines() if line.startswith("| leaks |"))
    assert row in before and "| **passed** | 56 | 0 |" in row
    assert "leaks" not in text.split("**Not run yet:**")[1].splitlines()[0]
    assert text.count("| not run |") == len(nightly.STEPS) - 2
