import jaxtyping
import numpy as np
import pytest
from helpers import as_users
from scipy import stats

from locus.sequential import Looks, levels, spent


@pytest.mark.parametrize(
    "spending, published",
    [
        # Five equal looks, two-sided 5%: the programs of Reboussin, DeMets, Kim & Lan (2000).
        ("obrien-fleming", [4.8769, 3.3569, 2.6803, 2.2898, 2.0310]),
        ("pocock", [2.4380, 2.4268, 2.4101, 2.3966, 2.3859]),
    ],
)
def test_boundaries_are_the_published_ones(spending, published):
    found = stats.norm.isf(levels((400, 800, 1200, 1600, 2000), 2000, 0.025, spending))
    assert found == pytest.approx(published, abs=0.015)


@pytest.mark.parametrize("spending", ["obrien-fleming", "pocock"])
@pytest.mark.parametrize("at", [(500, 800, 1200, 1600, 2000), (300, 400, 3000), (700, 1900)])
def test_all_looks_together_spend_alpha(spending, at):
    # With many seeds the statistics are jointly normal, cov = sqrt(n_i / n_j), which scipy integrates.
    n = np.array(at, dtype=float)
    covariance = np.sqrt(np.minimum.outer(n, n) / np.maximum.outer(n, n))
    c = stats.norm.isf(levels(at, at[-1], 0.05, spending))
    for k in range(1, len(at) + 1):
        stay = stats.multivariate_normal(cov=covariance[:k, :k], seed=0).cdf(c[:k])
        assert 1 - stay == pytest.approx(spent(at[k - 1] / at[-1], 0.05, spending), abs=7e-4)


def test_spending():
    for spending in ("obrien-fleming", "pocock"):
        assert spent(1.0, 0.05, spending) == pytest.approx(0.05)
        shares = [spent(t, 0.05, spending) for t in np.linspace(0.05, 1, 20)]
        assert np.all(np.diff(shares) > 0)
    assert spent(0.5, 0.025, "obrien-fleming") == pytest.approx(0.00153, abs=1e-5)
    assert spent(0.5, 0.025, "pocock") == pytest.approx(0.01550, abs=1e-5)


def test_one_look_is_no_correction():
    assert levels((12,), 12, 0.05, "obrien-fleming")[0] == pytest.approx(0.05, abs=1e-9)


@pytest.mark.parametrize("spending", ["obrien-fleming", "pocock"])
def test_levels_grow_with_alpha(spending):
    # Holm's method over several looks rests on it.
    looks = Looks((4, 5, 9, 16, 17, 24), spending)
    for n in looks.at:
        found = [looks.level(n, alpha) for alpha in (0.05 / m for m in range(32, 0, -1))]
        assert np.all(np.diff(found) >= 0) and found[0] < found[-1]


def test_a_look_that_was_not_planned_takes_its_share():
    looks = Looks((5, 10, 20))
    taken = levels((5, 8), 20, 0.05, looks.spending)
    assert looks.level(8, 0.05) == taken[-1] < looks.level(10, 0.05)
    assert looks.level(10, 0.05) == levels((5, 10, 20), 20, 0.05, looks.spending)[1]
    assert (looks.cap, looks.next(5), looks.next(6), looks.next(20)) == (20, 10, 10, None)


def test_looks_up_to_a_cap():
    assert Looks.until(20) == Looks()
    assert Looks.until(9, "pocock") == Looks((5, 9), "pocock")
    assert [Looks.until(cap).at for cap in (4, 21, 24)] == [(4,), (5, 8, 12, 16, 21), (5, 8, 12, 16, 20, 24)]


def test_plans_that_are_none(monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    for at in ((), (2, 5), (5, 5), (8, 5), 5, [5, 8], (3, np.nan), (3, 5.5), "58"):
        with pytest.raises(ValueError, match="growing numbers of seeds, the first one 3 or more"):
            as_users(Looks, at=at)
    with pytest.raises(ValueError, match=r"cap must be an int, 1 or more; got 20\.0"):
        Looks.until(20.0)
    with pytest.raises(ValueError, match="spending must be one of obrien-fleming, pocock; got 'linear'"):
        Looks(spending="linear")
    with pytest.raises(ValueError, match="and the table has 21. Alpha is used up at 20"):
        Looks().level(21, 0.05)
    for alpha in (0.0, 1.0, -0.1, np.nan):
        with pytest.raises(ValueError, match="alpha must be a fraction in"):
            Looks().level(5, alpha)
