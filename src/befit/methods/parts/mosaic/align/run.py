"""Aligning every backbone's basis to the smallest one's: A first and whole, then B; a star, never a chain."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from befit.adapters.keys import join, split
from befit.adapters.pq import BASIS, polar
from befit.adapters.state import fingerprint
from befit.core.errors import ConfigError, PayloadMismatch
from befit.core.jsonfile import parse_json
from befit.core.seeds import derive_seed
from befit.core.storage import atomic_write, check_folder, read_bytes
from befit.core.values import State
from befit.core.wire import from_bytes, to_bytes
from befit.methods.parts.mosaic.align.factors import (
    DownSums,
    UpSums,
    add_batch,
    closed_form,
    losses_by_place,
    project,
    train_down,
    turn,
)
from befit.methods.parts.mosaic.align.features import Paired, Pairs
from befit.methods.parts.mosaic.align.settings import Alignment
from befit.protocol.site import ServerSite

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Aligned:
    """One backbone's basis, aligned: arrays `basis/module/A` and `/B`, and a report on the way there.

    report  by place: L2 at the `start`, `trained` (or in closed form) and `projected`; the mean canonical
            `correlation`; the `condition` of B; `tokens`
    """

    arrays: State
    report: dict[str, dict[str, float]] = field(default_factory=dict)


def aligned_bases(site: ServerSite, blocks: int, settings: Alignment) -> dict[str, State]:
    """The bases of a federation's backbones, by family: all but the pivot's, which stays. None where none is aligned.

    The pivot is the smallest backbone. What the alignment is trained on is drawn alike in all runs: what is aligned
    depends on the backbones and the public records alone, so that runs with other seeds take it from `settings.folder`.
    Raises ConfigError without backbones or public records at the server.
    """
    if settings.factors == "none":
        return {}
    if site.public is None or set(site.backbones) < set(site.families):
        raise ConfigError(["families: different backbones are aligned on public records at the server, which has none"])
    backbones = {family: site.backbones[family] for family in site.families}
    pivot = min(backbones.values(), key=lambda backbone: (backbone.parameters, backbone.fingerprint))
    bases: dict[str, State] = {}
    for family, backbone in backbones.items():
        if backbone is pivot:
            continue
        paired = Paired.of(pivot, backbone, site.public, blocks)
        aligned = align_or_load(paired, _basis(site.starts[pivot.key]), _basis(site.starts[family]), settings, seed=0)
        for place, numbers in aligned.report.items():
            _LOG.info("%s aligned to %s at %s: %s", backbone.name, pivot.name, place, numbers)
        bases[family] = aligned.arrays
    return bases


def align_or_load(paired: Paired, pivot: State, start: State, settings: Alignment, seed: int) -> Aligned:
    """From the folder of earlier alignments, if there is one of exactly this; else anew, and kept there."""
    if settings.folder is None:
        return align(paired, pivot, start, settings, seed)
    check_folder(Path(settings.folder))
    about = describe(paired, pivot, start, settings, seed)
    stored = load(settings.folder, about)
    if stored is not None:
        _LOG.info("aligned factors are taken from %s", path_of(settings.folder, about))
        return Aligned(stored)
    aligned = align(paired, pivot, start, settings, seed)
    save(settings.folder, aligned.arrays, about)
    return aligned


def describe(paired: Paired, pivot: State, start: State, settings: Alignment, seed: int) -> dict[str, Any]:
    """All that an alignment depends on, in plain data."""
    from befit.core.schema import plain

    rank = len(pivot[f"{BASIS}/{next(iter(paired.modules.values()))[0]}/A"])
    return {
        "pivot": paired.pivot.fingerprint,
        "backbone": paired.other.fingerprint,
        "bases": [fingerprint(pivot), fingerprint(start)],  # as the run's seed draws them
        "public": paired.digest(),
        "rank": rank,
        "seed": seed,
        "modules": {place: list(names) for place, names in paired.modules.items()},
        "alignment": {key: value for key, value in plain(settings).items() if key != "folder"},
    }


def align(paired: Paired, pivot: State, start: State, settings: Alignment, seed: int) -> Aligned:
    """The other backbone's A and B, aligned to the pivot's (FedMosaic, eqs. 19 to 23; Algorithms 3 and 4).

    pivot, start  initial bases, `basis/module/A` (r, d_in) and `/B` (d_out, r), all orthonormal
    Streams over the public records: only one batch of activations and the sums of the PQ modules are in memory. One
    pass is enough where A has its closed form and B sees the same records; its sums are d_j x d_j for every input, in
    float64 (see `DownSums`).
    """
    first, second = ({place: names[side] for place, names in paired.modules.items()} for side in (0, 1))
    device = paired.pivot.model.device  # where the sums are made too
    A_i, A_0 = (
        {place: A.to(device) for place, A in _of(basis, modules, "A").items()}
        for basis, modules in ((pivot, first), (start, second))
    )
    records = len(paired.examples[0])
    samples = records if settings.samples is None else min(records, settings.samples)
    draw = derive_seed(seed, "public records")

    def batches(count: int = samples) -> Iterator[Pairs]:
        return paired.batches(count, settings.batch_size, draw)

    sums = _down_sums(batches(), A_i) if settings.method == "closed" else None
    A_free = A_0
    if settings.factors != "B":
        A_free = _trained(batches, samples, A_i, A_0, settings) if sums is None else _solved(sums, settings)
    A_j = project(A_free)
    candidates = {"start": A_0, "trained": A_free, "projected": A_j}
    if sums is not None and settings.samples_up in (None, samples):
        ups = {place: sums.up(place, A) for place, A in A_j.items()}
        report = {place: {name: sums.loss(place, A[place]) for name, A in candidates.items()} for place in A_j}
    else:
        ups, report = _second_pass(batches(settings.samples_up or samples), A_i, candidates)
    arrays: State = {}
    for place, name in second.items():
        B = start[join(BASIS, name, "B")].double()
        if settings.factors != "A":  # which needs public tokens enough
            T, correlations = turn(ups[place].cpu(), settings.ridge, settings.tie)
            B, report[place] = B @ T, {**report[place], "correlation": float(correlations.mean())}
        condition = float(torch.linalg.cond(B))
        if settings.finish == "polar":
            B = polar(B)
        elif condition > 10:
            _LOG.warning(
                "PQ module %s: the aligned B has condition number %.0f; its directions learn at very different "
                "speeds, and align.finish: polar would make them equal",
                place,
                condition,
            )
        report[place] |= {
            "condition": condition,
            "tokens": float(ups[place].count),
        }
        arrays |= {join(BASIS, name, "A"): A_j[place].cpu(), join(BASIS, name, "B"): B.float().contiguous()}
    return Aligned(arrays, report)


def _down_sums(batches: Iterable[Pairs], A_i: Mapping[str, Tensor]) -> DownSums:
    sums = DownSums(torch.float32 if any(A.is_cuda for A in A_i.values()) else torch.float64)
    for pairs in batches:
        sums.add(pairs, A_i)
    return sums


def _solved(sums: DownSums, settings: Alignment) -> dict[str, Tensor]:
    """A_j of all PQ modules before the projection, in closed form."""
    return {
        place: closed_form(C_jj, sums.C_ji[place], settings.ridge, sums.precision).float()
        for place, C_jj in sums.C_jj.items()
    }


def _trained(
    batches: Callable[[], Iterator[Pairs]],
    records: int,
    A_i: Mapping[str, Tensor],
    A_0: Mapping[str, Tensor],
    settings: Alignment,
) -> dict[str, Tensor]:
    """A_j of all PQ modules before the projection, by mini-batches."""
    steps = settings.epochs * -(-records // settings.batch_size)
    stream = (pairs for _ in range(settings.epochs) for pairs in batches())
    return train_down(stream, steps, A_i, A_0, lr=settings.lr, weight=settings.weight)


def _second_pass(
    batches: Iterable[Pairs], A_i: Mapping[str, Tensor], candidates: Mapping[str, Mapping[str, Tensor]]
) -> tuple[dict[str, UpSums], dict[str, dict[str, float]]]:
    """Sums for B at the projected A, and the distances of all candidates for A."""
    sums: dict[str, UpSums] = {}
    losses = _Losses(A_i, candidates)
    for pairs in batches:
        sums = add_batch(sums, pairs, A_i, candidates["projected"])
        losses.add(pairs)
    return sums, losses.means()


class _Losses:
    """By place and candidate for A: the mean over tokens of `(X_i A_i^T - X_j A_j^T)^2`."""

    def __init__(self, A_i: Mapping[str, Tensor], candidates: Mapping[str, Mapping[str, Tensor]]) -> None:
        self._A_i, self._candidates = A_i, candidates
        self._totals = {place: dict.fromkeys(candidates, 0.0) for place in A_i}
        self._tokens = 0

    def add(self, pairs: Pairs) -> None:
        tokens = len(next(iter(pairs.values()))[0])
        self._tokens += tokens
        for name, A_j in self._candidates.items():
            for place, loss in losses_by_place(pairs, self._A_i, A_j).items():
                self._totals[place][name] += tokens * float(loss)

    def means(self) -> dict[str, dict[str, float]]:
        return {
            place: {name: total / max(1, self._tokens) for name, total in row.items()}
            for place, row in self._totals.items()
        }


def _basis(start: State) -> State:
    return {key: value for key, value in start.items() if split(key)[0] == BASIS}


def _of(basis: State, modules: Mapping[str, str], factor: str) -> dict[str, Tensor]:
    return {place: basis[join(BASIS, name, factor)] for place, name in modules.items()}


def path_of(folder: Path | str, about: Mapping[str, Any]) -> Path:
    """A file for each alignment: any number of seeds, settings and backbones share a folder."""
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()
    return Path(folder) / f"{digest[:32]}.safetensors"


def save(folder: Path | str, arrays: State, about: Mapping[str, Any]) -> None:
    """Write a backbone's aligned basis, its SHA-256 and what it depends on."""
    text = json.dumps({**about, "sha256": fingerprint(arrays)}, sort_keys=True)
    atomic_write(path_of(folder, about), to_bytes(arrays, {"about": text}))


def load(folder: Path | str, about: Mapping[str, Any]) -> State | None:
    """The basis that was saved for exactly this; None where there is none.

    Raises PayloadMismatch where the file holds anything else.
    """
    path = path_of(folder, about)
    if not path.exists():
        return None
    try:
        arrays, metadata = from_bytes(read_bytes(path), str(path))
        saved = parse_json(metadata.get("about", "{}"), str(path), PayloadMismatch)
    except PayloadMismatch as error:
        raise PayloadMismatch(f"{error}; remove the file to align anew") from error
    if saved != {**about, "sha256": fingerprint(arrays)}:
        raise PayloadMismatch(f"{path}: is not the alignment that was saved there; remove the file to align anew")
    return arrays
