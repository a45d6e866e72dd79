"""`befit init`: a first configuration for a folder of data, with comments, that `befit check` reads."""

from __future__ import annotations

import json
import math
import os
import re
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from befit.cli.output import messages, print_warning, say
from befit.core.errors import ConfigError
from befit.core.text import first_of

if TYPE_CHECKING:
    from befit.data.files.survey import SurveyedFolder

# By task, a model that ships and is good for a first try with the most tokens that it takes, and one to take for
# results with as many as befit would begin with.
MODELS = {
    "text-classification": (("names-bert-fl", 64), ("sentence-transformers/all-MiniLM-L6-v2", 128)),
    "image-classification": (("digits-vit", 0), ("google/vit-base-patch16-224-in21k", 0)),
    "preference": (("skills-llama", 128), ("HuggingFaceTB/SmolLM2-135M-Instruct", 512)),
    "causal-lm": (("skills-llama", 128), ("HuggingFaceTB/SmolLM2-135M-Instruct", 512)),
    "vqa": (("digits-llava-s", 128), ("llava-hf/llava-1.5-7b-hf", 2048)),
}
SHOWN = 50  # clients and classes that are written one by one


def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A folder of data, or one file for all clients.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The configuration to write.")] = Path("my.yaml"),
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="ID", help="A directory or hub id. Default: a tiny model that ships."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite FILE.")] = False,
) -> None:
    """Look at a folder of data and write a first configuration for it: task, columns and labels as they seem to be."""
    from befit.core.storage import atomic_write
    from befit.data.files.survey import survey

    if out.exists() and not force:
        raise ConfigError([f"--out: {out} already exists; name another file, or add --force"], "the command")
    surveyed = survey(folder)
    if not out.parent.is_dir():
        raise ConfigError([f"--out: there is no folder {out.parent}"], "the command")
    atomic_write(out, ("\n".join(_lines(surveyed, folder, out, model)) + "\n").encode())
    simulated = " (simulated: records are dealt out at random)" * (None in surveyed.places and surveyed.by is None)
    sizes = f"{len(surveyed.counts)} clients{simulated}, {sum(surveyed.counts.values()):,} records, {surveyed.task}"
    say(f"{out}: {sizes}. Read it, then: befit check {shlex.quote(str(out))}")
    if simulated:
        print_warning(messages(), f"no column's name says whose a record is; where one does: {_by_column(surveyed)}")
    for doubt in _doubts(surveyed):
        print_warning(messages(), doubt)
    if surveyed.left_out:
        print_warning(messages(), f"left out, since befit does not read them: {first_of(surveyed.left_out, 5)}")


def _doubts(surveyed: SurveyedFolder) -> list[str]:
    """What is probably a mistake in the classes."""
    from befit.data.files.doubts import alike
    from befit.tasks import get_task

    return alike(surveyed.labels, given=True) if get_task(surveyed.task).has_classes else []


def _lines(surveyed: SurveyedFolder, folder: Path, out: Path, model: str | None) -> Iterator[str]:
    from befit.tasks import get_task

    quoted = shlex.quote(str(out))
    yield f"# Written by befit init for {folder}. A guess: read it, correct it, and look before you train:"
    yield f"#   befit check {quoted}"
    yield f"#   befit run {quoted} --trial      # two clients, four records each, one round: does it run?"
    yield f"#   befit run {quoted}"
    yield "# befit explain data says more of each key here, and so does docs/configuration.md."
    yield from ("", "data:", f"  task: {surveyed.task}")
    yield from _clients(surveyed, out)
    yield from _columns(surveyed)
    if surveyed.labels and get_task(surveyed.task).has_classes:
        names = _flow(surveyed.labels) if len(surveyed.labels) <= SHOWN else None
        yield "  # The classes in order. A record with another one is refused."
        yield from (f"  # {doubt}" for doubt in _doubts(surveyed))
        yield (
            f"  label_names: {names}"
            if names
            else "  # label_names: too many to list; collected from the training data"
        )
    if surveyed.gaps:
        yield f"  missing: drop # leaves out records that lack a value, here {surveyed.gaps}; refuse stops at them"
    if surveyed.repeats:
        yield "  # Leaves out records that their client has already, so that none is in training and in test at once."
        yield "  # Leave it out where equal records can come from different people."
        yield f"  # drop_duplicates: true # here {surveyed.repeats}"
    yield "  val_fraction: 0.1 # of the training records, where a client has no validation file"
    yield "  test_fraction: 0.2 # of all records, where a client has no test file"
    yield from ("", *_model(surveyed.task, model, out))
    smallest = min(surveyed.counts.values())
    yield ""
    yield "method: {name: potara, rank: 8} # befit methods lists all, befit explain potara says more"
    yield "baselines: [local, fedit] # training alone, and one shared adapter"
    yield f"train: {{max_steps: 10, batch_size: {max(2, min(16, smallest // 2))}, lr: 1.0e-3}} # of a client in a round"
    yield "federation: {rounds: 20, seed: 0}"
    yield "evaluate: {every: 5} # rounds"


def _by_column(surveyed: SurveyedFolder) -> str:
    """What to write for columns that may say whose a record is."""
    return " or ".join(f"partition: {{by: {_scalar(name)}}}" for name in surveyed.perhaps_by or ("COLUMN",))


def _clients(surveyed: SurveyedFolder, out: Path) -> Iterator[str]:
    if None in surveyed.places:
        yield f"  clients: {_relative(surveyed.places[None], out)}"
    if None in surveyed.places and surveyed.by is None:
        count = len(surveyed.counts)
        yield f"  partition: {{clients: {count}}} # a simulation, at random: no column's name says whose a record is;"
        yield f"  # where one does, {_by_column(surveyed)}. With alpha: 0.5, say, the classes are dealt unequally"
        return
    if surveyed.by is not None:
        yield f"  partition: {{by: {_scalar(surveyed.by)}}} # the column that says whose a record is"
        shown = [f"{client} {count}" for client, count in Counter(surveyed.counts).most_common(SHOWN)]
        yield f"  # records: {', '.join(shown)}{', …' * (len(surveyed.counts) > SHOWN)}".replace("\n", " ")
        return
    if surveyed.left_out:
        yield f"  # left out, since befit does not read them: {', '.join(surveyed.left_out[:SHOWN])}"
    yield "  clients:"
    common = _common(surveyed)
    for client, place in surveyed.places.items():
        path, columns = _relative(place, out), surveyed.columns[client]
        differing = {
            field: columns.get(field, field)
            for field in (*common, *columns)
            if columns.get(field, field) != common.get(field, field) or (field == "group" and field not in common)
        }
        entry = f"{{{_splits(place, out)}, columns: {_mapping(differing)}}}" if differing else path
        yield f"    {_scalar(str(client))}: {entry} # {surveyed.counts.get(str(client), 0):,} records"


def _splits(place: Path, out: Path) -> str:
    """A client's files by split; one with everything is what the others are held out from."""
    from befit.data.files.client_files import ALL, client_sources

    (sources,) = client_sources({"a": place}).values()
    return ", ".join(
        f"{'train' if split == ALL else split}: {_relative(paths[0], out)}" for split, paths in sources.items()
    )


def _columns(surveyed: SurveyedFolder) -> Iterator[str]:
    if common := _common(surveyed):
        yield f"  columns: {_mapping(common)} # befit's name: yours"
    if surveyed.others:
        yield f"  # columns that are not used: {', '.join(surveyed.others[:SHOWN])}".replace("\n", " ")
    if any("group" in columns for columns in surveyed.columns.values()):
        yield "  # group: what is held out for val and test is whole groups"


def _common(surveyed: SurveyedFolder) -> dict[str, str]:
    """The columns of two clients or more, by field; where there is one place, its own. What a record may lack is there
    only where all clients have it."""
    from befit.tasks import get_task

    fields = dict.fromkeys(field for columns in surveyed.columns.values() for field in columns)
    optional = {"group", *get_task(surveyed.task).optional}
    for field in optional.intersection(fields):
        if any(field not in columns for columns in surveyed.columns.values()):
            del fields[field]
    names = {field: Counter(columns.get(field, field) for columns in surveyed.columns.values()) for field in fields}
    best = {field: counted.most_common(1)[0] for field, counted in names.items()}
    return {
        field: name
        for field, (name, count) in best.items()
        if (count > 1 or len(surveyed.places) == 1) and (field != name or field == "group")
    }


def _model(task: str, model: str | None, out: Path) -> Iterator[str]:
    (ships, least), (better, most) = MODELS[task]
    if model is None:
        ascii_only = " and of ASCII alone" * (task in ("causal-lm", "preference", "vqa"))
        yield f"# {ships} ships with befit: tiny{ascii_only}, and good for a first try only. For results, for example:"
        yield f"#   hf download {better}"
        yield f"#   model: {{id: {better}{_length(most)}}}"
    elif Path(model).is_dir():
        most = min(most, _positions(Path(model)))
        model = os.path.relpath(model, out.parent)
        model = model if model.startswith(".") else f"./{model}"
    yield f"model: {{id: {_scalar(model or ships)}{_length(most if model else least)}}}"


def _positions(model: Path) -> float:
    """The longest sequence of a model in a folder, as its configuration has it; what is wrong there, check tells."""
    try:
        config = json.loads((model / "config.json").read_text(encoding="utf-8"))
        found = (config.get("text_config") or config).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError):
        return math.inf
    return found if isinstance(found, int) else math.inf


def _length(tokens: float) -> str:
    return f", max_length: {tokens}" if tokens else ""


def _relative(place: Path, out: Path) -> str:
    return _scalar(Path(os.path.relpath(place, out.parent)).as_posix())


def _mapping(values: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{field}: {_scalar(name)}" for field, name in values.items()) + "}"


def _flow(values: Any) -> str:
    return "[" + ", ".join(map(_scalar, values)) + "]"


def _scalar(text: str) -> str:
    """A text as YAML, plain where that is safe."""
    reserved = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
    if re.fullmatch(r"[^\W\d][\w./ -]*(?<! )", text) and text.lower() not in reserved:
        return text
    return json.dumps(text, ensure_ascii=False)
