"""Sentences and facts that report.md and report.html share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from befit.data.long_prompts import left_out_sentence
from befit.protocol.weights import dominating
from befit.report.comparison import is_paired, run_title
from befit.report.diagnostics import choice_notes, shares
from befit.report.numbers import counts_examples, listing, plain
from befit.report.record import RunRecord
from befit.report.results import RunResults, baseline_labels, failures_of, split_name
from befit.report.tables import updates_differ

GROUPS_SHOWN = 25  # lists of outbound entries that are written out; with many clients each list may differ a little

_GAIN_NOTE = "Gains are in points where scores are percentages."
_BEST_NOTE = "“Best” is the baseline that is best on these same examples; before the test, nobody can pick it."
_ERROR_NOTE = (
    "± s.e. of a difference is binomial: the standard error of a difference of two independent shares, each of that "
    "many examples, √2 times that of one share. Both models see the same examples, so it is rather too large. It "
    "is smoothed (two right and two wrong examples added), so that a perfect score is not taken for certain. A gain "
    "within two of these is no clear difference and has no colour."
)
_PAIRED_NOTE = (
    "± s.e. of a difference is paired by example: both models see the same examples, and it counts those on which they "
    "differ (McNemar's, with half an example added to each of its four cells, so that models that agree are not taken "
    "for certain). A gain within two of these is no clear difference and has no colour."
)
_MEAN_NOTE = (
    "The standard error over clients, in the summary, is the standard deviation of the clients' gains divided by the "
    "square root of their number; a mean whose 95 % interval by Student's t has zero in it is no clear difference (of "
    "ten clients, a mean within 2.3 of these, of three within 4.3), and below three clients there is none. Neither "
    "covers the seed of the training: only further seeds tell about that."
)
_MAJORITY_NOTE = (
    "The most frequent class is that of the client's own training examples, as the answer to everything: a model that "
    "scores no higher is no better than that."
)
_UPDATES_NOTE = (
    "Updates are the rounds of exchanges in which the client's update was used; personal stages count only where a "
    "method has no exchanges."
)
COMMUNICATION_NOTE = (
    "Bytes as encoded for the wire; 1 MB is 1e6 bytes. Up is from the clients to the server. Scoring is extra traffic "
    "to draw curves, and is not part of the method. Exchanges that failed are counted in up and down."
)
COST_NOTE = (
    "Counted from shapes, as befit cost does: 1 is a step of fine-tuning one adapter of that method's own rank, so "
    "rows of other ranks have other units. Public records are those of a round, in records of such fine-tuning. What a "
    "run took is in the table of its stages."
)
OVER_TIME_NOTE = (
    "Own: each client's model on its own test examples; others: on those of all other clients, mean over clients. Over "
    "time is the mean over all rounds that were scored, last the final one. Others are measured where all clients are "
    "on one machine; no example travels for it."
)
_OUTBOUND_NOTE = (
    "Counted at the client, from every message as encoded, before it was handed over. Single values are texts and "
    "numbers, counted with the longest encoding that occurred. A stage that is not listed sent nothing."
)


def client_notes(results: RunResults) -> list[str]:
    """What the columns of the clients' table mean, as far as it has them: a paragraph each."""
    compared, paired = bool(baseline_labels(results)), is_paired(results)
    notes = (
        (_GAIN_NOTE, compared),
        (_BEST_NOTE, len(baseline_labels(results)) > 1),
        (_PAIRED_NOTE, compared and paired),
        (_ERROR_NOTE, compared and not paired and counts_examples(results["metric"])),
        (_MEAN_NOTE, compared),
        (_MAJORITY_NOTE, any("majority" in row for row in results["clients"].values())),
        (_UPDATES_NOTE, updates_differ(results)),
        *((shown["text"], len(shown["keys"]) > 1) for shown, _ in shares(results)),
    )
    return [note for note, needed in notes if needed] + choice_notes(results)


def failure_note(results: RunResults) -> str:
    """What a failure did to the run."""
    failures = failures_of(results, scoring=False)
    stages = {failure["stage"] for failure in failures if failure["client"] in results["clients"]}
    notes = (
        ("A newcomer that failed has no model.", any(each["client"] not in results["clients"] for each in failures)),
        ("A client that failed was left out of that round; the round went on without it.", bool(stages - {"export"})),
        (
            "Where the stage says score, a client told none then, or has no model yet; that alone is missing, and its "
            "training counts as ever.",
            bool(failures_of(results, scoring=True)),
        ),
        ("A client that failed in the export has no adapter in this directory.", "export" in stages),
    )
    return " ".join(note for note, needed in notes if needed)


def facts(results: RunResults) -> list[tuple[str, str]]:
    """What was run, as name and value."""
    partition = results.get("partition")
    if isinstance(partition, Mapping):  # the manifest of a benchmark: its plain values
        partition = ", ".join(
            f"{key} {value}" for key, value in partition.items() if not isinstance(value, dict | list)
        )
    counts = {client: row.get("train_examples", 0) for client, row in results["clients"].items()}
    families = {client: row["family"] for client, row in results["clients"].items() if "family" in row}
    entries = {
        "method": run_title(results["method"]),
        "baselines": ", ".join(map(run_title, results.get("baselines") or {})) or "none",
        "task": results.get("task"),
        "model": results.get("model"),
        "data": results.get("data"),
        "clients": len(results["clients"]),
        "newcomers": len((results.get("newcomers") or {}).get("clients", {})) or None,
        "metric": f"{results['metric'].replace('_', ' ')} on {split_name(results)} examples",
        "seed": results.get("seed"),
        "partition": partition,
        "weights": "; ".join(dominating(counts, families)),
        "training data": left_out_sentence(results["left_out"]) if "left_out" in results else None,
    }
    return [(name, plain(str(value))) for name, value in entries.items() if value not in (None, "")]


def outbound_note(record: RunRecord) -> str:
    """What the lists of outbound entries are, and where those of the baselines are."""
    method = run_title(record.results["method"])
    baselines = [
        f"baselines/{label}"
        for label in baseline_labels(record.results)
        if (record.path / "baselines" / label / "outbound.json").is_file()
    ]
    elsewhere = f" For the baselines see outbound.json in {listing(baselines)}." if baselines else ""
    return f"This is what left in the run of {method}. {_OUTBOUND_NOTE}{elsewhere}"


def group_title(clients: Sequence[str]) -> str:
    """Whose list it is: all names up to five, else the first three and how many more."""
    if len(clients) <= 5:
        return ", ".join(clients)
    return f"{', '.join(clients[:3])} and {len(clients) - 3} more, all alike"
