"""`sni-10`: the ten largest English tasks of Super-NaturalInstructions (Piorczynski et al. 2025).

The paper does not name its tasks. The rule here is ours: English in and out, not on the excluded list of
the default split, sorted by (most instances, number of the task), the first ten.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

from befit.core.errors import ConfigError, DataError
from befit.core.schema import at_least, show
from befit.core.storage import read_json
from befit.data.federation import ClientData, Federation
from befit.data.papers.assemble import assemble, content_hash, digest, same_text, shuffled, source_entry
from befit.data.papers.source import Place, Source, load_table
from befit.data.registry import benchmark

_LOG = logging.getLogger(__name__)

SNI = Source("Muennighoff/natural-instructions", "Apache-2.0; instances as their sources", revision="a29a975")
FILES = Source(
    "a clone of the repository allenai/natural-instructions",
    "Apache-2.0; instances as their sources",
    on_hub=False,
    layout="the folders tasks and splits",
)
CLIENTS = 10
MIRROR_FIELDS = ("task_name", "id", "definition", "inputs", "targets")
TASK_FIELDS = ("Definition", "Input_language", "Output_language", "Categories", "Instances")


@benchmark(
    "sni-10",
    "1",
    summary="The ten largest English tasks of Super-NaturalInstructions, one client each; needs the data",
    default_model="meta-llama/Llama-3.2-1B",
    task="causal-lm",
    seeded=False,
)
def sni_10(
    root: str = "",
    hub: bool = False,
    tasks: list[str] | None = None,
    one_per_category: bool = False,
    train: Annotated[int, at_least(1)] = 500,
    val: Annotated[int, at_least(0)] = 50,
    test: Annotated[int, at_least(1)] = 50,
    seed: int = 42,
    revisions: dict[str, str] | None = None,
) -> Federation:
    """Ten tasks, one a client; an input that comes twice is used once.

    root              a clone of allenai/natural-instructions, with tasks/taskNNN_*.json and splits/default
    hub               load the mirror Muennighoff/natural-instructions instead, which has a reference in a row and says
                      nothing of languages: `tasks` has to be given
    tasks             names of the tasks, such as task1288_glue_mrpc_paraphrasing; null applies the rule, which reads
                      the whole collection and is slow: the manifest names what it chose
    one_per_category  take at most one task of each category
    train             records that a client trains on
    val               records that it validates on
    test              records that it is tested on
    seed              of which records are drawn
    revisions         hub id to the commit that is wanted
    """
    place = Place("sni-10", root, hub, revisions)
    sizes = {"test": test, "val": val, "train": train}
    problems = []
    if hub and tasks is None:
        problems.append("benchmark.tasks: has to be given with hub, since the mirror does not say languages")
    if tasks is not None and (len(set(tasks)) < len(tasks) or not tasks):
        problems.append(f"benchmark.tasks: must name different tasks, got {show(tasks)}")
    if problems:
        raise ConfigError(problems, "the benchmark")
    place.check([SNI if hub else FILES])
    if hub:
        records = mirrored(place, tasks or ())
    else:
        folder = place.folder(FILES)
        chosen = (
            by_rule(place, folder, one_per_category)
            if tasks is None
            else {name: task_file(folder, name) for name in tasks}
        )
        records = {name: instances(path) for name, path in chosen.items()}
    clients, entries = [], []
    for name, of_task in records.items():
        hashed = content_hash([digest(record) for record in of_task])
        entries.append({**source_entry(place, SNI if hub else FILES, "all", len(of_task), hashed), "config": name})
        splits = drawn(name, of_task, sizes, seed)
        clients.append(ClientData(name, splits["train"], splits["val"], splits["test"], {"task": name}))
    arguments = {"tasks": list(records), "train": train, "val": val, "test": test, "seed": seed}
    return assemble(
        "sni-10",
        clients,
        partition="by_task",
        arguments=arguments,
        sources=entries,
        notes={
            "tasks": {entry["config"]: entry["rows"] for entry in entries},
            "chosen": "by rule" if tasks is None else "by name",
        },
    )


def drawn(
    name: str, records: Sequence[dict[str, Any]], sizes: Mapping[str, int], seed: int
) -> dict[str, tuple[Any, ...]]:
    """Test first, then validation, then training; of inputs that are equal the first by hash."""
    once: dict[str, dict[str, Any]] = {}
    for instance in sorted(records, key=digest):
        once.setdefault(same_text(instance["instruction"]), instance)
    order = shuffled(list(once.values()), seed, "sni-10", name)
    if len(order) < sum(sizes.values()):
        raise DataError(f"{name}: {len(order)} different inputs are too few for {sum(sizes.values())}")
    named = [{"id": f"{name.split('_')[0]}-{at:05d}", "task": name, **example} for at, example in enumerate(order)]
    splits: dict[str, tuple[Any, ...]] = {}
    start = 0
    for split, size in sizes.items():
        splits[split] = tuple(named[start : start + size])
        start += size
    return splits


def by_rule(place: Place, folder: Path, one_per_category: bool) -> dict[str, Path]:
    """The files of the ten largest tasks that the rule allows."""
    listed = folder / "splits" / "default" / "excluded_tasks.txt"
    if not listed.is_file():
        raise place.missing(listed, FILES, "which says what tasks are left out where benchmark.tasks names none")
    excluded = set(listed.read_text().split())
    sized: list[tuple[int, int, Path, str]] = []
    for path in sorted((folder / "tasks").glob("task*_*.json")):
        if path.stem in excluded:
            continue
        task = read_task(path)
        if all(set(task[key]) == {"English"} for key in ("Input_language", "Output_language")):
            category = ", ".join(map(str, task["Categories"]))
            sized.append((-len(task["Instances"]), number_of(path.stem), path, category))
    chosen: dict[str, Path] = {}
    categories: set[str] = set()
    for _, _, path, category in sorted(sized):
        if len(chosen) < CLIENTS and not (one_per_category and category in categories):
            chosen[path.stem] = path
            categories.add(category)
    if len(chosen) < CLIENTS:
        raise DataError(f"{folder / 'tasks'} has {len(chosen)} tasks that the rule allows, and sni-10 needs {CLIENTS}")
    _LOG.warning("sni-10: the ten largest tasks are %s; give them as benchmark.tasks to load only these", list(chosen))
    return chosen


def number_of(name: str) -> int:
    match = re.match(r"task(\d+)_", name)
    if not match:
        raise DataError(f"{name} is no name of a task, such as task1288_glue_mrpc_paraphrasing")
    return int(match[1])


def task_file(folder: Path, name: str) -> Path:
    number_of(name)
    path = folder / "tasks" / f"{name}.json"
    if not path.is_file():
        raise DataError(f"there is no task {name}: looked for {path}")
    return path


def read_task(path: Path) -> dict[str, Any]:
    task = read_json(path)
    if not isinstance(task, dict) or (missing := [key for key in TASK_FIELDS if key not in task]):
        keys = ", ".join(task) if isinstance(task, dict) else type(task).__name__
        raise DataError(
            f"{path}: a task must have {', '.join(TASK_FIELDS)}; found {keys}"
            + (f", without {', '.join(missing)}" if isinstance(task, dict) else "")
        )
    return task


def instances(path: Path) -> list[dict[str, Any]]:
    """Every instance of a task that has an answer as a record, with all its references."""
    task = read_task(path)
    definition = "\n".join(task["Definition"]) if isinstance(task["Definition"], list) else task["Definition"]
    records = []
    for number, instance in enumerate(task["Instances"], 1):
        where = f"{path}, instance {number}"
        if not isinstance(instance, dict) or "input" not in instance or "output" not in instance:
            raise DataError(f"{where}: must have input and output; found {show(instance)}")
        records.append(record(definition, instance["input"], instance["output"], where))
    return answered(records, str(path))


def answered(records: Sequence[dict[str, Any] | None], where: str) -> list[dict[str, Any]]:
    """Those that are some; how many are none is said."""
    found = [record for record in records if record is not None]
    if len(found) < len(records):
        _LOG.warning("%s: %d instances without an answer are left out", where, len(records) - len(found))
    return found


def record(definition: Any, text: Any, outputs: Any, where: str) -> dict[str, Any] | None:
    """Definition, input and `Output:` as one instruction; every listed answer counts as right, the first is learnt.
    None where no answer is listed."""
    if not isinstance(outputs, list):
        outputs = [outputs]
    for field, value in (("definition", definition), ("input", text), *(("output", output) for output in outputs)):
        if not isinstance(value, str) or (field == "definition" and not value.strip()):
            raise DataError(f"{where}: {field} must be text, got {show(value)}")
    outputs = [output for output in outputs if output.strip()]
    if not outputs:
        return None
    return {
        "instruction": f"{definition.strip()}\n\nInput: {text.strip()}\n\nOutput:",
        "input": "",
        "output": outputs[0].strip(),
        "references": [output.strip() for output in outputs],
    }


def mirrored(place: Place, tasks: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """The tasks from the mirror, whose rows have one reference each: rows of one input are put together."""
    import pyarrow

    pc: Any = import_module("pyarrow.compute")

    parts = []
    for split in ("train", "test"):
        table = load_table(place, SNI, split, MIRROR_FIELDS)
        parts.append(table.filter(pc.is_in(table["task_name"], value_set=pyarrow.array(list(tasks)))))
    together: dict[str, dict[tuple[str, str], list[str]]] = {name: {} for name in tasks}
    for row in pyarrow.concat_tables(parts).to_pylist():
        key = (row["definition"], row["inputs"])
        together[row["task_name"]].setdefault(key, []).append(row["targets"])
    if empty := [name for name, by_input in together.items() if not by_input]:
        raise DataError(f"{SNI.id} has no rows of {', '.join(empty)}")
    found = {}
    for name, by_input in together.items():
        where = f"{SNI.id}, {name}"
        records = [record(definition, text, outputs, where) for (definition, text), outputs in by_input.items()]
        found[name] = answered(records, where)
    return found
