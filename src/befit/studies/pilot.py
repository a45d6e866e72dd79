"""A pilot on a user's own data: whether federating is likely to pay at each site, with what, and how sure that is.

A few rounds of training alone, of averaging and of two personalised methods, compared on validation examples, which
both models of a pair see; no test example is used.
"""

from __future__ import annotations

import logging
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from befit.config.experiment import NO_CHOICE, Experiment, run_names, to_dict
from befit.config.load import load_experiment
from befit.config.parse import sized_like
from befit.core.errors import ConfigError
from befit.core.names import method_folder
from befit.core.storage import read_json, read_sealed, write_json
from befit.data.federation import Federation
from befit.data.folds import folds_of, folds_sentence
from befit.data.limit import limit_sentence
from befit.protocol.registry import ALONE, standard_method
from befit.report.comparison import paired_error, run_title
from befit.report.numbers import bytes_text, count_text, gain_text, listing, score_of
from befit.runs.directory import METHOD_RESULTS
from befit.runs.host import Host
from befit.runs.journal import Observer
from befit.runs.loading import load_federation
from befit.runs.runner import run
from befit.studies.effects import Effect, together
from befit.tasks import get_task

# What a user would deploy in its place: one model for all, one of each client's own beside it, and the two merged, by
# some weights of the federated one.
PERSONALISED, MERGED = "feddpa", "interpolation"
WEIGHTS = (0.5, 0.25, 0.75)
SURE = 0.9  # of a probability, before anything is called likely; shared among the methods that are compared
RISING = 0.01  # of the metric in the last part of a pilot: more rounds would change the numbers
POINTS = 4  # of a curve
LEAST_ROUNDS = 2
EVERYBODY = {"cohort": None, "asynchronous": None, "patience": None}  # in every round, to the last
ENOUGH = 1 / 3  # of the run's rounds, that every fold of a pilot should have
MOST_FOLDS = 5
_LOG = logging.getLogger(__name__)
_MINUTES = 5.0
SIZE = "size.json"  # of a pilot that has begun: its rounds and folds, which its first round may have decided
LEAST_EXAMPLES = 30  # held out at all sites together, in any fold, below which nothing is called likely
PILOT = "pilot"  # folder of the first fold; those of the others end with a number
Each = Sequence[float] | str
PAYS, NOT, UNSURE = "pays", "does not pay", "cannot tell"


def pilot(
    source: Experiment | Mapping[str, Any] | Path | str,
    out: Path | str,
    overrides: Sequence[str] = (),
    minutes: float | None = None,
    rounds: int | None = None,
    folds: int | None = None,
    observer: Observer | None = None,
) -> dict[str, Any]:
    """Run the pilot and say what follows; also in `out`/plan.json, beside the runs themselves in `out`/pilot, and
    `out`/pilot-2 and so on for further folds.

    source   a configuration; its data, model and training are used, and rank and alpha of its method
    minutes  about how long it may take in all; the first round says how many rounds and folds follow. None: five
    rounds   how many rounds, whatever they take; no more than federation.rounds
    folds    how often it is repeated, each time with other examples held out (`evaluate.fold`); None: as often as the
             data allow, up to `MOST_FOLDS`, and the time, where that decides the rounds too

    Raises ConfigError with privacy, where a client holds no examples out, or where the headline is no mean over
    examples.
    """
    given = {"--minutes": minutes, "--rounds": rounds, "--folds": folds}
    if wrong := [f"{flag}: must be positive, got {of:g}" for flag, of in given.items() if of is not None and of <= 0]:
        raise ConfigError(wrong, "the command")
    experiment, out, began = load_experiment(source, overrides), Path(out), time.monotonic()
    most = experiment.federation.rounds
    if rounds is not None and rounds > most:
        raise ConfigError([f"--rounds: {rounds} are more than the run itself has, federation.rounds: {most}"])
    federation = _comparable(experiment)
    rounds, folds = _size_of(out, experiment, federation, rounds, folds, minutes, began)
    found: list[dict[str, Mapping[str, Any]]] = []
    metric = ""
    for fold in range(folds):
        piloted, path = _piloted(experiment, rounds, federation, fold), out / (f"{PILOT}-{fold + 1}" if fold else PILOT)
        if observer:
            name, *others = run_names(piloted)
            title = f"{experiment.name}: a pilot, fold {fold + 1} of {folds}"
            observer({"kind": "planned", "runs": [*others, name], "title": title})
        results, metric = _played(piloted, path, None if fold else federation, observer)
        found.append(with_weights_chosen(results, metric))
    answer = conclude(over_folds(found, metric), metric)
    answer = {
        "name": experiment.name,
        "metric": metric,
        "split": "val",
        "rounds": rounds,
        "of_rounds": most,
        "folds": folds,
        "seconds": time.monotonic() - began,
        "limit": limit_sentence(asdict(experiment.limit)),
        **answer,
    }
    answer["sentences"] = sentences(answer)
    write_json(out / "plan.json", answer)
    return answer


def _comparable(experiment: Experiment) -> Federation:
    """The data of a configuration. Raises ConfigError where its methods could not be compared on validation examples
    of every client."""
    if experiment.privacy.unit != "none":
        text = (
            "privacy.unit: the rounds of a pilot would spend epsilon of their own, and be given less noise than more "
            "rounds are; plan without it (privacy=null), and see what noise costs with befit compare"
        )
        raise ConfigError([text])
    if experiment.evaluate.fold:
        raise ConfigError(["evaluate.fold: a pilot takes the folds in turn; set it to 0"])
    federation = load_federation(experiment)
    if empty := [client.id for client in federation.clients if not client.val]:
        text = (
            f"a pilot compares on validation examples, and {len(empty)} of {len(federation.clients)} clients have "
            f"none, first {empty[0]}; data.val_fraction=0.2 holds a fifth of the training examples out, of a benchmark "
            "that has it benchmark.val_fraction=0.2"
        )
        raise ConfigError([text])
    return federation


def _size_of(
    out: Path,
    experiment: Experiment,
    federation: Federation,
    rounds: int | None,
    folds: int | None,
    minutes: float | None,
    began: float,
) -> tuple[int, int]:
    """Rounds and folds: those of the pilot that has begun in `out`, those asked for, or what fits into the minutes
    after `began`, a time of the monotonic clock. Raises ConfigError where others are asked for than have begun, or than
    the data give."""
    seed = experiment.federation.seed
    fewest = min(federation.clients, key=lambda client: folds_of(client, seed))
    possible = min(MOST_FOLDS, folds_of(fewest, seed))
    if folds is not None and folds > possible:
        why = folds_sentence(fewest, seed)
        raise ConfigError([f"--folds: {folds} are more than the data give: {why}, and {MOST_FOLDS} are the most"])
    if (out / SIZE).exists() and (out / PILOT / "config.yaml").exists():  # or nothing has begun yet
        begun = read_json(out / SIZE)
        for name, wanted in (("rounds", rounds), ("folds", folds)):
            if wanted not in (None, begun[name]):
                text = f"--{name}: {out} holds a pilot of {count_text(begun[name], name.rstrip('s'))}"
                raise ConfigError([f"{text}; name another --out, or remove it"])
        if minutes not in (None, begun.get("minutes", minutes)):
            _LOG.warning(
                "%s holds a pilot of %s, which --minutes %g does not change; for a longer or shorter one name another "
                "--out, or remove it",
                out,
                count_text(begun["rounds"], "round"),
                minutes,
            )
        return min(begun["rounds"], experiment.federation.rounds), begun["folds"]
    if rounds is None:
        fits = _fits(experiment, federation, out / "first-round", began + 60 * (minutes or _MINUTES))
        rounds, folds = _fitting(
            experiment.federation.rounds, possible if folds is None else folds, folds is None, fits
        )
    folds = folds or possible
    write_json(out / SIZE, {"rounds": rounds, "folds": folds, "minutes": minutes or _MINUTES})
    return rounds, folds


def _played(
    piloted: Experiment, path: Path, federation: Federation | None, observer: Observer | None
) -> tuple[dict[str, Mapping[str, Any]], str]:
    """One fold's results by run, and its metric. The backbone is gone afterwards."""
    host = Host(piloted, federation)
    run(host.experiment, out=path, host=host, observer=observer, resume=path.exists())
    results = results_of(path, host.experiment)
    _check_paired(results, host.task.metric)
    return results, host.task.metric


def _fits(experiment: Experiment, federation: Federation, path: Path, end: float) -> Callable[[int], int]:
    """How many rounds each of so many folds can have until `end`: a first round is run in `path` and timed."""
    began = time.monotonic()
    host = Host(_piloted(experiment, 1, federation), federation)
    first = run(host.experiment, out=path, host=host, quiet=True, resume=path.exists())
    _check_paired(results_of(first.path, host.experiment), host.task.metric)
    whole, left = time.monotonic() - began, end - time.monotonic()
    others = first.results["baselines"].items()  # type: ignore[typeddict-item]
    summaries = [first.results["summary"], *(of for label, of in others if not _is_merge(label))]
    training = max(1e-3, sum(summary.get("seconds", 0.0) for summary in summaries))  # merges train nothing more
    return lambda folds: int((left / folds - max(0.0, whole - training)) / training)


def _fitting(most: int, folds: int, fewer: bool, fits: Callable[[int], int]) -> tuple[int, int]:
    """As many folds as can each have a share `ENOUGH` of the run's rounds, and as many rounds as fit then.

    most   rounds of the run
    fewer  whether there may be fewer folds than `folds`
    """
    while fewer and folds > 1 and fits(folds) < math.ceil(ENOUGH * most):
        folds -= 1
    return min(most, max(LEAST_ROUNDS, fits(folds))), folds


def results_of(path: Path, experiment: Experiment) -> dict[str, Mapping[str, Any]]:
    """By run of a pilot in `path`, what its method.json holds."""
    name, *labels = run_names(experiment)
    return {label: read_sealed(method_folder(path, label, name) / METHOD_RESULTS) for label in (*labels, name)}


def _check_paired(results: Mapping[str, Mapping[str, Any]], metric: str) -> None:
    if not all(row.get("each") for of_run in results.values() for row in of_run["clients"].values()):
        text = (
            f"the headline {metric} is no mean over examples, or a client has no score, so nothing can be paired by "
            "example; for texts evaluate.generate: true or evaluate.metrics gives one that is"
        )
        raise ConfigError([text])


def _piloted(experiment: Experiment, rounds: int, federation: Federation, fold: int = 0) -> Experiment:
    """The pilot's own experiment: four methods, one with several weights, scored on validation examples. Classes are
    scored by accuracy, since the other metrics of classes are no means over examples."""
    values = to_dict(experiment)
    evaluate = {"split": "val", "fold": fold, "every": math.ceil(rounds / POINTS)}
    evaluate |= {"newcomers": False, "others": "never"}
    evaluate |= {"metrics": ["accuracy"], "wins": None} if get_task(federation.task).has_classes else {}
    return load_experiment(
        {
            **values,
            "name": f"{experiment.name}-plan",
            "method": sized_like(PERSONALISED, experiment.method),
            "baselines": [ALONE, standard_method(), *({"name": MERGED, "w": w} for w in WEIGHTS)],
            "federation": {**values["federation"], "rounds": rounds, **EVERYBODY, **NO_CHOICE},
            "evaluate": {**values["evaluate"], **evaluate},
            "engine": {} if experiment.engine.kind != "local" else values["engine"],
            "report": {"plots": False},
            "trackers": [],
            "checkpoint": {},
        }
    )


def _is_merge(label: str) -> bool:
    return label == MERGED or label.startswith(f"{MERGED}-")


def with_weights_chosen(results: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, Mapping[str, Any]]:
    """The runs of a pilot, with one in place of those of `MERGED`: at each site the weight is chosen by held-out data,
    and examples that choose are none that are scored.

    Half of a site's examples, every other one, is scored by the model with the highest score on the other half, of
    those with the weights that were tried, training alone and one model for everybody (0 and 1); of equal ones by
    that whose weight is nearest to one half, and of two such the smaller. Rounds and bytes are those of one half.
    """
    merges = [label for label in results if _is_merge(label)]
    by_weight = dict(zip(WEIGHTS, merges, strict=True)) | {0.0: ALONE, 1.0: standard_method()}
    order = [by_weight[w] for w in sorted(by_weight, key=lambda w: (abs(w - 0.5), w))]
    rows: dict[str, dict[str, Any]] = {}
    for client, row in results[order[0]]["clients"].items():
        each = {label: [float(one) for one in results[label]["clients"][client]["each"]] for label in order}
        halves = [{label: math.fsum(values[half::2]) for label, values in each.items()} for half in (0, 1)]
        scored = [each[max(order, key=halves[1 - place % 2].__getitem__)][place] for place in range(row["examples"])]
        rows[client] = {**row, metric: statistics.fmean(scored), "each": scored}
    mean = statistics.fmean(row[metric] for row in rows.values())
    merged = {**results[order[0]], "clients": rows, "summary": {"mean": mean}}
    return {label: of for label, of in results.items() if label not in merges} | {MERGED: merged}


def over_folds(found: Sequence[Mapping[str, Mapping[str, Any]]], metric: str) -> dict[str, dict[str, Any]]:
    """The runs of several folds as one: at each site all examples that were held out in any, and the mean of curves."""
    first = found[0]
    return {label: _joined([results[label] for results in found], metric) for label in first}


def _joined(folds: Sequence[Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """One run in several folds."""
    clients: dict[str, dict[str, Any]] = {}
    for client, row in folds[0]["clients"].items():
        each = [float(one) for of_fold in folds for one in of_fold["clients"][client]["each"]]
        clients[client] = {**row, "each": each, "examples": len(each), metric: statistics.fmean(each)}
    points = zip(*(of_fold["curve"] for of_fold in folds), strict=True)
    curve = [{**same[0], "mean": _mean([point["mean"] for point in same])} for same in points]
    mean = statistics.fmean(row[metric] for row in clients.values())
    return {**folds[0], "clients": clients, "curve": curve, "summary": {"mean": mean}}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def conclude(results: Mapping[str, Mapping[str, Any]], metric: str) -> dict[str, Any]:
    """What a pilot's results say: `methods` and `sites` with gains over training alone, and which method is proposed.

    results  by run, what its method.json holds, or `over_folds` what those of several

    A site's gain is what its own examples and those of all sites say together, see `together`; its standard error is
    paired by example, with one variance of a single example for all sites, since few examples say little of their own.
    `measured` has, by site, the difference and this error before sites are put together.
    """
    alone = results[ALONE]["clients"]
    few = sum(row["examples"] for row in alone.values()) < LEAST_EXAMPLES
    labels = [label for label in results if label != ALONE]
    sure = 1 - (1 - SURE) / len(labels)

    def answered(effect: Effect) -> str:
        if few:
            return UNSURE
        if effect.probability >= sure:
            return PAYS
        return NOT if effect.probability <= 1 - SURE else UNSURE

    methods: dict[str, Any] = {}
    sites: dict[str, dict[str, Effect]] = {}
    for label in labels:
        clients = results[label]["clients"]
        pairs = [(clients[client]["each"], alone[client]["each"]) for client in alone]
        differences, errors = _paired(pairs)
        mean, effects = together(differences, errors)
        sites[label] = dict(zip(alone, effects, strict=True))
        methods[label] = {
            "score": results[label]["summary"]["mean"],
            **_as_dict(mean),
            "answer": answered(mean),
            "measured": dict(zip(alone, zip(differences, errors, strict=True), strict=True)),
            **_rounds_and_bytes(results[label], len(alone)),
        }
    paying = [label for label in labels if methods[label]["answer"] == PAYS]  # one may gain more, and less surely
    proposed = max(paying or labels, key=lambda label: methods[label]["gain"])
    nobody = all(methods[label]["answer"] == NOT for label in labels)
    answer = NOT if nobody else methods[proposed]["answer"].replace(NOT, UNSURE)
    rows = {
        client: {
            "train": alone[client]["train_examples"],
            "held_out": alone[client]["examples"],
            "alone": score_of(alone[client], metric),
            "method": proposed,
            "score": score_of(results[proposed]["clients"][client], metric),
            **_as_dict(sites[proposed][client]),
            "answer": answered(sites[proposed][client]),
        }
        for client in alone
    }
    return {
        "alone": results[ALONE]["summary"]["mean"],
        "methods": methods,
        "sites": rows,
        "proposed": proposed,
        "answer": answer,
        "sure": sure,
    }


def _paired(pairs: Sequence[tuple[Each, Each]]) -> tuple[list[float], list[float]]:
    """Differences of the sites' means and their standard errors."""
    counts = [len(fed) + 2 for fed, _ in pairs]  # with the examples that `paired_error` adds
    single = [count * paired_error(*pair) ** 2 for count, pair in zip(counts, pairs, strict=True)]
    variance = math.fsum(count * value for count, value in zip(counts, single, strict=True)) / sum(counts)
    differences = [
        math.fsum(float(a) - float(b) for a, b in zip(fed, alone, strict=True)) / len(fed) for fed, alone in pairs
    ]
    return differences, [math.sqrt(variance / count) for count in counts]


def _as_dict(effect: Effect) -> dict[str, float]:
    low, high = effect.value - effect.half, effect.value + effect.half
    return {"gain": effect.value, "low": low, "high": high, "probability": effect.probability}


def _rounds_and_bytes(results: Mapping[str, Any], clients: int) -> dict[str, Any]:
    """After how many rounds the mean is within `RISING` of its best, or the last where it still rose at the end, and
    what a site sends and receives until then."""
    curve = [point for point in results["curve"] if point["mean"] is not None]
    best = max(point["mean"] for point in curve)
    rising = len(curve) > 1 and curve[-1]["mean"] - curve[-2]["mean"] > RISING
    enough = curve[-1] if rising else next(point for point in curve if point["mean"] >= best - RISING)
    return {
        "rounds": enough["round"],
        "still_rising": rising,
        "bytes_up_per_site": enough["bytes_up"] / clients,
        "bytes_down_per_site": enough["bytes_down"] / clients,
    }


def sentences(plan: Mapping[str, Any]) -> list[str]:
    """What the pilot says, the answer first."""
    metric, label = plan["metric"], plan["proposed"]
    method, rows = plan["methods"][label], plan["sites"]
    counts = {answer: sum(row["answer"] == answer for row in rows.values()) for answer in (PAYS, NOT, UNSURE)}
    gain, low, high = (gain_text(method[key], metric) for key in ("gain", "low", "high"))
    gain = f"{gain} ({low} to {high})"
    chance = f"a gain on average has a probability of {method['probability']:.2f}"
    first = {
        PAYS: f"Federating is likely to pay, with {run_title(label)}: {gain} points over training alone, and {chance}.",
        NOT: (
            f"Federating is unlikely to pay: the best of {count_text(len(plan['methods']), 'method')}, "
            f"{run_title(label)}, has {gain} points over training alone, and {chance}. Train alone."
        ),
        UNSURE: (
            f"The pilot cannot tell whether federating pays: the best method, {run_title(label)}, has {gain} points "
            f"over training alone, and {chance}."
        ),
    }[plan["answer"]]
    examples = sum(row["held_out"] for row in rows.values())
    answers = [f"{answer} at {count}" for answer, count in counts.items() if count and answer != UNSURE]
    parts = [f"federating {listing(answers)}"] * bool(answers)
    parts += [f"the pilot cannot tell for {counts[UNSURE]}"] * bool(counts[UNSURE])
    lines = [first, f"Of {count_text(len(rows), 'site')}: {'; '.join(parts)}."]
    if plan["limit"]:
        lines.insert(0, plan["limit"])
    traffic = bytes_text(method["bytes_up_per_site"] + method["bytes_down_per_site"])
    if plan["answer"] != NOT:
        state = "was still rising after" if method["still_rising"] else "was near its best after"
        lines.append(
            f"{run_title(label)} {state} {count_text(method['rounds'], 'round')}, for which a site sends and receives "
            f"{traffic}{': take more.' if method['still_rising'] else '.'}"
        )
    if label == MERGED and plan["answer"] != NOT:
        lines.append(f"Each site weighs its two models by held-out examples here, as {MERGED} does with w: posterior.")
    lines.append(
        f"This rests on {examples} examples of {count_text(len(rows), 'site')}, held out in "
        f"{count_text(plan['folds'], 'fold')} of {count_text(plan['rounds'], 'round')} (the configuration has "
        f"{plan['of_rounds']}), and one seed: it covers the "
        "choice of these examples, and neither other seeds nor more rounds. Answers are given from a probability of "
        f"{plan['sure']:.2f}, since the best of several methods looks better than it is."
    )
    return lines
