"""Fits of non-negative terms: known answers, outliers, priors, and the choice of their strength."""

import numpy as np
import pytest

from sim_npu.fitting import STRENGTHS, Prior, choose_strength, fit_line, fit_terms, leave_one_out

PRIOR = Prior(np.array([1.0, 1.0, 0.0]), np.array([3.0, 1.0, 0.4]))


def terms(rng, rows):
    return np.stack([np.ones(rows), rng.uniform(2, 40, rows), rng.uniform(1, 80, rows)], axis=1)


def test_a_fit_finds_a_line_and_ignores_an_outlier():
    x = np.arange(1.0, 12.0)
    y = 3 + 2 * x
    y[4] *= 5

    assert fit_line(x, y) == pytest.approx((3, 2), rel=0.1)
    assert fit_line([1, 2, 3], [2, 4, 6]) == pytest.approx((0, 2))
    assert fit_line([1.0, 2.0, 3.0], [9.0, 9.0, 9.0]) == pytest.approx((9, 0))
    assert all(v >= 0 for v in fit_line([1, 2, 3], [30, 20, 10]))


@pytest.mark.parametrize("theta", [(4.0, 0.0, 0.6), (2.0, 1.3, 0.0), (2.0, 0.7, 0.2)])
def test_three_terms_hold_the_naive_formula_and_the_scaled_model(theta):
    x = terms(np.random.default_rng(0), 9)

    np.testing.assert_allclose(fit_terms(x, x @ np.array(theta)), theta, atol=1e-6)


def test_no_term_is_negative_whatever_the_rows():
    rng = np.random.default_rng(1)
    for _ in range(20):
        x = terms(rng, 4)
        assert (fit_terms(x, rng.uniform(1, 100, 4)) >= 0).all()


def test_a_strong_prior_is_the_answer_and_a_weak_one_is_not():
    x = terms(np.random.default_rng(2), 6)
    y = x @ np.array([6.0, 2.0, 0.3])

    np.testing.assert_allclose(fit_terms(x, y, PRIOR, 1e9), PRIOR.value, atol=1e-4)
    np.testing.assert_allclose(fit_terms(x, y, PRIOR, 1e-9), [6.0, 2.0, 0.3], atol=1e-4)
    with pytest.raises(ValueError, match="`prior` is needed with `strength` 1.0"):
        fit_terms(x, y, strength=1.0)


def test_strength_is_high_for_noise_about_the_prior_and_low_for_clear_rows():
    rng = np.random.default_rng(3)
    x = terms(rng, 5)
    near = (x @ PRIOR.value) * rng.choice([0.7, 1.4], 5)
    clear = terms(rng, 12)

    assert choose_strength(x, near, PRIOR) >= 3.0
    assert choose_strength(clear, clear @ np.array([8.0, 0.2, 0.5]), PRIOR) == min(STRENGTHS)


def test_leave_one_out_predicts_each_row_from_the_others():
    x = np.array([[1.0], [1.0], [1.0]])
    y = np.array([10.0, 10.0, 20.0])

    # Without row 3 the fit is 10 (error 1/2). With it, least relative error over (10, 20) lies at the smaller.
    assert leave_one_out(x, y) == pytest.approx((0 + 0 + 0.5) / 3, abs=0.02)
