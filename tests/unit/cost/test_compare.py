"""Rows of `befit cost`: against `befit check`, and with heads, dtypes and clients."""

import pytest

from befit.config.load import load_experiment
from befit.core.errors import ConfigError, ModelError
from befit.cost.architecture import find_architecture
from befit.cost.arguments import chosen_methods
from befit.cost.compare import compare, with_savings
from befit.protocol.registry import method_names
from befit.protocol.settings import WireSettings
from befit.runs.estimate import estimate


def rows(*names, targets="auto", sets=(), model="digits-vit", **options):
    methods = {name: method for name, (_, method) in chosen_methods(names, sets).items()}
    options = {"rounds": 10, **options}
    return {row["method"]: row for row in compare(find_architecture(model), methods, targets, **options)}


@pytest.mark.parametrize("name", method_names())
def test_the_numbers_are_those_of_a_check(name):
    """The same method on the same model: digits has ten classes, and its task head is trained."""
    settings = {
        "benchmark": {"name": "digits", "clients": 3},
        "method": name,
        "baselines": [],
        "federation": {"rounds": 5},
        "wire": {"dtype": "bfloat16"},
    }
    checked = estimate(load_experiment(settings))
    row = rows(name, rounds=5, labels=10, wire=WireSettings("bfloat16"), clients=3)[name]
    assert row["backbone_parameters"] == checked["backbone_parameters"]
    assert row["adapted_modules"] == checked["adapted_modules"]
    assert row["trained_parameters"] == checked["trainable_parameters"]
    for way, word in (("up", "upload"), ("down", "download")):
        for period in ("per_round", "total"):
            assert row[f"{word}_bytes_{period}"] == checked[f"bytes_{way}_{period}"]


@pytest.mark.parametrize("name", ["flora", "relora"])
def test_one_adapter_is_one_that_is_trained(name):
    """And not the changes of the backbone, into which these fold it."""
    assert rows(name, model="vit-b-16")[name]["parameters"] == rows("fedit", model="vit-b-16")["fedit"]["parameters"]


def test_a_head_is_counted_apart_and_follows_what_is_shared():
    """768*100 + 100 entries. FedIT and FFA-LoRA share the head, FedSA keeps it at the client."""
    plain = rows("fedit", "fedsa", "ffa_lora", model="vit-b-16")
    found = rows("fedit", "fedsa", "ffa_lora", model="vit-b-16", labels=100)
    for name, row in found.items():
        assert row["parameters"]["head"] == 76_900
        assert row["parameters"]["A"] == plain[name]["parameters"]["A"]
        sent = 0 if name == "fedsa" else 4 * 76_900
        assert row["head_bytes"]["upload_bytes_per_round"] == sent
        assert row["head_bytes"]["download_bytes_total"] == 10 * sent
        assert row["upload_bytes_total"] - row["head_bytes"]["upload_bytes_total"] == plain[name]["upload_bytes_total"]


def test_a_frozen_head_is_part_of_the_backbone_only():
    trained, frozen = (rows("fedit", labels=10, head=head)["fedit"] for head in (True, False))
    assert frozen["backbone_parameters"] == trained["backbone_parameters"]
    assert frozen["parameters"]["head"] == 0 < trained["parameters"]["head"]
    assert frozen["trained_parameters"] == trained["trained_parameters"] - trained["parameters"]["head"]


def test_without_labels_the_backbone_has_no_head():
    with_head = rows("fedit", model="vit-b-16", labels=100)["fedit"]["backbone_parameters"]
    assert rows("fedit", model="vit-b-16")["fedit"]["backbone_parameters"] == with_head - 76_900


def test_totals_over_clients_are_so_many_times_one_client_s():
    row = rows("potara", clients=7)["potara"]
    assert row["upload_bytes_all_clients"] == 7 * row["upload_bytes_total"] > 0
    assert row["download_bytes_all_clients"] == 7 * row["download_bytes_total"] > row["upload_bytes_all_clients"]
    assert "clients" not in rows("potara")["potara"]


def test_too_few_clients_for_a_method_are_refused_with_its_name():
    with pytest.raises(ConfigError, match="fedalt needs at least 2, got 1"):
        rows("fedit", "fedalt", clients=1)


def test_a_method_that_a_model_is_too_small_for_is_left_out_unless_it_is_asked_for():
    """FedMosaic wants four adapted blocks, and names-bert-fl has three."""
    assert list(rows("fedit", "fedmosaic", model="names-bert-fl", asked=["fedit"])) == ["fedit"]
    for options in ({"asked": ["fedmosaic"]}, {}):
        with pytest.raises(ModelError, match="4 blocks"):
            rows("fedit", "fedmosaic", model="names-bert-fl", **options)


def test_half_the_width_is_half_the_bytes():
    full, half = (rows("potara", wire=WireSettings(dtype))["potara"] for dtype in ("float32", "float16"))
    assert (half["bytes_per_value"], full["bytes_per_value"]) == (2, 4)
    assert 2 * half["download_bytes_total"] == full["download_bytes_total"]
    assert half["parameters"] == full["parameters"]


def test_a_merge_of_twice_the_rank_shows_in_its_slot_and_not_on_the_wire():
    plain, exact = (rows("potara", sets=sets)["potara"] for sets in ((), ("merge_space=product",)))
    assert exact["slots"]["merged"]["A"] == 2 * exact["slots"]["shared"]["A"]
    assert exact["parameters"] == plain["parameters"]
    assert exact["download_bytes_total"] == plain["download_bytes_total"]


def test_savings_count_against_the_first_method():
    """On equal widths FedSA sends half of FedIT; seen from FedSA, FedIT costs twice as much."""
    assert [row["upload_saving"] for row in with_savings([*rows("fedit", "fedsa", "local").values()])] == [0, 0.5, 1]
    assert [row["upload_saving"] for row in with_savings([*rows("fedsa", "fedit").values()])] == [0, -1]
    assert [row["upload_saving"] for row in with_savings([*rows("local", "fedit").values()])] == [None, None]
    assert "upload_saving" not in with_savings([*rows("fedit").values()])[0]


def test_stages_add_up_to_the_totals():
    row = rows("potara", sets=("rounds_fedit=4", "rounds_local=3"))["potara"]
    assert [(one["name"], one["rounds"], one["federated"]) for one in row["stages"]] == [
        ("local", 3, False),
        ("federate", 4, True),
        ("merge", 1, False),
    ]
    for way in ("upload", "download"):
        parts = sum(one["rounds"] * one[f"{way}_bytes_per_round"] for one in row["stages"])
        assert parts == row[f"{way}_bytes_total"]
