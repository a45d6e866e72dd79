"""A federation's clients can be told apart."""

import pytest

from befit.core.errors import DataError
from befit.data.federation import ClientData, Federation


@pytest.mark.parametrize("what", ["clients", "newcomers"])
def test_two_with_one_id_are_refused(what: str) -> None:
    """Else one would take the other's place in all that is written by id."""
    twice = (ClientData("a", []), ClientData("b", []), ClientData("b", []))
    with pytest.raises(DataError, match=rf"benchmark mine: {what} .* 'b'"):
        Federation("mine", "1", "text-classification", **{"clients": (ClientData("a", []),), what: twice})


def test_a_newcomer_may_be_called_like_a_client() -> None:
    same = (ClientData("a", []),)
    assert Federation("mine", "1", "text-classification", same, newcomers=same).newcomers == same
