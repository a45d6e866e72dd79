from befit.core.schema import plain
from befit.methods.parts.recipe.branches import GUARD
from befit.report.diagnostics import choice_notes

SHOWN = plain([GUARD])


def kept(*choice: str) -> dict[str, dict[str, float]]:
    names = ("merged", "federated", "local")
    return {"diagnostics": {f"guard_kept_{name}": float(name in choice) for name in names} | {"w": 0.5}}


def test_the_report_names_for_whom_the_guard_stepped_in_and_what_it_kept() -> None:
    clients = {"a": kept("merged"), "b": kept("local"), "c": kept("local"), "d": kept("federated")}
    (note,) = choice_notes({"clients": clients, "diagnostics": SHOWN})
    assert "the merged one for a, the federated one for d and the local one for b and c" in note


def test_a_run_without_a_guard_says_nothing_of_it() -> None:
    assert choice_notes({"clients": {"a": {"diagnostics": {"w": 0.5}}, "b": {}}, "diagnostics": SHOWN}) == []
