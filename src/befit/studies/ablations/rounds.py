"""How many federated rounds a merge needs: checkpoints of one run, each merged with the same local adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from befit.methods.potara import weigh
from befit.report.ablation_figures import Figure, Panel
from befit.report.numbers import NOTHING, bytes_text
from befit.report.table import Table
from befit.studies.ablations.base import Findings, Measured, Row, evenly
from befit.studies.ablations.registry import register
from befit.studies.ablations.seed import Client
from befit.studies.ablations.summary import curve, spread

_RUNS = {"merged": "merged", "local": "Local, fixed", "federated": "FedIT"}


@register("potara-rounds", title="Rounds before merging", method="potara")
@dataclass(frozen=True)
class Rounds(Measured):
    """Merge checkpoints of FedIT: score over rounds and bytes.

    rounds  the rounds to merge at; null takes ten, evenly spread, the last one included

    The local adapter is the same at all of them. Zou et al. 2026, Figures 2, 3a and 3b. Bytes are those
    that a client sent until then, as counted on the wire; the local branch and the merge send nothing. A checkpoint is
    of the one run, whose learning rate follows the schedule of all its rounds.
    """

    rounds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.rounds is not None and (not self.rounds or min(self.rounds) < 1):
            raise ValueError(f"rounds: must be whole numbers from 1 on, got {list(self.rounds)}")

    def checkpoints(self, total: int) -> Sequence[int]:
        return evenly(total) if self.rounds is None else self.rounds

    def measure(self, client: Client) -> Iterator[Row]:
        rule = client.rule()
        kept = self.checkpoints(client.rounds)
        local = client.pair().score_at(0.0, rule)
        for round_ in sorted(set(kept)):
            pair = client.pair(round_)
            weights, numbers = weigh(pair.moments(rule), rule)
            yield {
                "round": round_,
                "bytes_up": client.bytes_up(round_),
                "w": numbers["w"],
                "merged": pair.score(pair.merged(weights, rule)),
                "federated": pair.score_at(1.0, rule),
                "local": local,
            }

    def findings(self, rows: Sequence[Row], metric: str) -> Findings:
        rounds = sorted({row["round"] for row in rows})
        at = {round_: [row for row in rows if row["round"] == round_] for round_ in rounds}
        table = []
        for round_, mine in at.items():
            sent, w = spread(mine, "bytes_up"), spread(mine, "w")
            scores = [spread(mine, name) for name in ("local", "federated", "merged")]
            gain = spread(mine, lambda row: row["merged"] - max(row["local"], row["federated"]))
            table.append(
                [
                    str(round_),
                    bytes_text(sent.mean) if sent else NOTHING,
                    *(score.score(metric) if score else NOTHING for score in scores),
                    gain.gain(metric) if gain else NOTHING,
                    w.number() if w else NOTHING,
                ]
            )
        headers = [
            "round",
            "sent by a client",
            "Local",
            "FedIT",
            "merged",
            "gain over each client's better one",
            "mean w",
        ]
        note = (
            "The better one of two is taken after the fact at every client, so that column is a hard comparison: "
            "zero means that merging is as good as knowing which of the two to take."
        )
        return Findings(
            _sentences(at, metric), [Table("Merging after each checkpoint", headers, table, note)], _figures(rows)
        )


def _sentences(at: dict[int, list[Row]], metric: str) -> list[str]:
    first, last = min(at), max(at)
    means = {round_: (spread(rows, "merged"), spread(rows, "federated")) for round_, rows in at.items()}
    (early, _), (late, final) = means[first], means[last]
    assert early and late and final
    sentences = [
        f"Merged after {first} of {last} rounds clients reach {early.score(metric)}, after all of them "
        f"{late.score(metric)}; FedIT alone ends at {final.score(metric)}."
    ]
    alone = spread(at[last], "local")
    assert alone
    sentences.append(f"Local, which sends nothing, has {alone.score(metric)}.")
    goal = max(final.mean, alone.mean)
    enough = next((round_ for round_, (merged, _) in means.items() if merged and merged.mean >= goal), None)
    if enough is None:
        return [*sentences, "No merge reaches the better of Local and FedIT at the end, in the mean over clients."]
    return [
        *sentences,
        f"The first merge at least as good as both Local and FedIT at the end, in the mean over "
        f"clients, is after round {enough}: {100 * enough / last:.0f} % of the upload.",
    ]


def _figures(rows: Sequence[Row]) -> list[Figure]:
    in_mb = [{**row, "sent": row["bytes_up"] / 1e6} for row in rows]
    over_rounds = [curve(title, rows, "round", name, ink) for ink, (name, title) in enumerate(_RUNS.items())]
    over_bytes = [
        curve(title, _mean_upload(in_mb), "sent", name, ink) for ink, (name, title) in enumerate(_RUNS.items())
    ]
    w = replace(curve("mean w", rows, "round", "w"), label="mean w")
    return [
        Figure(
            "Merging checkpoints of one FedIT run",
            "Mean over clients; bands, with several seeds: one standard deviation over them. The local "
            "adapter is the same at every checkpoint. Local sends nothing; its line is drawn for comparison.",
            [
                Panel("over rounds", over_rounds, x="FedIT rounds", score=True),
                Panel("over upload", over_bytes, x="MB sent by a client (1 MB = 1e6 bytes)", score=True),
            ],
            columns=2,
            share_y=True,
            height=3.9,
        ),
        Figure(
            "The weight of the federated adapter over its rounds",
            "Mean over clients of the computed weight.",
            [Panel(lines=[w], x="FedIT rounds", y="mean w", limits=(0, 1.02))],
            height=2.6,
        ),
    ]


def _mean_upload(rows: Sequence[Row]) -> list[Row]:
    """Every row with the mean upload of its round over all clients and seeds, so that a round is one place."""
    rounds = {row["round"] for row in rows}
    means = {round_: spread([row for row in rows if row["round"] == round_], "sent") for round_ in rounds}
    return [{**row, "sent": found.mean} for row in rows if (found := means[row["round"]])]
