"""Claims: the rule of verdicts, the page, and the cheap claims anew."""

import dataclasses
import re
from importlib.util import find_spec

import jax
import pytest

from benchmarks.claims import CLAIMS, Figure, Outcome, __main__, networks, registry, training
from benchmarks.claims.page import PATH, page, rows_of, verdicts_of
from benchmarks.claims.resnet_step import norm_shapes

CHEAP = [id for id, claim in CLAIMS.items() if claim.seconds <= 5 and claim.basis != "measured"]
SLOW = [id for id, claim in CLAIMS.items() if 5 < claim.seconds and claim.basis == "model"]


@pytest.mark.parametrize(
    ("figures", "verdict"),
    [
        ([(30, 30), (18, 20)], "confirmed"),  # 90 % is enough
        ([(30, 30), (17, 20)], "partly"),
        ([(15, 30)], "partly"),
        ([(14, 30), (9, 20)], "not confirmed"),
        ([(14, 30), (11, 20)], "partly"),
        ([(-40, 30)], "not confirmed"),
        ([(30, 30), (0, None)], "confirmed"),  # a figure that is only shown
    ],
)
def test_verdict_follows_from_the_shares_reached(figures, verdict):
    outcome = Outcome("", tuple(Figure("", value, asked=asked) for value, asked in figures))

    assert outcome.verdict == verdict


@pytest.mark.parametrize(
    ("values", "verdict"), [((85, 99), "confirmed"), ((84.9, 99), "partly"), ((84.9, 0), "not confirmed")]
)
def test_a_threshold_is_reached_exactly_or_not_at_all(values, verdict):
    outcome = Outcome("", tuple(Figure("", value, asked=85, threshold=True) for value in values))

    assert outcome.verdict == verdict


def test_two_claims_cannot_share_an_id():
    with pytest.raises(ValueError, match="`id` 'add-norm' is taken by add_norm; give the claim another"):
        registry.claim("add-norm", "", basis="model", seconds=1)(lambda: None)


def test_the_page_holds_every_claim_once_with_its_words_and_a_verdict():
    rows = rows_of(PATH.read_text(encoding="utf-8"))

    assert list(rows) == list(CLAIMS)
    for id, row in rows.items():
        assert f"| {CLAIMS[id].words} |" in row
        assert re.search(r"\*\*(confirmed|partly|not confirmed)\*\* \|$", row)


def check(id):
    """The claim's row on the page: its verdict on any JAX, its figures on the one that wrote the page."""
    text = PATH.read_text(encoding="utf-8")
    outcome = CLAIMS[id].run()

    row = rows_of(text)[id]

    assert f"| **{outcome.verdict}** |" in row
    if f"jax {jax.__version__}:" in text:
        assert f"| {'<br>'.join(map(str, outcome.figures))} |" in row
        assert outcome.note in text and outcome.detail in text


@pytest.mark.parametrize("id", CHEAP)
def test_a_cheap_claim_reproduces(id):
    check(id)


@pytest.mark.nightly
@pytest.mark.parametrize("id", SLOW)
def test_a_modelled_claim_reproduces(id):
    check(id)


def test_most_claims_about_kernels_are_cheap_enough_to_be_tested():
    assert {"add-norm", "add-norm-quant", "double-buffer", "one-kernel", "rms-vs-layer", "sparse", "in-place"} <= set(
        CHEAP
    )


def test_the_page_counts_its_verdicts_and_shows_details():
    some = Outcome("ran", (Figure("f", 1.0, asked=1.0),), note="Read this.", detail="| a |\n|---|")

    text = page({"add-norm": some, "in-place": Outcome("ran", (Figure("f", 0.1, asked=1.0),))})

    assert "1 confirmed, 0 partly, 1 not confirmed" in text
    assert list(rows_of(text)) == ["add-norm", "in-place"]
    assert text.endswith("## add-norm\n\nRead this.\n\n| a |\n|---|\n")


def test_check_compares_verdicts_with_the_page(monkeypatch, capsys):
    text = PATH.read_text(encoding="utf-8")
    assert verdicts_of(text).keys() == CLAIMS.keys()
    cheap = Outcome("ran", (Figure("f", 0.0, asked=1.0),))
    monkeypatch.setitem(CLAIMS, "add-norm", dataclasses.replace(CLAIMS["add-norm"], run=lambda: cheap))

    assert __main__.main(["--check", "add-norm"]) == 1
    assert "add-norm: not confirmed here, partly in claims.md\n0 of 1 verdicts" in capsys.readouterr().out


def test_resnet50_normalises_53_arrays_of_11_million_elements():
    shapes = norm_shapes(batch=1)

    # per stage: (size, blocks, width); a bottleneck's first norm of a later stage sees the size before its stride
    elements = 112 * 112 * 64
    for size, blocks, width in ((56, 3, 64), (28, 4, 128), (14, 6, 256), (7, 3, 512)):
        before = size if width == 64 else 2 * size
        elements += before**2 * width + (blocks - 1) * size**2 * width  # first norms
        elements += blocks * size**2 * 5 * width + size**2 * 4 * width  # second and third norms, and the short cut's
    assert len(shapes) == 53
    assert sum(n * h * w * c for n, h, w, c in shapes) == elements == 11_113_984


def test_ring_and_direct_exchange_by_hand():
    # 8 cards: 14 messages of an eighth, 2 µs and 28 GB/s each, 10 µs for the call; or one message of all of it
    assert networks.ring_us(28_000 * 8) == pytest.approx(10 + 14 * (2 + 1))
    assert networks.direct_us(28_000 * 8) == pytest.approx(10 + 2 + 8)


def test_the_command_lists_claims_without_running_them(capsys):
    assert __main__.main(["--list"]) == 0

    out = capsys.readouterr().out
    assert all(f"{id}: {claim.words}" in out for id, claim in CLAIMS.items())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nothing"], "`id` 'nothing' is no claim"), (["--write", "split"], "give it without claims")],
)
def test_the_command_refuses_what_it_cannot_do(arguments, words, capsys):
    with pytest.raises(SystemExit) as stop:
        __main__.main(arguments)

    assert stop.value.code == 2 and words in capsys.readouterr().err


needs_digits = pytest.mark.skipif(find_spec("sklearn") is None, reason="the digits come with the extra `train`")


@needs_digits
@pytest.mark.parametrize("normed", [False, True])
def test_the_net_of_the_sweep_learns_at_its_usual_setting_and_not_at_a_rate_of_zero(normed, monkeypatch):
    for name, value in (("RATES", (0.0, 0.1)), ("GAINS", (1.0,)), ("SEEDS", 1), ("ROUNDS", 20)):
        monkeypatch.setattr(training, name, value)

    found = training.errors(normed)

    assert found.shape == (2, 1, 1, 20)
    idle, trained = found[:, 0, 0]
    # ten classes: 90 % by chance, more or less; untrained, only the running statistics move
    assert idle.min() > 60 and trained[-1] < 15


@needs_digits
def test_deep_residual_net_starts_near_chance_and_learns(monkeypatch):
    for name, value in (("BLOCKS", 4), ("FIRST_SCALES", (0.2,)), ("BLOCK_RATES", (0.0, 0.1)), ("BLOCK_SEEDS", 1)):
        monkeypatch.setattr(training, name, value)

    idle, trained = training.residual_losses()[0, :, 0]

    assert idle > 2 and trained < 0.5  # ln 10 is 2.3
