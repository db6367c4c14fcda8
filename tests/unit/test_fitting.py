"""The one fit: factors, what is left over, and what says that factors mean nothing."""

import pytest
import torch

from distcheck.judge import fitting
from distcheck.judge.fitting import fit_least_squares


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_factors_are_those_of_all_rows_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "_ROWS", 7)  # so that every row is factored in parts
    bases = [(drawn(i, 5, 4), drawn(10 + i, 5, 4)) for i in range(3)]
    off = [drawn(20 + i, 5, 4) for i in range(3)]
    found = fit_least_squares(
        [(2 * a - 3 * b + 1e-3 * c, a, b) for (a, b), c in zip(bases, off, strict=True)]
    )
    columns = [torch.cat([pair[k].reshape(-1) for pair in bases]) for k in (0, 1)]
    system = torch.stack(columns, dim=1)
    target = system @ torch.tensor([2.0, -3.0]).double() + 1e-3 * torch.cat(off).reshape(-1)
    wanted = torch.linalg.lstsq(system, target.unsqueeze(1)).solution.squeeze(1)
    assert found is not None
    assert found.factors == pytest.approx(wanted.tolist(), rel=1e-12)
    assert found.left == pytest.approx(float((system @ wanted - target).norm()), rel=1e-9)
    assert found.size == pytest.approx(float(target.norm()))
    assert found.moved_by == pytest.approx(torch.linalg.pinv(system).norm(dim=1).tolist())


def test_a_multiple_leaves_nothing_and_a_complex_number_is_two() -> None:
    found = fit_least_squares([(torch.tensor([1 + 2j, 3j]) / 4, torch.tensor([1 + 2j, 3j]))])
    assert found is not None
    assert found.factors == pytest.approx((0.25,))
    assert found.share < 1e-15


def test_bases_that_are_parallel_are_said_to_be() -> None:
    one = drawn(1, 50)
    found = fit_least_squares([(drawn(2, 50), one, one * (1 + 1e-13))])
    assert found is not None
    assert found.apart < 1e-12
    few = fit_least_squares(
        [(torch.ones(1), torch.ones(1), torch.ones(1))]
    )  # one number, two factors
    assert few is not None
    assert few.apart == 0.0


def test_what_cannot_be_fitted() -> None:
    one, zero = torch.ones(3), torch.zeros(3)
    assert fit_least_squares([]) is None
    assert fit_least_squares([(one, zero)]) is None
    assert fit_least_squares([(one, one * float("nan"))]) is None
    of_zero = fit_least_squares([(zero, one)])
    assert of_zero is not None
    assert (of_zero.factors, of_zero.share) == ((0.0,), 0.0)
