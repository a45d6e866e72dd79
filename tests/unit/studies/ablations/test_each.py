"""What each ablation measures."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.func import functional_call
from transformers import AutoModelForImageClassification

from befit.config.load import load_experiment
from befit.methods.potara import closed_form_weight, coordinate_trace, merged_trace
from befit.runs.host import Host
from befit.studies.ablations.measure import FinishedAblation, ablate
from befit.studies.ablations.weights import WeightSweep, barrier
from befit.train.paired_fisher import Variances
from tests.backbones import short_vit
from tests.unit.studies.ablations.conftest import CONFIG


def of(done: FinishedAblation, client: str = "client-00") -> list[dict[str, Any]]:
    return [row for row in done.results["rows"] if row["client"] == client]


def test_the_barrier_is_the_rise_of_the_loss_above_the_straight_line(sweep: FinishedAblation, run_path: Path) -> None:
    """Zou et al. 2026, eqs. 2 to 4, of what `befit run` exports of Local and FedIT: at theta = w f + (1 - w) l, in the
    plain model, the mean cross-entropy L(w); the barrier is max(0, L(1/2) - (L(0) + L(1)) / 2) on a grid of halves."""
    host = Host(load_experiment(CONFIG))
    plain = AutoModelForImageClassification.from_pretrained(short_vit()).eval()
    weights = dict(plain.named_parameters())
    for client in ("client-00", "client-01", "client-02"):
        fed, local = (
            load_file(run_path / "baselines" / name / "clients" / client / "adapter" / "adapter_model.safetensors")
            for name in ("fedit", "local")
        )
        examples, losses = host.examples(client, "test"), {}
        batch = examples.batch(range(len(examples)))
        for w in (0.0, 0.5, 1.0):
            merged = {key.removeprefix("base_model.model."): w * fed[key] + (1 - w) * local[key] for key in fed}
            changed = {key: value for key, value in merged.items() if key.startswith("classifier")}
            for key in merged:
                if (module := key.removesuffix(".lora_A.weight")) != key:
                    update = 16 / 2 * merged[f"{module}.lora_B.weight"] @ merged[key]
                    changed[f"{module}.weight"] = weights[f"{module}.weight"] + update
            with torch.no_grad():
                logits = functional_call(plain, weights | changed, (), {"pixel_values": batch["pixel_values"]}).logits
            losses[w] = float(torch.nn.functional.cross_entropy(logits, batch["labels"]))
        rows = of(sweep, client)
        for row in rows:
            if not row["computed"]:
                assert row["loss"] == pytest.approx(losses[row["w"]], rel=1e-5)
            expected = max(0.0, losses[0.5] - (losses[0.0] + losses[1.0]) / 2)
            assert row["barrier"] == pytest.approx(expected, abs=1e-5)


def test_a_barrier_is_measured_against_the_line_and_not_the_higher_end() -> None:
    """L = 1, 1.5, 1.5, 3 at 0, 1/4, 1/2, 1: above the line 1 + 2w by 0, 0, -1/2; and by 1/2 where L(1/4) is 2."""
    losses = {0.0: 1.0, 0.25: 1.5, 0.5: 1.5, 1.0: 3.0}
    assert barrier(losses) == 0
    assert barrier({**losses, 0.25: 2.0}) == 0.5


def test_a_barrier_is_said_in_the_sentences_and_named_by_its_client() -> None:
    """Losses 1, 2.5, 1 at one client, so 1.5 above the line; 1, 0.5, 1 at the other, so 0."""
    shared = {"seed": 0, "round": 3, "computed": False, "score": 0.5, "validation": None, "trace": 1.0}
    rows = [
        {**shared, "client": client, "w": w, "loss": loss, "barrier": rise, "test_examples": 9}
        for client, losses, rise in (("a", (1.0, 0.5, 1.0), 0.0), ("b", (1.0, 2.5, 1.0), 1.5))
        for w, loss in zip((0.0, 0.5, 1.0), losses, strict=True)
    ]
    computed = [{**row, "computed": True} for row in rows if row["w"] == 0.5]
    found = WeightSweep(step=0.5).findings([*rows, *computed], "accuracy")
    assert "between both adapters by 0.750 on average, by 1.500 at most (b)." in " ".join(found.sentences)
    alone = WeightSweep(step=0.5).findings([row for row in [*rows, *computed] if row["client"] == "a"], "accuracy")
    assert "at every client: there is no barrier." in " ".join(alone.sentences)


def test_a_sweep_at_several_rounds_shows_where_the_peak_goes(
    root: Path, sweep: FinishedAblation, tmp_path: Path
) -> None:
    root = shutil.copytree(root, tmp_path / "root")  # other tests look at the sweep that is there
    done = ablate("potara-weight-sweep", CONFIG, out=root, options={"step": 0.5, "rounds": [3, 1, 3]})
    rows = done.results["rows"]
    assert [row["round"] for row in of(done)] == [1] * 4 + [3] * 4
    assert [{**row} for row in rows if row["round"] == 3] == sweep.results["rows"]
    after = {round_: {row["w"]: row["score"] for row in of(done) if row["round"] == round_} for round_ in (1, 3)}
    assert after[1][0.0] == after[3][0.0], "the local adapter is the same at all rounds"
    checkpoints = of(ablate("potara-rounds", CONFIG, out=root))
    for row in checkpoints:
        if row["round"] in after:
            assert after[row["round"]][1.0] == row["federated"] and row["w"] in after[row["round"]]
    table = next(table for table in done.results["findings"]["tables"] if table["title"].startswith("The path"))
    assert [line[0] for line in table["rows"]] == ["1", "3"]
    mine = [row for row in rows if row["round"] == 1 and row["computed"]]
    assert table["rows"][0][-2] == f"{sum(row['barrier'] for row in mine) / 3:.3f}"
    assert table["rows"][0][-1] == f"{max(row['barrier'] for row in mine):.3f}"
    page = (done.path / "ablation.html").read_text()
    assert page.count("<svg") == 3 and ">after round 1</text>" in page and ">after round 3</text>" in page


def test_the_grid_search_picks_on_validation_and_the_oracle_on_test(root: Path, sweep: FinishedAblation) -> None:
    done = ablate("potara-grid-search", CONFIG, out=root, options={"step": 0.5})
    for client in ("client-00", "client-01", "client-02"):
        (row,) = of(done, client)
        steps = {r["w"]: r for r in of(sweep, client) if not r["computed"]}
        assert row["oracle"] == max(r["score"] for r in steps.values())
        assert steps[row["w_grid"]]["validation"] == max(r["validation"] for r in steps.values())
        assert row["grid"] == steps[row["w_grid"]]["score"] <= row["oracle"]
        assert row["seconds_closed"] > 0 and row["seconds_grid"] > 0


def test_a_finer_partition_has_a_smaller_trace_and_the_client_weight_is_the_runs(
    root: Path, sweep: FinishedAblation
) -> None:
    done = ablate("potara-granularity", CONFIG, out=root)
    for correlation in (True, False):
        rows = {row["granularity"]: row for row in of(done) if row["correlation"] is correlation}
        for coarse, fine in (
            ("client", "factor"),
            ("client", "layer"),
            ("factor", "tensor"),
            ("layer", "tensor"),
            ("tensor", "coordinate"),
        ):
            assert rows[fine]["trace"] <= rows[coarse]["trace"] * (1 + 1e-9)
        assert rows["coordinate"]["trace"] < rows["client"]["trace"] <= 1
    with_correlation = next(row for row in of(done) if row["granularity"] == "client" and row["correlation"])
    computed = next(row for row in of(sweep) if row["computed"])
    assert (with_correlation["w"], with_correlation["score"]) == (computed["w"], computed["score"])


def test_the_trace_of_single_coordinates_is_the_sum_of_their_own_minima() -> None:
    """Coordinate 1: a = 1, b = 3, c = 0: w = 3/4, f = 9/16 + 3/16 = 3/4. Coordinate 2: a = b = c = 2: flat, f = 2.
    Coordinate 3: a = 4, b = 1, c = 1: w = 0, f = 1."""
    fed, local, cross = (torch.tensor(v, dtype=torch.float64) for v in ([1.0, 2, 4], [3.0, 2, 1], [0.0, 2, 1]))
    found = coordinate_trace(Variances({"x/A": (0, 3)}, fed, local, cross, {}))
    assert found == pytest.approx(3.75, rel=1e-12)
    each = [
        merged_trace(a, b, c, closed_form_weight(a, b, c)[0])
        for a, b, c in zip(fed.tolist(), local.tolist(), cross.tolist(), strict=True)
    ]
    assert found == pytest.approx(sum(each), rel=1e-12)


def test_damping_moves_the_weight_to_one_half_and_the_runs_delta_gives_the_runs_weight(
    root: Path, sweep: FinishedAblation
) -> None:
    done = ablate("potara-damping", CONFIG, out=root, options={"deltas": [1e-4, 1e9]})
    for client in ("client-00", "client-01"):
        small, huge = of(done, client)
        computed = next(row for row in of(sweep, client) if row["computed"])
        assert (small["w"], small["score"]) == (computed["w"], computed["score"])
        assert huge["w"] == pytest.approx(0.5, abs=1e-6) and huge["damped_share"] == 1
        assert abs(small["w"] - 0.5) > 1e-3


def test_only_clients_with_more_examples_than_m_have_a_spread(root: Path, sweep: FinishedAblation) -> None:
    done = ablate("potara-samples", CONFIG, out=root, options={"samples": [8, 5000], "draws": 3})
    run, everything = of(done)
    assert run["w"] == next(row for row in of(sweep) if row["computed"])["w"]
    assert run["used"] == 8 and run["w_std"] > 0 and run["w_mean"] != run["w"]
    assert everything["used"] < 5000 and everything["w_std"] is None and everything["w_mean"] == everything["w"]
    shown = next(one for one in done.findings.tables).texts
    assert shown[1][4] == "0 of 3"


def test_all_merge_spaces_use_the_runs_weights(root: Path, sweep: FinishedAblation) -> None:
    done = ablate("potara-merge-space", CONFIG, out=root)
    for client in ("client-00", "client-02"):  # after another client had the slots of the products on the model
        rows = {row["space"]: row for row in of(done, client)}
        computed = next(row for row in of(sweep, client) if row["computed"])
        assert {row["w"] for row in rows.values()} == {computed["w"]}
        assert rows["factors"]["score"] == computed["score"]
        assert 0 < rows["product"]["product_gap"] < 1


def test_the_sources_of_the_statistics_differ_and_the_first_is_the_runs(root: Path, sweep: FinishedAblation) -> None:
    done = ablate("potara-statistics", CONFIG, out=root)
    rows = {row["variant"]: row for row in of(done)}
    assert rows["train, empirical"]["w"] == next(row for row in of(sweep) if row["computed"])["w"]
    assert len({row["w"] for row in rows.values()}) == 4
