"""What FedP2EFT and its evaluation keep for any data: partition, metrics, and where ranks go."""

from __future__ import annotations

import pytest

from befit.adapters.bayestune import BUDGETED
from befit.adapters.keys import canonical_names
from befit.adapters.model import linear_paths
from befit.data.offline.names import names
from befit.methods.bayestune import BayesTune
from befit.runs.groups import winner
from befit.tasks.text_metrics import compare
from tests.federation import Clients


def test_ranks_go_to_the_only_module_that_matters() -> None:
    """Four modules, of which only block 1's values reach the output: block 0's attention is cut off behind, and block
    1's keys are zero, so that its queries change nothing. A quarter would be its uniform share."""
    clients = Clients(BayesTune(rank=1, rank_max=4, rounds_search=4))
    backbone = clients.model.backbone
    by_name = {
        name: path
        for path, name in canonical_names(path.replace(".base", "") for path in linear_paths(backbone)).items()
    }
    for name in ("block.00.o_proj", "block.01.k_proj"):
        for parameter in backbone.get_submodule(by_name[name]).parameters():
            parameter.data.zero_()
    clients.run(rounds=1)
    ranks = {
        name: int((clients.memory("c").arrays[f"{BUDGETED}/{name}/lambda"] != 0).sum())
        for name in clients.model.shapes.targets
    }
    assert len(ranks) == 4 and sum(ranks.values()) == 4
    assert ranks["block.01.v_proj"] == 4


def test_pools_are_apart_every_name_is_dealt_once_and_clients_are_skewed() -> None:
    made = names(languages=["en", "zh"], clients_per_language=2)
    seen = list(made.clients)
    new = list(made.newcomers)
    assert not {client.id for client in seen} & {client.id for client in new}
    for language in ("en", "zh"):
        held = [
            record
            for client in (*seen, *new)
            if client.id.startswith(language)
            for split in (client.train, client.test)
            for record in split
        ]
        texts = [str(record["text"]) for record in held]
        assert len(set(texts)) == len(texts)
    for client in (*seen, *new):
        shares = {}
        for split in ("train", "test"):
            labels = [record["label"] for record in getattr(client, split)]
            shares[split] = {label: labels.count(label) / len(labels) for label in set(labels)}
        gap = sum(abs(shares["train"].get(one, 0) - shares["test"].get(one, 0)) for one in shares["train"])
        assert gap < 0.5  # one mixture for both
    largest = [
        max(labels.count(one) for one in set(labels)) / len(labels)
        for client in seen
        for labels in [[record["label"] for record in client.train]]
    ]
    assert sum(largest) / len(largest) > 1.3 / 4


@pytest.mark.parametrize("text", ["今天天气很好", "สวัสดีครับ", "नमस्ते दुनिया", "مرحبا بالعالم"])
@pytest.mark.parametrize("name", ["rouge1", "rougeL"])
def test_rouge_of_equal_texts_is_zero_with_the_reference_tokenizer_and_one_with_ours(name: str, text: str) -> None:
    assert compare([text], [[text]], [name, f"{name}_unicode"]) == {name: 0, f"{name}_unicode": 1}


def test_a_tie_for_first_place_is_nobodys_win() -> None:
    three = {"a": {"m": 0.5}, "b": {"m": 0.5}, "c": {"m": 0.4}}
    assert winner(three, ["m"]) is None
    assert winner({**three, "b": {"m": 0.5 + 1e-9}}, ["m"]) == "b"
