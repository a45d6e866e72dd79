"""What FedMosaic sends next to plain averaging, from shapes alone, and the tables of it in docs/methods/fedmosaic.md.

Derivations from the shapes, Llama 3.2 at rank 128, every linear layer of every block:

1B  L = 16, n = 16 * 128 * sum of widths = 90,177,536;  3B  L = 28, n = 194,510,848
gradient of the small model's last projection    2048 * 8192 = 16,777,216;  / n = 8.625 % (3B), 18.605 % (1B)
40 % of its entries, or its first 819 rows       3.450 % or 3.449 %;  7.442 %
4 of L blocks without A and B                    4 / 28 = 14.286 %;  4 / 16 = 25 %
P and Q at 28 places                             28 * (128^2 + 128) = 462,336 = 0.238 %

Compute, in units of one parameter met by one token, N = 3,528,846,336 and a plain step 2N + 3n:

small model's pass, every ten steps    0.1 * 1,545,617,408; of Qwen's in its place 799,262,336 / 1,545,617,408 = 0.517
PerAda's 0.294 over Ditto              0.603 passes N + n at every step of a client: 0.294 (2N + 3n) / (N + n)
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from befit.adapters.model import model_shapes
from befit.cost.architecture import find_architecture
from befit.cost.arguments import chosen_methods
from befit.cost.compare import compare, with_savings
from befit.methods.parts.mosaic.align.memory import alignment_bytes
from befit.methods.parts.mosaic.align.settings import Alignment

SMALL, LARGE, OTHER = "llava-llama-3.2-1b", "llava-llama-3.2-3b", "llava-qwen2.5-0.5b"
ENTRIES = {SMALL: 90_177_536, LARGE: 194_510_848}
GRADIENT = 2048 * 8192
PAGE = Path(__file__).parents[2] / "docs" / "methods" / "fedmosaic.md"


@cache
def row(model: str, name: str = "fedmosaic", *settings: str, rank: int = 128, smallest: str = SMALL) -> dict[str, Any]:
    """What `befit cost --model … --smallest … --targets all --rank …` finds for a method beside FedIT."""
    chosen = chosen_methods(list(dict.fromkeys(("fedit", name))), [f"rank={rank}", *settings])
    methods = {one: method for one, (_, method) in chosen.items()}
    found = compare(find_architecture(model), methods, "all", rounds=1, smallest=find_architecture(smallest))
    return with_savings(found)[-1]


def gradient(model: str, *settings: str, rank: int = 128) -> float:
    """The gradient's share of a plain adapter, in percent."""
    return (
        100
        * row(model, "fedmosaic", *settings, rank=rank)["upload_bytes_beside_adapters"]
        / (4 * ENTRIES[model] * rank / 128)
    )


def saved(model: str, rank: int = 128) -> float:
    """What the adapters themselves are smaller by, with P and Q in them, in percent."""
    return net(model, rank=rank) + gradient(model, rank=rank)


def net(model: str, *settings: str, name: str = "fedmosaic", rank: int = 128) -> float:
    return 100 * row(model, name, *settings, rank=rank)["upload_saving"]


def test_the_gradient_is_the_papers_share_of_an_adapter() -> None:
    """8.6 % whole, 3.4 % at N_s = 40 %."""
    assert gradient(LARGE, "relevance.share=1.0") == pytest.approx(100 * GRADIENT / ENTRIES[LARGE], abs=1e-9)
    assert round(gradient(LARGE, "relevance.share=1.0"), 1) == 8.6
    assert gradient(LARGE) == pytest.approx(3.450, abs=5e-4)
    assert gradient(LARGE, "fedmosaic.relevance.mask=rows") == pytest.approx(3.449, abs=5e-4)
    assert gradient(SMALL, "relevance.share=1.0") == pytest.approx(18.605, abs=5e-4)


def test_pq_blocks_save_four_blocks_of_all_but_their_cores() -> None:
    """14.3 % without P and Q, 14.05 % with them; 10.9 % is 14.3 - 3.4, exactly 10.84 %, and with P and Q 10.60 %."""
    cores = 28 * (128**2 + 128)
    assert saved(LARGE) == pytest.approx(100 * (4 / 28 - cores / ENTRIES[LARGE]), abs=1e-6)
    assert 100 * 4 / 28 - gradient(LARGE) == pytest.approx(10.84, abs=5e-3)
    assert net(LARGE) == pytest.approx(10.60, abs=5e-3)
    sent = row(LARGE)["upload_bytes_per_round"] // 4
    assert sent == ENTRIES[LARGE] * 24 // 28 + cores + int(0.4 * GRADIENT) == 173_896_806
    assert row(LARGE, "fedmosaic", "relevance.mask=rows")["upload_bytes_per_round"] // 4 == 173_895_168


def test_a_small_client_saves_more_and_a_federation_of_both_lies_between() -> None:
    assert (round(gradient(SMALL), 2), round(net(SMALL), 2)) == (7.44, 17.05)
    clients = [SMALL] * 4 + [LARGE] * 6
    assert sum(net(one) for one in clients) / 10 == pytest.approx(13.18, abs=5e-3)  # mean of shares
    plain = sum(ENTRIES[one] for one in clients)
    assert 100 * (1 - sum(row(one)["upload_bytes_per_round"] / 4 for one in clients) / plain) == pytest.approx(
        12.12, abs=5e-2
    )  # share of all that is sent, which 12.1 % of the page is


def test_at_rank_16_it_sends_more_than_averaging() -> None:
    """The gradient does not shrink with the rank: 27.6 % and 59.5 % of an adapter at rank 16."""
    assert round(gradient(LARGE, rank=16), 1) == 27.6 and round(gradient(SMALL, rank=16), 1) == 59.5
    assert round(net(LARGE, rank=16), 1) == -13.3 and round(net(SMALL, rank=16), 1) == -34.6


def test_without_pq_blocks_nothing_is_saved_and_without_relevance_no_gradient_is_sent() -> None:
    assert net(LARGE, name="rela") == pytest.approx(-gradient(LARGE), abs=1e-9)
    assert gradient(LARGE, "mixing=nash") == 0
    assert row(LARGE)["download_bytes_per_round"] == row(LARGE, "fedmosaic", "mixing=equal")["upload_bytes_per_round"]


def small_pass(smallest: str) -> float:
    """What RELA's passes of the frozen small model cost, in steps of plain fine-tuning."""
    return row(LARGE, "rela", smallest=smallest)["compute"] - row(LARGE, "rela", "mixing=equal")["compute"]


def other_small_model(bits: int) -> float:
    """Table 31: Qwen 0.5B for the gradients in place of Llama 1B in 16 bits, if a pass costs by the bits of weights."""
    return bits / 16 * small_pass(OTHER) / small_pass(SMALL)


def perada(clients: int = 10, steps: int = 50, batch: int = 4) -> float:
    """A step of PerAda with its part of what the server computes in a round, shared among clients and their steps."""
    found = row(LARGE, "perada")
    public = found["public_records"]
    return found["compute"] + (public["server"] + clients * public["each"]) / (clients * steps * batch)


def test_another_small_model_costs_what_its_parameters_and_bits_say() -> None:
    """Table 31 has 0.52, 0.26 and 0.13; language models alone would be 494,032,768 / 1,235,814,400 = 0.40."""
    assert [round(other_small_model(bits), 2) for bits in (16, 8, 4)] == [0.52, 0.26, 0.13]
    assert other_small_model(16) == pytest.approx(799_262_336 / 1_545_617_408, abs=1e-9)
    assert small_pass(SMALL) == pytest.approx(0.1 * 1_545_617_408 / (2 * 3_528_846_336 + 3 * ENTRIES[LARGE]), abs=1e-9)


def test_perada_is_ditto_and_what_the_server_computes_on_public_records() -> None:
    """80 records through the student, 2N + 3n, and through ten clients' models, N + n each: over 10 * 50 * 4 records
    that clients train on. The paper's 0.294 would be 0.603 passes N + n for each of a client's steps."""
    N, n = 3_528_846_336, ENTRIES[LARGE]
    forward = (N + n) / (2 * N + 3 * n)
    assert row(LARGE, "perada")["compute"] == row(LARGE, "ditto")["compute"] == 2
    assert perada() == pytest.approx(2 + (80 + 10 * 80 * forward) / 2000, abs=1e-9)
    assert 0.294 / forward == pytest.approx(0.603, abs=5e-4)


def table(title: str) -> list[list[str]]:
    """Cells of the rows of the first table below a heading of the page."""
    text = PAGE.read_text(encoding="utf-8").split(f"## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| (.*) \|$", text, re.MULTILINE)
    return [[cell.strip() for cell in one.split(" | ")] for one in rows[1:] if not one.startswith("-")]


@pytest.mark.parametrize("cells", table("What it costs"), ids=lambda cells: cells[0])
def test_the_page_has_what_the_shapes_give(cells: list[str]) -> None:
    """Every row of the page's table, by its first cell; the second is the paper's figure, the third befit's."""
    computed = {
        "gradient, whole": f"{gradient(LARGE, 'relevance.share=1.0'):.2f} %",
        "gradient, 40 % of it": f"{gradient(LARGE):.2f} %",
        "saved by PQ-LoRA": f"{saved(LARGE):.2f} %",
        "saved in all": f"{net(LARGE):.2f} %",
        "saved in all, 1B client": f"{net(SMALL):.2f} %",
        "saved in all, rank 16": f"{net(LARGE, rank=16):.1f} %",
        "saved in all, rank 16, 1B client": f"{net(SMALL, rank=16):.1f} %",
        "compute of a step, FedMosaic": f"{row(LARGE)['compute']:.3f}",
        "compute of a step, RELA": f"{row(LARGE, 'rela')['compute']:.3f}",
        "compute of a step, SFT": f"{row(LARGE, 'local')['compute']:.3f}",
        "compute of a step, FedIT": f"{row(LARGE, 'fedit')['compute']:.3f}",
        "compute of a step, PerAda's clients": f"{row(LARGE, 'perada')['compute']:.3f}",
        "compute of a step, PerAda with its server": f"{perada():.3f}",
        "pass of the small model, Qwen 0.5B": f"{other_small_model(16):.2f}",
        "pass of the small model, Qwen 0.5B, 8 bits": f"{other_small_model(8):.2f}",
        "pass of the small model, Qwen 0.5B, 4 bits": f"{other_small_model(4):.2f}",
        "memory, SFT, FedIT": f"{row(LARGE, 'local')['memory']:.3f}",
        "compute of a step, Ditto": f"{row(LARGE, 'ditto')['compute']:.3f}",
        "compute of a step, FedSim": f"{row(LARGE, 'fedsim')['compute']:.3f}",
        "compute of a step, FedDPA": f"{row(LARGE, 'feddpa', 'variant=halves')['compute']:.3f}",
        "compute of a step, FedDAT": f"{row(LARGE, 'feddat')['compute']:.3f}",
        "memory, Ditto, FedSim, FedDPA, PerAda": f"{row(LARGE, 'fedsim')['memory']:.3f}",
        "memory, FedDAT": f"{row(LARGE, 'feddat')['memory']:.3f}",
        "memory, FedMosaic": f"{row(LARGE)['memory']:.3f}",
    }
    assert computed[cells[0]] == cells[2]
    assert len({row(LARGE, one)["memory"] for one in ("ditto", "fedsim", "perada")}) == 1
    assert row(LARGE, "feddpa", "variant=halves")["memory"] == row(LARGE, "fedsim")["memory"]
    assert row(LARGE, "fedit")["memory"] == row(LARGE, "local")["memory"]
    assert len(table("What it costs")) == len(computed)


def test_an_alignment_passes_the_public_records_once_through_both_models() -> None:
    """5,000 records: (1,545,617,408 + 3,528,846,336) / (2 N + 3 n) of a step of plain fine-tuning each; nothing where
    the models are one, and nothing for RELA."""
    expected = 5000 * (1_545_617_408 + 3_528_846_336) / (2 * 3_528_846_336 + 3 * ENTRIES[LARGE])
    assert row(LARGE)["public_records"]["opening"] == pytest.approx(expected, rel=1e-6)
    assert expected == pytest.approx(3320.45, abs=0.01)
    assert row(SMALL)["public_records"] is None and row(LARGE, "rela")["public_records"] is None
    trained = row(LARGE, "fedmosaic", "align.method=train", "align.epochs=2")["public_records"]
    assert trained["opening"] == pytest.approx(3 * expected, rel=1e-6)  # two epochs, and once more for B


def test_an_alignment_holds_sums_of_products_and_two_batches_of_both_models() -> None:
    """At four blocks of the 3B model `C_jj` has 4 (3 * 3072^2 + 8192^2) numbers in float64, 3.05 GB; of the 8B model
    4 (3 * 4096^2 + 14336^2), 8.2 GB. 16 records of 800 tokens are 6.5 GB in float32, of the 3B and the 1B model."""
    shapes = {
        name: model_shapes(find_architecture(name).skeleton(1), "all", head=False)
        for name in ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b")
    }
    two, closed = {name: shapes[name] for name in ("llama-3.2-3b", "llama-3.2-1b")}, Alignment()
    batch = 16 * 800 * 4 * 4 * (3 * 3072 + 8192 + 3 * 2048 + 8192)
    sums = 8 * 4 * (3 * 3072**2 + 8192**2)
    projected = 8 * 4 * (6 * 3072 + 8192) * 128
    assert alignment_bytes(two, 128, 4, closed, 800) == sums + projected + 2 * batch
    assert (sums / 1e9, batch / 1e9) == (pytest.approx(3.05, abs=0.01), pytest.approx(6.5, abs=0.05))
    assert alignment_bytes(two, 128, 4, Alignment(method="train"), 800) == 2 * batch
    eight = alignment_bytes(shapes, 128, 4, Alignment(batch_size=1), 1)  # the largest of several alignments
    assert (
        eight / 1e9 == pytest.approx(8 * 4 * (3 * 4096**2 + 14336**2) / 1e9, rel=0.03) == pytest.approx(8.2, rel=0.03)
    )
    assert alignment_bytes({"one": shapes["llama-3.2-3b"]}, 128, 4, closed, 800) == 0
