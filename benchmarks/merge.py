"""Merging one module: KnOTS and Iso-C in low-rank form against dense textbook forms, and rules that PEFT has as well.

Everything starts from the clients' factors and ends with an adapter of the same rank. The dense forms are float32, as
textbooks and the public code run them; befit decomposes in float64. `--small` runs sizes that take a second.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from befit.merge.merge import Merge
from befit.merge.rules import ClientTensors, Elementwise, apply_elementwise
from befit.merge.spaces import ModuleUpdates, merge_factors, merge_updates
from befit.merge.update import finish
from common import publish, spread

CLIENTS = 10
DENSITY = 0.2
Pairs = list[tuple[Tensor, Tensor]]


def clients(size: int, rank: int) -> Pairs:
    """Factors as after training: one common A that each client changed a little."""
    random = torch.Generator().manual_seed(size + rank)
    common = torch.randn(rank, size, generator=random) / size**0.5
    return [
        (
            0.01 * torch.randn(size, rank, generator=random),
            common + 0.2 * torch.randn(rank, size, generator=random) / 64,
        )
        for _ in range(CLIENTS)
    ]


def low_rank(how: Merge, pairs: Pairs) -> tuple[Tensor, Tensor]:
    """befit's merge of one module, to an adapter of the clients' rank."""
    modules = [ModuleUpdates("m", pairs, [1.0] * len(pairs))]
    weights = [1.0] * len(pairs)
    if how.space == "factors":
        [(_, (B, A))] = merge_factors(lambda: modules, how.rule_value, weights, generator, how.scale)
        return B, A
    [(_, update)] = merge_updates(lambda: modules, how.coordinates, how.rule_value, weights, generator, how.scale)
    done = finish(update, len(pairs[0][1]), 1.0, torch.Generator().manual_seed(0))
    return done.B.float(), done.A.float()


def generator(client: int, name: str) -> torch.Generator:
    return torch.Generator().manual_seed(client)


def dense_knots_ties(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The decomposition of all updates side by side, TIES on Sigma V, and the decomposition of what comes back."""
    width = pairs[0][1].shape[1]
    u, sigma, vh = torch.linalg.svd(torch.cat([B @ A for B, A in pairs], dim=1), full_matrices=False)
    kept = int((sigma > 1e-5 * sigma[0]).sum())
    parts = list((sigma[:kept, None] * vh[:kept]).split(width, dim=1))
    rule = Elementwise("trim", DENSITY, "sum")
    [(_, merged)] = apply_elementwise(rule, lambda: [ClientTensors("m", parts)], [1.0] * len(parts), generator)
    return truncated(u[:, :kept] @ merged, len(pairs[0][1]))


def dense_iso_c(pairs: Pairs) -> tuple[Tensor, Tensor]:
    """The decomposition of the dense mean, its first `rank` values replaced by their mean."""
    u, sigma, vh = torch.linalg.svd(torch.stack([B @ A for B, A in pairs]).mean(0), full_matrices=False)
    rank = len(pairs[0][1])
    level = sigma[:rank].mean().sqrt()
    return u[:, :rank] * level, level * vh[:rank]


def truncated(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    u, sigma, vh = torch.linalg.svd(delta, full_matrices=False)
    root = sigma[:rank].sqrt()
    return u[:, :rank] * root, root[:, None] * vh[:rank]


class One(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.linear = nn.Linear(size, size, bias=False)


def peft_merge(kind: str, pairs: Pairs) -> Callable[[], tuple[Tensor, Tensor]]:
    """`add_weighted_adapter` with weights 1/K (for ties K times that: it divides by the count), without its set-up."""
    import peft

    rank, size = pairs[0][1].shape
    config = peft.LoraConfig(r=rank, lora_alpha=rank, target_modules=["linear"])
    model: Any = peft.get_peft_model(One(size), config, adapter_name="0")  # type: ignore[arg-type]
    for k in range(1, len(pairs)):
        model.add_adapter(str(k), config)
    layer = model.base_model.model.linear
    for k, (B, A) in enumerate(pairs):
        layer.lora_B[str(k)].weight.data, layer.lora_A[str(k)].weight.data = B.clone(), A.clone()
    names = [str(k) for k in range(len(pairs))]
    share = 1.0 if "ties" in kind else 1 / len(pairs)
    options = {"density": DENSITY} if "ties" in kind or "dare" in kind else {}
    if kind.endswith("svd"):
        options |= {"svd_rank": rank, "svd_full_matrices": False}

    def run() -> tuple[Tensor, Tensor]:
        if "merged" in model.peft_config:
            model.delete_adapter("merged")
        model.add_weighted_adapter(names, [share] * len(names), "merged", combination_type=kind, **options)
        return layer.lora_B["merged"].weight.data, layer.lora_A["merged"].weight.data

    return run


def timed(run: Callable[[], tuple[Tensor, Tensor]], repeats: int) -> tuple[dict[str, float], Tensor]:
    """Seconds, without a first run where there are several, and the product of the last result."""
    if repeats > 1:
        run()
    seconds: list[float] = []
    product = torch.empty(0)
    for _ in range(repeats):
        began = time.perf_counter()
        B, A = run()
        seconds.append(time.perf_counter() - began)
        product = B @ A
    return spread(seconds), product


# Rules of befit beside what does the same: name, merge, what it is compared with, and whether the results must agree.
DENSE = [
    ("KnOTS, TIES", Merge(space="knots", rule="ties", density=DENSITY), dense_knots_ties, True),
    ("Iso-C", Merge(space="knots", rule="iso-c"), dense_iso_c, True),
]
PEFT = [
    ("mean of updates, cut to rank", Merge(space="delta"), "svd", True),
    ("TIES on updates, cut to rank", Merge(space="delta", rule="ties", density=DENSITY), "ties_svd", True),
    ("TIES on factors", Merge(rule="ties", density=DENSITY), "ties", False),
    ("DARE on factors", Merge(rule="dare", density=DENSITY), "dare_linear", False),
]


def compare(
    name: str,
    how: Merge,
    other: Callable[[], tuple[Tensor, Tensor]],
    pairs: Pairs,
    against: str,
    repeats: int,
    other_repeats: int,
    same: bool,
) -> dict[str, Any]:
    mine, found = timed(lambda: low_rank(how, pairs), repeats)
    its, expected = timed(other, other_repeats)
    rank, size = pairs[0][1].shape
    off = float((found - expected).norm() / expected.norm()) if same else None
    row = {
        "what": name,
        "size": size,
        "rank": rank,
        "against": against,
        "befit_s": mine,
        "other_s": its,
        "other_runs": other_repeats,
        "relative_difference": off,
    }
    print(row, flush=True)
    return row


def times(ratio: float) -> str:
    return f"**{ratio:.1f}**" if ratio < 10 else f"**{ratio:.0f}**"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="small sizes, printed and not published")
    parser.add_argument("--sizes", type=int, nargs="+", default=[1024, 2048, 4096])
    parser.add_argument("--peft-sizes", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--dense-repeats", type=int, default=1, help="of the dense forms, which take minutes at 4096")
    options = parser.parse_args()
    if options.small:
        options.sizes, options.peft_sizes, options.ranks, options.repeats = [128], [128], [4], 3
    rows: list[dict[str, Any]] = []
    for size in options.sizes:
        for rank in options.ranks:
            pairs = clients(size, rank)
            for name, how, dense, same in DENSE:
                run = lambda dense=dense, pairs=pairs: dense(pairs)  # noqa: E731
                rows.append(compare(name, how, run, pairs, "dense", options.repeats, options.dense_repeats, same))
    for size in options.peft_sizes:
        pairs = clients(size, options.ranks[-1])
        for name, how, kind, same in PEFT:
            repeats = options.dense_repeats if kind.endswith("svd") else options.repeats
            mine = repeats if how.space == "delta" and how.rule == "ties" else options.repeats
            run = peft_merge(kind, pairs)
            rows.append(compare(name, how, run, pairs, f"PEFT `{kind}`", mine, repeats, same))
    if options.small:
        return
    publish(
        "merge",
        "Merging one module",
        f"{CLIENTS} clients, one square module, from factors to an adapter of the same rank. Medians of "
        f"{options.repeats} runs for befit and the rules on factors, {options.dense_repeats} for methods that "
        "decompose dense matrices; none is extrapolated. befit decomposes in float64, the others in float32. TIES on "
        "updates forms dense matrices in befit too. The difference is between merged updates, where both do the "
        "same.",
        ["merge", "size", "rank", "befit (ms)", "against", "theirs (ms)", "ratio", "relative difference"],
        [
            [
                row["what"],
                str(row["size"]),
                str(row["rank"]),
                f"{1e3 * row['befit_s']['median']:.1f}",
                row["against"],
                f"{1e3 * row['other_s']['median']:.1f}",
                times(row["other_s"]["median"] / row["befit_s"]["median"]),
                "-" if row["relative_difference"] is None else f"{row['relative_difference']:.0e}",
            ]
            for row in rows
        ],
        rows,
    )


if __name__ == "__main__":
    main()
