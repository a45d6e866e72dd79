"""The experiment as a frozen value: its settings, block by block."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from befit.core.schema import POSITIVE, SHARE, Rule, at_least, between, not_empty, plain
from befit.data.files.settings import DataSettings
from befit.data.limit import LimitSettings
from befit.protocol.settings import (
    Asynchronous,
    GuardSettings,
    PrivacySettings,
    SecureSums,
    TrainSettings,
    WireSettings,
)
from befit.tasks.prompts import prompt_problem

TRACKERS = ("tensorboard", "wandb", "mlflow")
BENCHMARK_PATHS = ("root", "scenario")  # arguments of benchmarks that name files of the user

# Settings that cannot be used at Flower's sites yet, and what to do.
NOT_AT_SITES = {
    "model.long_prompts": "no site leaves records out on Flower yet; set it to refuse",
    "adapter.start": "no site has the adapter's folder; set it to null",
    "common_model": "the smallest of the families' models is the one that all sites have; set it to null",
    "data.partition": "every site has its own records on Flower; set it to null",
    "data.hub": "every site has its own records on Flower; set it to null",
    "data.newcomers": "no site is a newcomer on Flower yet; set it to null",
    "evaluate.by": "what a site's records say would leave it, as names of scores; set it to null",
    "evaluate.fold": "a site holds out what its own file says; set it to 0",
    "evaluate.others": "no site has the others' examples on Flower; set it to never",
}
_NAME = Rule(
    lambda value: bool(re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,99}", value)),
    "must be a folder's name of letters, digits, '.', '_' and '-'",
)
DEVICE = Rule(lambda value: bool(re.fullmatch(r"cpu|auto|cuda(:\d+)?", value)), "must be cpu, cuda, cuda:N or auto")
_PROMPT = Rule(lambda value: not prompt_problem(value), prompt_problem(""))
_SEED = Rule(lambda value: 0 <= value < 2**63, "must be 0 or more, and below 2^63")
_MIN_REPLIES = Rule(
    lambda value: value >= 1 if isinstance(value, int) else 0 < value <= 1,
    "must be a share above 0 and up to 1.0, or a whole number of clients from 1",
)
_METRICS = not_empty("must name at least one metric, or be null")
_FIELD = Rule(lambda value: bool(value.strip()), "must name a field of the records, or be null")
_FLEET = Rule(lambda value: value == "auto" or value >= 1, "must be auto, or a whole number of clients from 1")
_TRACKERS = Rule(lambda value: set(value) <= set(TRACKERS), f"must be a list of {', '.join(TRACKERS)}")


@dataclass(frozen=True)
class ModelSettings:
    """The frozen backbone.

    id                      a model that ships with befit, `package:NAME/SUBDIR`, a directory, or a hub id;
                            empty: the benchmark's own
    revision                branch, tag or commit of a hub id
    dtype                   dtype of the backbone; adapters train in float32
    device                  auto (cuda where there is one, else cpu), cpu, cuda or cuda:N; processes that share a run or
                            a comparison take turns with the GPUs of auto and cuda
    gradient_checkpointing  recompute activations in the backward pass: less memory, more time
    max_length              longest text, in tokens; the rest is cut off
    long_prompts            what becomes of a causal-lm's record whose prompt leaves nothing of its answer within
                            max_length: refuse is an error; drop leaves it out of training, and in measurements reads it
                            as long as the model has positions
    prompt                  what a causal-lm reads before its answer: chat (the tokenizer's chat template), chat-bos
                            (the same after one more beginning-of-sequence token), plain, alpaca, auto (chat where there
                            is a template, else plain), or a text of your own with {instruction} and {input}
    quantise                hold the backbone in 8 or 4 bits
    """

    id: str = ""
    revision: str | None = None
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Annotated[str, DEVICE] = "auto"
    gradient_checkpointing: bool = False
    max_length: Annotated[int, POSITIVE] = 256
    long_prompts: Literal["refuse", "drop"] = "refuse"
    prompt: Annotated[str, _PROMPT] = "auto"
    quantise: Literal["none", "int8", "nf4"] = "none"


@dataclass(frozen=True)
class FamilySettings:
    """Clients with a backbone of their own.

    clients  their ids, patterns such as hospital-*, or what a benchmark says of them, such as size=small
    model    their backbone; what is not said here is as under `model`
    """

    clients: Annotated[list[str], not_empty("must name at least one client")]
    model: ModelSettings


@dataclass(frozen=True)
class BenchmarkSettings:
    """A federation that befit knows how to make. Further keys are arguments of the benchmark.

    name       as `befit benchmarks` lists it
    version    the version that is wanted; null takes the present one
    arguments  everything else in the block (clients, alpha, seed, …)
    """

    name: str
    version: str | None = None
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class AdapterSettings:
    """Where the adapters sit.

    targets  names of the linear modules, of the classification head too; auto: the query and value projections; all:
             all of the blocks; all-linear: as PEFT's, all but the output embedding, the classification head among them.
             In a list connector names what joins images to a language model
    dropout  probability with which an adapter's input is dropped while training
    head     train and share the classification head too, in full where it is no target; auto: yes for classification
             tasks
    compute  what adapters multiply in: float32; or model, the backbone's own dtype (model.dtype), which spares copies
             of its activations. They are held, stepped and sent in float32 either way
    start    folder of a PEFT LoRA adapter that training starts from, of the method's rank, alpha and target modules; it
             goes into the method's first low-rank slot and those like it that are no summand beside it. null: fresh
             adapters, which change nothing
    """

    targets: Annotated[list[str] | Literal["auto", "all", "all-linear"], not_empty("must name at least one module")] = (
        "auto"
    )
    dropout: Annotated[float, between(0, 1)] = 0.0
    head: bool | Literal["auto"] = "auto"
    compute: Literal["float32", "model"] = "float32"
    start: str | None = None


@dataclass(frozen=True)
class StreamSettings:
    """Training data that arrives over the rounds of a stage instead of being there from the start.

    kind      none; dynamic: a client's tasks one after the other, in the order of its records' field `task`; static:
              all tasks mixed, in equal parts
    sampling  which records of those seen so far a batch is made of: frequency prefers those that were used less,
              uniform takes all alike
    """

    kind: Literal["none", "static", "dynamic"] = "none"
    sampling: Literal["frequency", "uniform"] = "frequency"


@dataclass(frozen=True)
class FederationSettings:
    """Rounds and who takes part.

    rounds       rounds of every stage that does not say its own number
    cohort       clients per round; null: all of them
    seed         seed of adapters, cohorts and batches, and of the split of files that befit splits
    min_replies  fewest good replies of a round: a number below or equal to 1.0 is a share of the cohort, a whole
                 number counts clients
    max_weight   largest share that one client has in a mean by examples; null: as its number of examples says
    secure_sums  the server learns the sum of a round's updates and no single one, for methods that need no more
                 (docs/secure_sums.md), such as {clip: 10}; null: it sees each client's
    asynchronous  a round ends with the first so many updates, so that slow clients hold up nobody, for methods whose
                 server step is a sum (docs/asynchronous.md), such as {buffer: 4}; null: with those of the whole cohort
    deploy       method: every client deploys what the method makes; best: of that and what the baselines make, what its
                 own validation examples prefer
    deploy_margin  by how much, as a share, a loss on them has to be below that of what the client trained alone, before
                 it deploys anything else; 0: the least loss is taken
    patience     after every `evaluate.every` rounds all clients measure their models on validation examples too, and
                 the round with the highest mean is the one that is reported and exported; training ends once this many
                 measurements in a row were no better. null: all rounds are trained, and the last one counts
    """

    rounds: Annotated[int, POSITIVE] = 10
    cohort: Annotated[int | None, POSITIVE] = None
    seed: Annotated[int, _SEED] = 0
    min_replies: Annotated[int | float, _MIN_REPLIES] = 0.5
    max_weight: Annotated[float | None, SHARE] = None
    secure_sums: SecureSums | None = None
    asynchronous: Asynchronous | None = None
    deploy: Literal["method", "best"] = "method"
    deploy_margin: Annotated[float, between(0, 1)] = 0.0
    patience: Annotated[int | None, POSITIVE] = None


# Settings of `federation` where each method is by itself.
NO_CHOICE: Mapping[str, Any] = {"deploy": "method", "deploy_margin": 0.0}


@dataclass(frozen=True)
class EvaluateSettings:
    """When and on what the clients' models are measured.

    every           rounds between two measurements; 0: only at the end
    split           test or val
    fold            which examples of each client are held out for validation. 0: its validation examples as the data
                    give them; 1, 2 and so on: as many of its training examples in their place, others with each
                    number, for cross-validation. Test examples stay as they are
    batch_size      examples per forward pass
    generate        measure generated text too (causal-lm, preference)
    max_new_tokens  longest generated answer
    newcomers       measure clients that took no part in training, where the data has any and all are on this machine:
                    with what the server can give them, and after the method's personal stages
    others          measure every client's model on all other clients' examples too, whose mean over clients is the
                    metric `others`: never, at the end, or always; only where all clients are on this machine
    metrics         what to measure, the headline first. Of classification accuracy, balanced_accuracy, macro_f1, auroc
                    and calibration_error; null: accuracy. Of a causal-lm such as [rougeL, exact_match] of generated
                    text or [choice_per_token] of records with choices; null: exact_match and rougeL with generate. Of
                    a preference also preference_accuracy, the default. Of a vqa also vqa_score, its mean over tasks and
                    the default, and token_f1_pooled
    wins            those of `metrics` by which it is counted who is best in a group of clients, in more than half of
                    them; null: all but calibration_error
    by              a field of the records, such as language: the examples of each of its values are measured too, so
                    that groups are of examples rather than of clients; the values leave a client as names of scores
    """

    every: Annotated[int, at_least(0)] = 0
    split: Literal["test", "val"] = "test"
    fold: Annotated[int, at_least(0)] = 0
    batch_size: Annotated[int, POSITIVE] = 256
    generate: bool = False
    max_new_tokens: Annotated[int, POSITIVE] = 128
    newcomers: bool = True
    others: Literal["never", "end", "always"] = "never"
    metrics: Annotated[list[str] | None, _METRICS] = None
    wins: Annotated[list[str] | None, _METRICS] = None
    by: Annotated[str | None, _FIELD] = None


@dataclass(frozen=True)
class EngineSettings:
    """What runs the clients.

    kind        local: on this machine; flower: at sites, see docs/flower.md
    workers     processes that share the clients, each with a backbone of its own; 1: all in this process
    fleet       clients that train as one, in one pass over the backbone: 1, every client by itself; N, up to N at once,
                which changes numbers by rounding (docs/fleets.md); auto: what proves faster in the first rounds. Only
                where clients are on this machine
    store       where clients keep their memory between rounds
    threads     CPU threads of each process, at most the machine's cores; null: one for a backbone below ten million
                parameters, else PyTorch's choice
    spool_mib   a round's replies beyond this size wait on the disk instead of in memory
    keys        on Flower, every client's public key, as a file or as its line: only the site with this key is this
                client; without keys the first site that says it is a client is that client
    deadline_s  on Flower, longest wait for the replies of a round; those that come later are not used
    wait_s      on Flower, longest wait for sites to connect: for all of them at the start, which then begins with
                federation.min_replies of them, and for min_replies of them before a round
    """

    kind: Literal["local", "flower"] = "local"
    workers: Annotated[int, POSITIVE] = 1
    fleet: Annotated[int | Literal["auto"], _FLEET] = 1
    store: Literal["memory", "disk"] = "memory"
    threads: Annotated[int | None, POSITIVE] = None
    spool_mib: Annotated[int, at_least(0)] = 4
    keys: dict[str, str] = field(default_factory=dict[str, str])
    deadline_s: Annotated[float, POSITIVE] = 3600.0
    wait_s: Annotated[float, POSITIVE] = 600.0


@dataclass(frozen=True)
class CheckpointSettings:
    """How often a run saves what it needs to resume.

    every_s  seconds between two checkpoints; 0: after every round
    keep     federated rounds after which what the server holds is kept for good, in `kept/STAGE/`
    """

    every_s: Annotated[float, at_least(0)] = 10.0
    keep: tuple[int, ...] = ()


@dataclass(frozen=True)
class ReportSettings:
    """What a finished run shows; its numbers are the same.

    plots  draw the plots of report.html, which takes a second or two; `befit report DIR` draws them later
    """

    plots: bool = True


@dataclass(frozen=True)
class Experiment:
    """Everything that decides a run's result.

    name        names the run directory; where it is left out, the file's name does
    model       the frozen backbone
    benchmark   a known federation; exactly one of benchmark and data
    data        the user's own files
    limit       only some of the data, for a trial
    families    clients with other backbones, by a name of your choice; all others have `model`
    common_model  a frozen model that every client holds beside its own, for methods that compare clients by what one
                model makes of their data; null: the smallest backbone. What is not said here is as under `model`
    adapter     where adapters sit
    method      a method's name, or a mapping with its name and arguments
    baselines   methods to compare with, in the same form; one that gives no rank or alpha has the method's. Where a
                file leaves them out, [local]; [] for none
    train       local training
    stream      whether training data arrives over time
    federation  rounds and cohorts
    evaluate    measurements
    engine      what runs the clients
    wire        how arrays travel
    guard       what is done about replies that may be wrong or hostile
    privacy     differential privacy
    checkpoint  how often a run is saved
    report      what a finished run shows
    trackers    where the numbers of a run are sent too: tensorboard, wandb, mlflow
    plugins     Python files or modules with methods, benchmarks and tasks of your own, loaded before anything else
    """

    name: Annotated[str, _NAME]
    method: dict[str, Any]
    model: ModelSettings = field(default_factory=ModelSettings)
    benchmark: BenchmarkSettings | None = None
    data: DataSettings | None = None
    limit: LimitSettings = field(default_factory=LimitSettings)
    families: dict[str, FamilySettings] = field(default_factory=dict[str, FamilySettings])
    common_model: ModelSettings | None = None
    adapter: AdapterSettings = field(default_factory=AdapterSettings)
    baselines: list[dict[str, Any]] = field(default_factory=list)
    train: TrainSettings = field(default_factory=TrainSettings)
    stream: StreamSettings = field(default_factory=StreamSettings)
    federation: FederationSettings = field(default_factory=FederationSettings)
    evaluate: EvaluateSettings = field(default_factory=EvaluateSettings)
    engine: EngineSettings = field(default_factory=EngineSettings)
    wire: WireSettings = field(default_factory=WireSettings)
    guard: GuardSettings = field(default_factory=GuardSettings)
    privacy: PrivacySettings = field(default_factory=PrivacySettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    report: ReportSettings = field(default_factory=ReportSettings)
    trackers: Annotated[list[str], _TRACKERS] = field(default_factory=list[str])
    plugins: list[str] = field(default_factory=list[str])

    @property
    def blocks(self) -> tuple[dict[str, Any], ...]:
        """The methods that it trains, its own first, then the baselines."""
        return (self.method, *self.baselines)

    @property
    def devices(self) -> tuple[str, ...]:
        """Where its models are to be."""
        common = () if self.common_model is None else (self.common_model,)
        return tuple(
            settings.device for settings in (self.model, *(family.model for family in self.families.values()), *common)
        )


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """The experiment as YAML and JSON hold it; `load_experiment` makes an equal experiment of it."""
    values = {key: value for key, value in plain(experiment).items() if value is not None}
    if experiment.benchmark is not None:
        arguments = values["benchmark"].pop("arguments")
        values["benchmark"] |= arguments
    return values


def to_yaml(experiment: Experiment) -> str:
    """The resolved configuration, every value written out."""
    from befit.core.yamlfile import write_yaml

    return write_yaml(to_dict(experiment))


def run_names(experiment: Experiment) -> list[str]:
    """Names of the runs of an experiment, its own first, then the baselines'.

    A repeated method is labelled by the options that differ from its first use, else numbered.

    >>> run_names(Experiment("x", {"name": "potara"}, baselines=[{"name": "local"}, {"name": "potara"}]))
    ['potara', 'local', 'potara-2']
    >>> run_names(Experiment("x", {"name": "lora", "rank": 2}, baselines=[{"name": "lora", "rank": 4}]))
    ['lora', 'lora-rank-4']
    >>> run_names(Experiment("x", {"name": "lora", "base": {"name": "fedit"}}, baselines=[{"name": "lora"}]))
    ['lora', 'lora-base-none']
    """
    blocks = experiment.blocks
    firsts: dict[str, Mapping[str, Any]] = {}
    names: list[str] = []
    for index, block in enumerate(blocks):
        first = firsts.setdefault(block["name"], block)
        label = _differing_options(block, first)
        if first is not block and (not label or f"{block['name']}-{label}" in names):
            label = str(1 + sum(earlier["name"] == block["name"] for earlier in blocks[:index]))
        names.append(f"{block['name']}-{label}" if first is not block else block["name"])
    return names


def method_blocks(experiment: Experiment) -> dict[str, dict[str, Any]]:
    """The methods that a run trains, its own first, by their labels."""
    return dict(zip(run_names(experiment), experiment.blocks, strict=True))


def _differing_options(block: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """The one or two options in which a method's block differs from its first use, as part of a label; "" where more
    options differ, or a value has characters that a label at Flower's sites may not have."""
    differing = [key for key in {**first, **block} if block.get(key) != first.get(key)]
    words = {
        key: value.get("name") if isinstance(value := block.get(key, "none"), Mapping) else value for key in differing
    }
    words = {key: "none" if word is None else word for key, word in words.items()}
    fit = all(
        isinstance(word, bool | int | float | str) and re.fullmatch(r"[\w.]{1,24}", str(word))
        for word in words.values()
    )
    return "-".join(f"{key}-{word}" for key, word in words.items()) if fit and len(words) <= 2 else ""
