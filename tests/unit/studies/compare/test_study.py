"""Studies as people write them: what they come to, and every mistake at once."""

from __future__ import annotations

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from befit.core.errors import ConfigError
from befit.core.storage import read_sealed
from befit.runs.loading import load_federation
from befit.studies.compare.check import check_plan
from befit.studies.compare.comparison import compare, make_plan
from befit.studies.compare.kept import FILE
from befit.studies.compare.plan import Plan
from befit.studies.compare.statistics import by_example
from befit.studies.compare.study import is_study, read_study
from tests.backbones import short_vit

ROOT = Path(__file__).parents[4]
BASE: dict[str, Any] = {"benchmark": {"name": "digits", "clients": 3, "alpha": 10.0}, "federation": {"rounds": 4}}
STUDY: dict[str, Any] = {
    "study": {"title": "T"},
    "base": BASE,
    "seeds": [3, 5],
    "runs": {"Alone": {"method": {"name": "local", "rank": 2}}, "FedIT": "fedit"},
}
GRID: dict[str, Any] = {
    "axes": {
        "merge": {"FedAvg": {"method.merge.rule": "mean"}, "TIES": {"method.merge.rule": "ties"}},
        "guide": {"hard": {}, "own": {"method.guide": "own"}},
    },
    "method": {"name": "guidance", "rank": 2},
}


def plan(change: dict[str, Any] | None = None, **options: Any) -> Plan:
    return make_plan({**copy.deepcopy(STUDY), **(change or {})}, **options)


def problems(change: dict[str, Any], **options: Any) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        plan(change, **options)
    return caught.value.problems


def grid(**change: Any) -> dict[str, Any]:
    return {"runs": {}, "grids": {"g": {**copy.deepcopy(GRID), **change}}}


def test_every_run_has_a_cell_for_each_seed_seed_by_seed() -> None:
    made = plan()
    assert [(cell.label, cell.seed) for cell in made.cells] == [("Alone", 3), ("FedIT", 3), ("Alone", 5), ("FedIT", 5)]
    first = made.cells[0].experiment
    assert (first.federation.seed, first.method["rank"], first.baselines) == (3, 2, [])
    assert first.benchmark is not None and first.benchmark.arguments["seed"] == 3  # a new partition too
    assert made.reference == "Alone"  # the one of the method local


def test_changes_of_a_run_beat_the_base_and_the_command_beats_both() -> None:
    runs = {"A": {"method": "local", "set": {"train.lr": 0.5, "federation.rounds": 7}}, "B": "fedit"}
    made = plan({"runs": runs}, overrides=["federation.rounds=2"])
    assert [run.cells[0].experiment.train.lr for run in made.runs] == [0.5, 1e-3]
    assert [run.cells[0].experiment.federation.rounds for run in made.runs] == [2, 2]


def test_a_change_of_the_method_comes_before_changes_inside_it() -> None:
    made = plan({"runs": {"A": {"set": {"method.rank": 3, "method": "fedit"}}}})
    assert made.runs[0].cells[0].experiment.method["rank"] == 3


def test_a_grid_is_the_product_of_its_axes_as_a_table() -> None:
    made = plan(grid(paper={"TIES": {"own": 12.5}}))
    (table,) = made.tables
    assert (table.corner, table.rows, table.columns) == ("merge", (("FedAvg",), ("TIES",)), (("hard",), ("own",)))
    assert table.runs == {(0, 0): "FedAvg · hard", (0, 1): "FedAvg · own", (1, 0): "TIES · hard", (1, 1): "TIES · own"}
    assert table.paper == {(1, 1): 12.5}
    ties = next(run for run in made.runs if run.label == "TIES · own")
    assert ties.paper == 12.5
    method = ties.cells[0].experiment.method
    assert (method["merge"]["rule"], method["guide"], method["rank"]) == ("ties", "own", 2)


def test_rows_and_columns_can_be_several_axes() -> None:
    axes = {**GRID["axes"], "train.lr": [1e-3, 1e-4]}
    made = plan(grid(axes=axes, rows=["train.lr"], columns=["guide", "merge"]))
    (table,) = made.tables
    assert table.rows == (("0.001",), ("0.0001",))
    assert table.columns == (("hard", "FedAvg"), ("hard", "TIES"), ("own", "FedAvg"), ("own", "TIES"))
    assert table.runs[1, 2] == "FedAvg · own · 0.0001"  # labels keep the order of the study
    assert next(run for run in made.runs if run.label == table.runs[1, 2]).cells[0].experiment.train.lr == 1e-4


def test_equal_settings_are_one_run_whatever_they_are_called() -> None:
    """An explicit default and a missing key are the same setting, in blocks of the method as well."""
    again = {
        "axes": {"merge": {"mean": {"method.merge.scale": 1.0}}, "guide": {"from it": {"method.guide": "hard"}}},
        "method": GRID["method"],
    }
    made = plan({"runs": {}, "grids": {"g": GRID, "h": again}})
    assert len(made.runs) == 4
    assert made.tables[1].runs == {(0, 0): "FedAvg · hard"}


def test_single_combinations_can_be_left_out_or_changed() -> None:
    made = plan(
        grid(
            exclude=[{"when": {"merge": "TIES", "guide": "own"}, "because": "nobody asked"}],
            also=[{"when": {"merge": "TIES"}, "set": {"method.merge.density": 0.5}}],
        )
    )
    (table,) = made.tables
    assert table.reasons == {(1, 1): "nobody asked"}
    densities = {run.label: run.cells[0].experiment.method["merge"]["density"] for run in made.runs}
    assert densities == {"FedAvg · hard": None, "FedAvg · own": None, "TIES · hard": 0.5}


REFUSING = {
    "guide": {"hard": {}, "parametric": {"method.guide": "parametric"}},
    "similarity": {"fixed": {}, "cosine": {"method.similarity": "cosine"}},
}


def test_a_refused_combination_is_a_mistake_unless_it_may_be_left_out() -> None:
    (problem,) = problems(grid(axes=REFUSING))
    assert problem.startswith("grids.g (hard · cosine): method.similarity: 'cosine' adjusts the strength")
    (table,) = plan(grid(axes=REFUSING, refused="leave-out")).tables
    assert list(table.reasons) == [(0, 1)]
    assert "similarity: 'cosine'" in table.reasons[0, 1]
    assert len(table.runs) == 3


def test_a_choice_that_is_refused_in_every_combination_is_a_mistake_all_the_same() -> None:
    axes = {**REFUSING, "similarity": {"fixed": {}, "cosine": {"method.similarty": "cosine"}}}
    (problem,) = problems(grid(axes=axes, refused="leave-out"))
    assert problem.startswith("grids.g (similarity cosine): method.similarty: unknown key")
    assert "Did you mean: similarity?" in problem


def test_all_mistakes_of_a_study_are_named_at_once() -> None:
    found = problems(
        {
            "study": {"titel": "x"},
            "seeds": [1, 1],
            "basis": {},
            "runs": {"A": {"metod": "fedit"}, "B": 3},
            "grids": {"g": {"axes": {"a": {"x": 1}, "b": 2}, "refused": "never"}},
        }
    )
    text = "\n".join(found)
    for part in (
        "basis: unknown key for a study. Did you mean: base?",
        "study.titel: unknown key",
        "study.title: is required",
        "seeds: must be different whole numbers",
        "runs.A.metod: unknown key for a run. Did you mean: method?",
        "runs.B: must be a mapping",
        'grids.g.refused: "never" is not one of error, leave-out',
    ):
        assert part in text, part


def test_mistakes_of_axes_name_them() -> None:
    found = problems(grid(axes={"merge": {"a": 1}, "x": []}, rows=["merg"]))
    assert [one.split(":")[0] for one in found] == ["grids.g.axes.merge.a", "grids.g.axes.x", "grids.g.rows"]
    (found,) = problems(grid(rows=["merge"], columns=["merge"]))
    assert found.startswith("grids.g.columns: ") and found.endswith("merge, merge")
    wrong = [{"when": {"mrge": "TIES", "guide": "soft"}, "because": "x"}, {"when": {}, "why": "x"}]
    found = problems(grid(exclude=wrong))
    assert "Did you mean: merge?" in found[0] and "none of hard, own" in found[1] and "a reason" in found[2]


def test_two_axes_may_not_set_one_key() -> None:
    axes = {"a": {"x": {"train.lr": 1e-3}}, "b": {"y": {"train.lr": 1e-4}}}
    assert problems(grid(axes=axes)) == ("grids.g (x · y): train.lr: set by both axes a and b",)


def test_numbers_of_the_paper_have_to_belong_to_a_cell() -> None:
    found = problems(grid(paper={"TIES": {"owen": 1.0}, "FedAvg": 3}))
    assert any("'owen' is none of hard, own. Did you mean: own?" in one for one in found)
    assert any("must be nested by label down to hard, got 3" in one for one in found)


def test_the_same_mistake_in_many_cells_is_told_once() -> None:
    (problem,) = problems(grid(set={"train.lrr": 1}))
    assert problem.startswith("grids.g (FedAvg · hard): train.lrr: unknown key") and problem.endswith("(and 3 more)")


def test_runs_have_to_be_scored_alike_and_the_reference_has_to_be_one_of_them() -> None:
    runs = {"Alone": "local", "B": {"method": "fedit", "set": {"evaluate.split": "val"}}}
    found = problems({"runs": runs, "study": {"title": "T", "reference": "Alne"}})
    assert found[0].startswith('evaluate.split: must be the same for all runs of a comparison, got "test" (Alone)')
    assert found[1] == "reference: there is no run 'Alne'. Did you mean: Alone? Known: Alone, B"
    folds = {"Alone": "local", "B": {"method": "fedit", "set": {"evaluate.fold": 1}}}
    assert problems({"runs": folds}) == (
        "evaluate.fold: must be the same for all runs of a comparison, got 0 (Alone) and 1 (B)",
    )


def test_two_runs_of_one_name_are_refused() -> None:
    wanted = {"runs": {"FedAvg · hard": "fedit"}, "grids": {"g": GRID}}
    assert problems(wanted) == ("two runs are called 'FedAvg · hard': give one another name",)


def test_a_base_by_path_counts_its_paths_from_its_own_folder(tmp_path: Path) -> None:
    (tmp_path / "configs" / "data").mkdir(parents=True)
    config = "data: {clients: ./data, task: text-classification}\nmodel: {id: ./model}\nmethod: fedit\n"
    (tmp_path / "configs" / "base.yaml").write_text(config)
    study = tmp_path / "study.yaml"
    study.write_text("study: {title: T}\nbase: configs/base.yaml\nruns: {Alone: local, As it is: {}}\n")
    assert is_study(study) and not is_study(tmp_path / "configs" / "base.yaml")
    made = make_plan(study)
    experiment = made.runs[1].cells[0].experiment
    assert experiment.model.id == str(tmp_path / "configs" / "model")
    assert experiment.method["name"] == "fedit"  # the base's own
    assert made.name == "study"
    study.write_text("study: {title: T}\nbase: nowhere.yaml\nruns: {Alone: local}\n")
    with pytest.raises(ConfigError, match=r"base: there is no file .*nowhere\.yaml"):
        read_study(study)


CONFIG = {
    "name": "mine",
    **BASE,
    "method": {"name": "potara", "rank": 2, "alpha": 6, "rounds_local": 3},
    "baselines": ["local", {"name": "fedit", "rank": 3}],
}


def test_methods_of_a_study_are_its_runs_of_these_beside_the_reference() -> None:
    made = plan(methods=["fedit"])
    assert list(made.runs) == list(plan().runs) and made.reference == "Alone"
    assert [run.label for run in plan(methods=["fedit"], reference="FedIT").runs] == ["FedIT"]
    with pytest.raises(ConfigError) as caught:
        plan(methods=["local", "fedti", "fedsa"])
    assert caught.value.problems == (
        "--methods: no run is of 'fedti'. Did you mean: fedit? Known: local, fedit",
        "--methods: no run is of 'fedsa'. Did you mean: fedit? Known: local, fedit",
    )


def test_claims_of_a_study_keep_those_whose_runs_are_all_there() -> None:
    claims = {
        "two": {"says": "FedIT is above alone", "better": {"FedIT": "Alone"}},
        "three": {"says": "in this order", "order": ["FedIT", "Alone", "FedIT low"]},
    }
    runs = {"FedIT low": {"method": "fedit", "set": {"train.lr": 0.5}}, "Ditto": {"method": "ditto"}}
    change = {"claims": claims, "runs": {**STUDY["runs"], **runs}}
    assert list(plan(change, methods=["fedit"]).claims) == ["two", "three"]
    assert list(plan(change, methods=["ditto"]).claims) == []


def test_tables_of_a_study_keep_the_rows_and_columns_that_have_runs_of_the_methods() -> None:
    """Rows Ditto, FedIT, FedSA; columns low, middle, high. Nothing is left of Ditto, nor of the middle, where FedIT is
    not run, and of FedSA high alone, being the reference."""
    axes = {
        "method": {"Ditto": {"method": "ditto"}, "FedIT": {"method": "fedit"}, "FedSA": {"method": "fedsa"}},
        "lr": {"low": {"train.lr": 0.1}, "middle": {"train.lr": 0.2}, "high": {"train.lr": 0.3}},
    }
    excluded = [
        {"when": {"method": "FedIT", "lr": "middle"}, "because": "it diverges"},
        {"when": {"method": "FedIT", "lr": "high"}, "because": "it hangs"},
    ]
    numbers = {"Ditto": {"low": 1.0}, "FedIT": {"low": 2.0, "high": 3.0}, "FedSA": {"low": 4.0, "high": 5.0}}
    one = {"axes": axes, "rows": ["method"], "columns": ["lr"], "exclude": excluded, "paper": numbers}
    ditto = {"axes": {"lr": axes["lr"]}, "method": {"name": "ditto", "rank": 2}}
    change = {"runs": {}, "grids": {"g": one, "without": ditto}}
    made = plan(change, methods=["fedit"], reference="FedSA · high")
    assert [run.label for run in made.runs] == ["FedIT · low", "FedSA · high"]
    (table,) = made.tables
    assert (table.rows, table.columns) == ((("FedIT",), ("FedSA",)), (("low",), ("high",)))
    assert table.runs == {(0, 0): "FedIT · low", (1, 1): "FedSA · high"}
    assert table.reasons == {(0, 1): "it hangs"} and table.paper == {(0, 0): 2.0, (0, 1): 3.0, (1, 1): 5.0}


def test_without_methods_a_configuration_is_its_method_and_its_baselines() -> None:
    made = make_plan(CONFIG, seeds=[0, 1])
    assert [run.label for run in made.runs] == ["Local", "FedIT", "Potara"]
    assert made.name == "mine-compare" and len(made.cells) == 6


def test_methods_keep_the_arguments_that_a_configuration_gives_them_and_else_its_adapters_size() -> None:
    made = make_plan(CONFIG, methods=["potara", "fedit", "ditto"])
    blocks = [run.cells[0].experiment.method for run in made.runs]
    assert (blocks[0]["rounds_local"], blocks[1]["rank"]) == (3, 3)
    assert (blocks[2]["rank"], blocks[2]["alpha"]) == (2, 6)
    assert made.reference == "Potara"  # no local here, so the first
    for reference in ("fedit", "FedIT"):  # by the method's name or title
        assert make_plan(CONFIG, methods=["potara", "fedit"], reference=reference).reference == "FedIT"


def test_mistakes_of_the_command_are_named() -> None:
    with pytest.raises(ConfigError) as caught:
        make_plan(CONFIG, methods=["fedti", "local", "local"])
    assert "--methods: local more than once" in caught.value.problems
    assert any(
        one.startswith("--methods: unknown method 'fedti'. Did you mean: fedit?") for one in caught.value.problems
    )
    with pytest.raises(ConfigError, match=r'1 problem in the command\n  "train.lr": must be key=value'):
        plan(overrides=["train.lr"])
    with pytest.raises(ConfigError, match="--seeds: must be different whole numbers"):
        make_plan(CONFIG, seeds=[1, 1])
    with pytest.raises(ConfigError, match="--methods: must name at least one method"):
        make_plan(STUDY, methods=[])


def test_what_decides_numbers_decides_the_folder_and_nothing_else_does() -> None:
    keys = [plan(overrides=[one]).cells[0].key for one in ("name=x", "checkpoint.every_s=0", "train.lr=0.5")]
    assert keys[0] == keys[1] == plan().cells[0].key != keys[2]
    assert plan().cells[0].folder == f"alone-s3-{keys[0]}"


def test_a_problem_of_all_cells_is_told_once() -> None:
    with pytest.raises(ConfigError) as caught:
        check_plan(plan({"base": {"benchmark": {"name": "xnli-600"}}}))
    assert len(caught.value.problems) == 1 and " cells, first Alone, seed 3: benchmark.root" in caught.value.problems[0]


@pytest.mark.parametrize(
    ("asked", "text"),
    [({"blocks": 1, "rank": 65}, "PQ-LoRA of rank 65"), ({"blocks": 5}, "PQ-LoRA in 5 blocks: this model has 4")],
    ids=["wide", "many"],
)
def test_a_later_run_of_a_method_is_looked_at_by_itself(asked: dict[str, Any], text: str) -> None:
    """The first run of the method can be trained; a later one, with other arguments, cannot."""
    runs: dict[str, Any] = {"Fits": {"method": {"name": "fedmosaic", "blocks": 2}}, "FedIT": "fedit"}
    assert check_plan(plan({"runs": runs}))["cells"] == 4
    with pytest.raises(ConfigError) as caught:
        check_plan(plan({"runs": {**runs, "Later": {"method": {"name": "fedmosaic", **asked}}}}))
    (problem,) = caught.value.problems
    assert problem.startswith(f"2 cells, first Later, seed 3: method fedmosaic: {text}")


def test_a_later_run_that_weighs_by_input_is_looked_at_by_itself() -> None:
    """The same arrays and arguments of training at the same modules; the first run has fixed weights."""
    base = {
        "benchmark": {"name": "digits-vqa", "clients": 2, "train": 8, "val": 2, "test": 4},
        "model": {"id": "digits-llava-s", "max_length": 128},
        "adapter": {"targets": ["connector"]},
    }
    runs = {variant: {"method": {"name": "feddpa", "variant": variant}} for variant in ("halves", "T")}
    with pytest.raises(ConfigError) as caught:
        check_plan(plan({"base": base, "runs": runs}))
    (problem,) = caught.value.problems
    assert problem.startswith("2 cells, first T, seed 3: method feddpa: adapter.targets: ")


def test_the_study_on_two_bases_uses_the_cells_of_the_one_without() -> None:
    one, more = (
        make_plan(ROOT / "studies" / "offline" / f"{name}.yaml", seeds=[0])
        for name in ("names-p2eft", "names-p2eft-bases")
    )
    new = [cell.experiment.method for cell in more.cells if cell.key not in {cell.key for cell in one.cells}]
    assert len(more.cells) == len(one.cells) + len(new)
    assert {method["base"]["name"] for method in new} == {"fedit"}


def test_a_comparison_of_no_method_is_refused() -> None:
    with pytest.raises(ConfigError, match="--methods: must name at least one method"):
        make_plan({"name": "x", "benchmark": "digits", "method": "local"}, methods=[])


def test_a_study_without_its_head_is_told_that_it_is_missing(tmp_path: Path) -> None:
    (tmp_path / "one.yaml").write_text("base: {}\nruns: {a: local}\n")
    with pytest.raises(ConfigError, match=r"study: must be a mapping with title, .* and is missing"):
        read_study(tmp_path / "one.yaml")


def test_the_page_of_study_has_every_study_of_a_paper() -> None:
    folder = ROOT / "studies"
    ours = {"again", "choice", "claims", "fedlora", "offline", "privacy", "why"}
    named = re.findall(r"`([\w-]+)/([\w-]+\.yaml)`", (folder / "README.md").read_text())
    there = {(one.parent.name, one.name) for one in folder.glob("*/*.yaml")}
    assert {one for one in named if one[0] not in ours} == {one for one in there if one[0] not in ours}
    assert set(named) <= there


def test_cells_of_files_that_have_changed_since_are_not_taken_for_those_of_now(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"{'good' if n % 2 else 'bad'} book {n}", "label": "gb"[n % 2]}) for n in range(24)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    (tmp_path / "b.jsonl").write_text("\n".join(lines[:16]))
    study = {
        "study": {"title": "T"},
        "base": {
            "data": {"task": "text-classification", "clients": {n: str(tmp_path / f"{n}.jsonl") for n in "ab"}},
            "model": {"id": "names-bert-mlm", "max_length": 16},
            "train": {"max_steps": 1},
            "federation": {"rounds": 1},
        },
        "seeds": [0],
        "runs": {"FedIT": {"method": {"name": "fedit", "rank": 2}}},
    }
    first = compare(study, out=tmp_path / "out", quiet=True)
    again = compare(study, out=tmp_path / "out", quiet=True)
    assert not first.failures and not again.failures and again.results == first.results
    (tmp_path / "b.jsonl").write_text("\n".join(line.replace('"g"', '"b"') for line in lines[:15] + lines[16:17]))
    for done in (
        compare(study, out=tmp_path / "out", quiet=True),
        compare(study, out=tmp_path / "new", cells=[tmp_path / "out" / FILE], quiet=True),
    ):
        assert "is of other data" in done.failures[0].error and len(done.failures) == 1
        assert done.results is None  # nothing of the other data is in a table


def test_private_runs_have_their_own_splits_in_a_study_as_by_themselves(tmp_path: Path) -> None:
    """With privacy of examples each record is held out by its own content; a host of other runs has other splits."""
    (tmp_path / "data").mkdir()
    for site in "ab":
        rows = [{"text": f"{'good' if n % 2 else 'bad'} book {site} {n}", "label": n % 2} for n in range(30)]
        (tmp_path / "data" / f"{site}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    private = {"privacy": {"unit": "example", "epsilon": 8.0, "delta": 1e-3}, "train.max_steps": 1}
    study = {
        "study": {"title": "T"},
        "base": {
            "data": {"task": "text-classification", "clients": str(tmp_path / "data"), "test_fraction": 0.3},
            "model": {"id": "names-bert-mlm", "max_length": 16},
            "train": {"max_steps": 1},
            "federation": {"rounds": 1},
        },
        "seeds": [0],
        "runs": {"FedIT": "fedit", "Private": {"method": "fedit", "set": private}},
    }
    for _ in range(2):  # finished cells are of the data that they were of, too
        done = compare(study, out=tmp_path / "out", quiet=True)
        assert not done.failures and done.results is not None
    plain, protected = (run["seeds"][0]["data"] for run in done.results["runs"])
    assert plain != protected
    alone = load_federation({**study["base"], "method": "fedit", "privacy": private["privacy"]})
    assert protected == alone.manifest["partition"]["sha256"]


def test_cells_of_a_model_whose_weights_have_changed_since_are_in_no_table(tmp_path: Path) -> None:
    folder = shutil.copytree(short_vit(), tmp_path / "model")
    study = {
        "study": {"title": "T"},
        "base": {
            "benchmark": {"name": "scanners", "clients": 2},
            "model": {"id": str(folder)},
            "train": {"max_steps": 1},
            "federation": {"rounds": 1},
        },
        "seeds": [0, 1],
        "runs": {"Local": "local"},
    }
    assert not compare(study, seeds=[0], out=tmp_path / "out", quiet=True).failures
    weights = load_file(folder / "model.safetensors")
    save_file({name: 1.01 * values for name, values in weights.items()}, folder / "model.safetensors", {"format": "pt"})
    kept = shutil.copyfile(tmp_path / "out" / "cells.jsonl", tmp_path / "cells.jsonl")
    for out, cells in (("out", []), ("out", []), ("there", [kept])):  # also when all cells are there
        done = compare(study, out=tmp_path / out, cells=cells, quiet=True)
        assert [(failure.label, failure.seed) for failure in done.failures] == [("Local", 0)]
        assert "is of other weights of its model, which have changed since" in done.failures[0].error
        assert done.results is not None
        assert [cell["seed"] for cell in done.results["runs"][0]["seeds"]] == [1]


def test_seeds_that_draw_the_part_they_are_measured_on_are_measured_on_other_examples(tmp_path: Path) -> None:
    """Files of train, val and test, of which the validation examples of fold 1 are some of train, which a seed draws
    whole patients of: two seeds may then have different numbers of them."""
    for site in "ab":
        (tmp_path / site).mkdir()
        for split, count in (("train", 24), ("val", 6), ("test", 6)):
            rows = [
                {"text": f"{split} {site} {n}", "label": n % 2, "patient": f"{split}{site}{int(n**0.5)}"}
                for n in range(count)
            ]
            (tmp_path / site / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    study = {
        "study": {"title": "T"},
        "base": {
            "data": {
                "task": "text-classification",
                "clients": {site: str(tmp_path / site) for site in "ab"},
                "columns": {"group": "patient"},
            },
            "model": {"id": "names-bert-mlm", "max_length": 16},
            "train": {"max_steps": 1},
            "federation": {"rounds": 1},
            "evaluate": {"split": "val", "fold": 1},
        },
        "seeds": [0, 1, 2, 3],
        "runs": {"Local": "local", "FedIT": {"method": {"name": "fedit", "rank": 2}}},
    }
    results = compare(study, out=tmp_path / "out", quiet=True).results
    assert results is not None
    seeds = [run["seeds"] for run in results["runs"]]
    assert [cell["tested"] for cell in seeds[0]] == [cell["tested"] for cell in seeds[1]]
    assert len({cell["data"] for cell in seeds[0]}) == 1 and len({cell["tested"] for cell in seeds[0]}) == 4
    against = results["runs"][1]["against"]
    assert against is not None and against["examples"] is not None


def test_seeds_that_are_measured_on_the_same_examples_do_not_count_as_other_examples(tmp_path: Path) -> None:
    """Test files of one's own, with validation examples that each seed draws from training: other data, and the same
    examples, of which another seed tells no more."""
    for site in "ab":
        for split, count in (("train", 24), ("test", 8)):
            rows = [{"text": f"{split} {site} {n} {'good' if n % 2 else 'bad'}", "label": n % 2} for n in range(count)]
            (tmp_path / site).mkdir(exist_ok=True)
            (tmp_path / site / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    study = {
        "study": {"title": "T"},
        "base": {
            "data": {"task": "text-classification", "clients": {site: str(tmp_path / site) for site in "ab"}},
            "model": {"id": "names-bert-mlm", "max_length": 16},
            "train": {"max_steps": 1},
            "federation": {"rounds": 1},
        },
        "seeds": [0, 1],
        "runs": {"Local": "local", "FedIT": {"method": {"name": "fedit", "rank": 2}}},
    }
    results = compare(study, out=tmp_path / "out", quiet=True).results
    assert results is not None
    first, second = results["runs"][1]["seeds"]
    assert first["data"] != second["data"] and first["tested"] == second["tested"]
    assert "divides the data anew" not in (tmp_path / "out" / "compare.md").read_text()
    against = results["runs"][1]["against"]
    assert against is not None and against["examples"] is not None
    pairs = []
    for at in range(2):
        folders = [tmp_path / "out" / run["seeds"][at]["folder"] for run in reversed(results["runs"])]
        mine, alone = (read_sealed(folder / "results.json")["clients"] for folder in folders)
        pairs.append({site: (mine[site]["each"], alone[site]["each"]) for site in "ab"})
    assert against["examples"] == by_example(pairs, same=True) != by_example(pairs)


def test_everything_that_is_wrong_with_the_cells_is_told_at_once_with_the_cells_that_have_it(tmp_path: Path) -> None:
    """Of data, of models, and of settings."""
    (tmp_path / "wrong.yaml").write_text(
        "study: {title: t}\n"
        "base: {benchmark: digits, train: {max_steps: 1}}\n"
        "seeds: [0, 1]\n"
        "runs:\n"
        "  well: {method: fedit}\n"
        "  text: {method: fedit, set: {model.id: names-bert-fl}}\n"
        "  more: {method: fedit, set: {federation.cohort: 19}}\n"
        "  none: {method: fedit, set: {benchmark.root: nowhere, benchmark.name: cifar100-10}}\n"
    )
    with pytest.raises(ConfigError) as refused:
        check_plan(make_plan(tmp_path / "wrong.yaml"))
    told = [problem.partition(": ") for problem in refused.value.problems]
    assert [whose for whose, _, _ in told] == [f"2 cells, first {run}, seed 0" for run in ("text", "more", "none")]
    assert "names-bert-fl) cannot be built for image-classification" in told[0][2]
    assert told[1][2] == "federation.cohort: 19 is more than there are clients, 10"
    assert "nowhere" in told[2][2]
