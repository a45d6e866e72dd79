"""How many federated rounds a merge needs: checkpoints of one run, each merged with the same local adapter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from befit.methods.potara import weigh
from befit.report.ablation_figures import Figure, Panel
from befit.report.table import BYTES, Table, decimals, difference, score
from befit.studies.ablations.base import Findings, MergingAblation, Row, check_rounds, evenly, register
from befit.studies.ablations.seed import Client
from befit.studies.ablations.summary import curve, number, over_seeds

_RUNS = {"merged": "merged", "local": "Local, fixed", "federated": "FedIT"}


@register("potara-rounds", title="Rounds before merging", method="potara")
@dataclass(frozen=True)
class Rounds(MergingAblation):
    """Merge checkpoints of FedIT: score over rounds and bytes.

    rounds  the rounds to merge at; null takes ten, evenly spread, the last one included

    The local adapter is the same at all of them. Zou et al. 2026, Figures 2, 3a and 3b. Bytes are those
    that a client sent until then, as counted on the wire; the local branch and the merge send nothing. A checkpoint is
    of the one run, whose learning rate follows the schedule of all its rounds.
    """

    rounds: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        check_rounds(self.rounds)

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
        at = {
            round_: [row for row in rows if row["round"] == round_] for round_ in sorted({row["round"] for row in rows})
        }
        body = [
            [
                str(round_),
                over_seeds(group, "bytes_up", BYTES),
                *(over_seeds(group, name, score(metric)) for name in ("local", "federated", "merged")),
                over_seeds(group, lambda row: row["merged"] - max(row["local"], row["federated"]), difference(metric)),
                over_seeds(group, "w", decimals(2)),
            ]
            for round_, group in at.items()
        ]
        gain = "gain over each client's better one"
        headers = ["round", "sent by a client", "Local", "FedIT", "merged", gain, "mean w"]
        note = (
            "The better one of two is taken after the fact at every client, so that column is a hard comparison: "
            "zero means that merging is as good as knowing which of the two to take."
        )
        table = Table("Merging after each checkpoint", headers, body, note)
        return Findings(_sentences(at, metric), [table], _figures(rows))


def _sentences(at: dict[int, list[Row]], metric: str) -> list[str]:
    first, last = min(at), max(at)
    merged = {round_: over_seeds(rows, "merged", score(metric)) for round_, rows in at.items()}
    final, alone = (over_seeds(at[last], name, score(metric)) for name in ("federated", "local"))
    goal = max(number(final), number(alone))
    enough = next((round_ for round_, cell in merged.items() if number(cell) >= goal), None)
    return [
        f"Merged after {first} of {last} rounds clients reach {merged[first]}, after all of them {merged[last]}; FedIT "
        f"alone ends at {final}.",
        f"Local, which sends nothing, has {alone}.",
        "No merge reaches the better of Local and FedIT at the end, in the mean over clients."
        if enough is None
        else f"The first merge at least as good as both Local and FedIT at the end, in the mean over clients, is after "
        f"round {enough}: {100 * enough / last:.0f} % of the upload.",
    ]


def _figures(rows: Sequence[Row]) -> list[Figure]:
    means = {
        round_: number(over_seeds([row for row in rows if row["round"] == round_], "bytes_up"))
        for round_ in {row["round"] for row in rows}
    }
    sent = [{**row, "sent": means[row["round"]] / 1e6} for row in rows]  # so that a round is one place
    lines = {
        x: [curve(title, sent, x, name, ink) for ink, (name, title) in enumerate(_RUNS.items())]
        for x in ("round", "sent")
    }
    return [
        Figure(
            "Merging checkpoints of one FedIT run",
            "Mean over clients; bands, with several seeds: one standard deviation over them. The local "
            "adapter is the same at every checkpoint. Local sends nothing; its line is drawn for comparison.",
            [
                Panel("over rounds", lines["round"], x="FedIT rounds", score=True),
                Panel("over upload", lines["sent"], x="MB sent by a client (1 MB = 1e6 bytes)", score=True),
            ],
            columns=2,
            share_y=True,
            height=3.9,
        ),
        Figure(
            "The weight of the federated adapter over its rounds",
            "Mean over clients of the computed weight.",
            [Panel(lines=[curve("mean w", rows, "round", "w")], x="FedIT rounds", y="mean w", limits=(0, 1.02))],
            height=2.6,
        ),
    ]
