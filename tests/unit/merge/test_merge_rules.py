"""Rules on numbers small enough to check by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from befit.adapters.lowrank import inner, numerical_rank, spectrum, stack, truncate
from befit.merge.rules import ClientTensors, Elementwise, Isotropic, apply_elementwise, isotropic
from befit.merge.trim import Cut, cut_of, kept_count, trim


def apply(rule: Elementwise, clients: list[list[list[float]]], weights: list[float]) -> list[list[float]]:
    """`clients[k][e]` is entry e of client k: every entry is a tensor of the adapter."""
    entries = [ClientTensors(str(e), [torch.tensor(client[e]) for client in clients]) for e in range(len(clients[0]))]
    merged = apply_elementwise(rule, lambda: entries, weights, lambda k, name: torch.Generator())
    return [value.tolist() for _, value in merged]


def elect(**options: Any) -> Elementwise:
    return Elementwise(**{"elect": "sum", **options})


def test_entries_of_the_other_sign_are_left_out_of_the_mean() -> None:
    """Sums 4 and -2 elect + and -: (3 + 2) / 2 and -4 / 1. The zero of the third client enters nothing."""
    assert apply(elect(), [[[3.0, 1.0]], [[2.0, 1.0]], [[-1.0, -4.0]]], [1, 1, 1]) == [[2.5, -4.0]]
    assert apply(elect(), [[[3.0]], [[0.0]]], [1, 1]) == [[3.0]]


def test_weights_elect_and_average() -> None:
    """1*3 - 4*1 < 0 elects minus; (2*1 + 1*4) / 3 = 2 for the other."""
    assert apply(elect(), [[[3.0]], [[-1.0]]], [1, 4]) == [[-1.0]]
    assert apply(elect(), [[[1.0]], [[4.0]]], [2, 1]) == [[2.0]]


def test_a_sum_of_agreeing_entries_is_not_divided() -> None:
    assert apply(elect(combine="sum"), [[[3.0]], [[2.0]], [[-1.0]]], [1, 2, 1]) == [[7.0]]


def test_frequency_counts_signs_and_not_sizes() -> None:
    """One large positive against two small negatives: by sums plus, by counts minus."""
    clients = [[[9.0]], [[-1.0]], [[-2.0]]]
    assert apply(elect(), clients, [1, 1, 1]) == [[9.0]]
    assert apply(elect(elect="count"), clients, [1, 1, 1]) == [[-1.5]]


def test_a_tie_of_signs_goes_to_the_sum_of_values() -> None:
    """One plus and one minus: 3 - 1 and 1 - 3; by weights 2 * 1 - 1 * 1.5. Where sums cancel as well, plus."""
    clients = [[[3.0, 1.0, 1.0, 2.0]], [[-1.0, -3.0, -1.5, -2.0]]]
    assert apply(elect(elect="count"), clients, [1, 1]) == [[3.0, -3.0, -1.5, 2.0]]
    assert apply(elect(elect="count"), clients, [2, 1]) == [[3.0, -3.0, 1.0, 2.0]]


def test_a_sign_that_cancels_is_plus_or_the_majority_of_its_scope() -> None:
    """The first tensor has a tie and no majority, the second a tie and two minuses: together the majority is minus."""
    clients = [[[1.0], [1.0, -2.0, -2.0]], [[-1.0], [-1.0, -2.0, -2.0]]]
    assert apply(elect(), clients, [1, 1]) == [[1.0], [1.0, -2.0, -2.0]]
    assert apply(elect(zero_sign="majority"), clients, [1, 1]) == [[1.0], [-1.0, -2.0, -2.0]]
    assert apply(elect(zero_sign="majority", scope="adapter"), clients, [1, 1]) == [[-1.0], [-1.0, -2.0, -2.0]]


def test_the_majority_of_an_adapter_is_of_signs_that_weights_elect() -> None:
    """3 * 1 - 1 * 3 is a tie, 2 * 1 - 1 * 3 a minus; with equal weights both would be a plus."""
    majority = elect(zero_sign="majority", scope="adapter")
    assert apply(majority, [[[3.0], [2.0]], [[-1.0], [-1.0]]], [1, 3]) == [[-1.0], [-1.0]]


def test_looking_for_the_majority_uses_up_nothing_of_what_trimming_keeps() -> None:
    """Of four equal entries the first two stay, however often the rule goes over the adapter."""
    rule = Elementwise("trim", 0.5, "sum", scope="adapter", zero_sign="majority")
    assert apply(rule, [[[1.0, 1.0], [1.0, 1.0]]], [1]) == [[1.0, 1.0], [0.0, 0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "rule",
    [
        Elementwise(),
        Elementwise(scope="adapter", zero_sign="majority"),
        Elementwise("drop", 0.5, "sum", scope="adapter"),
        Elementwise("trim", 0.5, "sum", zero_sign="majority"),
        Elementwise("trim", 0.5, "sum", scope="adapter"),
        Elementwise("trim", 1.0, "sum", scope="adapter", zero_sign="majority"),
        Elementwise("trim", 0.5, "count", scope="adapter", zero_sign="majority"),
    ],
)
def test_a_rule_goes_over_an_adapter_as_often_as_it_says(rule: Elementwise, dtype: torch.dtype) -> None:
    """Which is what a merge of files shows its progress out of."""
    passes = 0

    def entries() -> list[ClientTensors]:
        nonlocal passes
        passes += 1
        return [ClientTensors("x", [torch.arange(1.0, 5.0, dtype=dtype)] * 2)]

    list(apply_elementwise(rule, entries, [1, 1], lambda k, name: torch.Generator()))
    assert passes == rule.passes(dtype)


def test_of_equal_entries_the_first_stay_and_the_count_is_exact() -> None:
    values, left = trim(torch.tensor([1.0, -2.0, 1.0, 1.0]), Cut(1.0, 2))
    assert values.tolist() == [1.0, -2.0, 1.0, 0.0] and left == Cut(1.0, 0)
    assert trim(torch.tensor([1.0, 3.0]), left)[0].tolist() == [0.0, 3.0]
    assert trim(torch.tensor([1.0, 3.0]), Cut(1.0, 5))[1] == Cut(1.0, 4)


def test_a_part_of_a_larger_tensor_is_trimmed_like_its_copy() -> None:
    whole = torch.tensor([[1.0, 2.0, 2.0, 9.0], [2.0, 2.0, 1.0, 9.0]])
    part = whole[:, :3]
    assert not part.is_contiguous()
    found, _ = trim(part, cut_of(part, 3))
    assert found.tolist() == [[0.0, 2.0, 2.0], [2.0, 0.0, 0.0]]
    assert whole[0, 1] == 2.0 and whole[1, 1] == 2.0


@pytest.mark.parametrize("scope", ["tensor", "adapter"])
def test_the_published_count_keeps_one_more_and_all_its_equals(scope: Any) -> None:
    """floor(0.5 * 4) = 2, the published rule keeps 3: the third largest is 1, of which there are two."""
    one = [[[3.0, 1.0, -2.0, 1.0]]]
    assert apply(Elementwise("trim", 0.5, scope=scope), one, [1]) == [[3.0, 0.0, -2.0, 0.0]]
    assert apply(Elementwise("trim", 0.5, scope=scope, reference=True), one, [1]) == [[3.0, 1.0, -2.0, 1.0]]
    assert kept_count(1.0, 4, reference=True) == 4


def test_a_whole_adapter_is_trimmed_by_one_threshold() -> None:
    """Four of eight: 9, 8, 7 and 3. Per tensor it would be two of each."""
    adapter = [[[9.0, 8.0, 7.0, 0.1], [3.0, 2.0, 1.0, 0.5]]]
    assert apply(Elementwise("trim", 0.5, scope="adapter"), adapter, [1]) == [
        [9.0, 8.0, 7.0, 0.0],
        [3.0, 0.0, 0.0, 0.0],
    ]
    assert apply(Elementwise("trim", 0.5), adapter, [1]) == [[9.0, 8.0, 0.0, 0.0], [3.0, 2.0, 0.0, 0.0]]


def test_iso_c_of_a_diagonal_is_its_mean_where_it_is_not_zero() -> None:
    """Values 4, 2, 0: mean 3 over two, 2 over all three."""
    matrix = torch.diag(torch.tensor([4.0, 2.0, 0.0]))
    torch.testing.assert_close(isotropic(matrix, Isotropic()), torch.diag(torch.tensor([3.0, 3.0, 0.0])))
    torch.testing.assert_close(isotropic(matrix, Isotropic("rank")), torch.diag(torch.tensor([3.0, 3.0, 0.0])))
    torch.testing.assert_close(isotropic(matrix, Isotropic("full")), torch.diag(torch.tensor([2.0, 2.0, 0.0])))
    assert not bool(isotropic(torch.zeros(2, 3), Isotropic()).any())


def test_the_tolerance_decides_what_is_zero() -> None:
    sigma = torch.tensor([1.0, 1e-3, 1e-6], dtype=torch.float64)
    assert [numerical_rank(sigma, t) for t in (None, 1e-4, 1e-2)] == [3, 2, 1]
    assert numerical_rank(sigma.float()) == 2
    assert numerical_rank(torch.zeros(3)) == 0


def test_a_stack_takes_negative_weights() -> None:
    pairs = [(torch.tensor([[2.0]]), torch.tensor([[3.0]])), (torch.tensor([[1.0]]), torch.tensor([[5.0]]))]
    B, A = stack(pairs, [0.5, -2.0])
    assert float(B @ A) == pytest.approx(0.5 * 6 - 2 * 5) and B.shape == (1, 2)


def test_a_decomposition_of_known_vectors() -> None:
    """B A = 6 e_1 f_2^T + 2 e_2 f_1^T; signs are those that make the left vectors positive."""
    B, A = torch.tensor([[-2.0, 0.0], [0.0, 1.0]]), torch.tensor([[0.0, -3.0], [2.0, 0.0]])
    found = spectrum((B, A))
    torch.testing.assert_close(found.sigma, torch.tensor([6.0, 2.0], dtype=torch.float64))
    torch.testing.assert_close(found.left, torch.eye(2, dtype=torch.float64))
    torch.testing.assert_close(found.right, torch.tensor([[0.0, 1.0], [1.0, 0.0]], dtype=torch.float64))
    assert spectrum((B, A), 1).energy(1) == pytest.approx(36 / 40)
    B1, A1 = truncate((B, A), 1)
    assert B1.dtype == torch.float32 and inner((B1, A1), (B1, A1)) == pytest.approx(36)
