"""`befit cka`: how alike the layers of two models are, on given records."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from befit.cli.output import (
    Imports,
    Json,
    each_once,
    load_imports,
    messages,
    only_json,
    print_json,
    say,
    screen,
    show_table,
    warnings_to,
)
from befit.core.errors import ConfigError, DataError
from befit.core.storage import check_folder
from befit.core.text import looked_from

if TYPE_CHECKING:
    from befit.protocol.site import Backbone
    from befit.studies.cka import LayerCka
    from befit.tasks.base import Examples

_LEAST = {"blocks": 0, "samples": 1, "tokens": 2, "batch_size": 1, "memory": 1}


def cka(
    first: Annotated[str, typer.Argument(metavar="A", help="A model that comes with befit, a folder, or a hub id.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another model, or the same.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE", help="Configuration keys, such as model.max_length=512.", callback=each_once
        ),
    ] = None,
    records: Annotated[
        Path | None, typer.Option("--records", metavar="FILE", help="Records for both models, in any format of befit.")
    ] = None,
    task: Annotated[str, typer.Option("--task", help="Task of the records.")] = "causal-lm",
    benchmark: Annotated[
        str | None, typer.Option("--benchmark", metavar="NAME", help="Take the public records of a benchmark.")
    ] = None,
    blocks: Annotated[
        int | None,
        typer.Option("--blocks", help="PQ-LoRA blocks to mark; 0: none. Default: 4 at most."),
    ] = None,
    samples: Annotated[int, typer.Option("--samples", help="Largest number of records, drawn by --seed.")] = 500,
    tokens: Annotated[int, typer.Option("--tokens", help="Largest number of tokens.")] = 4000,
    batch_size: Annotated[int, typer.Option("--batch-size", help="Records in one forward pass.")] = 8,
    memory: Annotated[
        int, typer.Option("--memory", metavar="MIB", help="Memory for sums; less memory takes more passes.")
    ] = 1024,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the drawn records.")] = 0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write cka.json, .csv, .html and .png there.")
    ] = None,
    imports: Imports = None,
    as_json: Json = False,
) -> None:
    """Compare all layers of two models by linear CKA, and mark the blocks that PQ-LoRA (method fedmosaic) matches.

    Layers are compared at the tokens of the answers, or at all tokens where a task has no answers.
    """
    _check(
        records,
        benchmark,
        {"blocks": blocks or 0, "samples": samples, "tokens": tokens, "batch_size": batch_size, "memory": memory},
        out,
    )
    with only_json(as_json), warnings_to(messages()):
        from befit.studies.cka import layer_cka

        load_imports(imports)
        source = _source(records, task, benchmark)
        backbones, examples = load((first, second), source, overrides or [], samples, seed)
        blocks = _blocks(blocks, backbones)
        cka = layer_cka(
            backbones[0],
            backbones[1],
            examples,
            samples=samples,
            tokens=tokens,
            batch_size=batch_size,
            seed=seed,
            memory_mib=memory,
        )
        summary = as_dict(cka, blocks)
        if out is not None:
            write(out, cka, summary, blocks)
    if as_json:
        print_json(summary)
        return
    show(cka, summary)
    if out is not None:
        say(f"\nheat map: {out / 'cka.html'}")


def _check(records: Path | None, benchmark: str | None, counts: dict[str, int], out: Path | None) -> None:
    problems = [
        f"--{name.replace('_', '-')}: must be {_LEAST[name]} or more, got {value}"
        for name, value in counts.items()
        if value < _LEAST[name]
    ]
    if (records is None) == (benchmark is None):
        problems.append("--records, --benchmark: give one of the two")
    if records is not None and not records.exists():
        problems.append(f"--records: there is no file {records}{looked_from(records)}")
    if problems:
        raise ConfigError(problems, "the command")
    if out is not None:
        check_folder(out)


def _source(records: Path | None, task: str, benchmark: str | None) -> dict[str, Any]:
    """Where the records are, as a configuration says it."""
    if records is None:
        return {"benchmark": {"name": benchmark}}
    return {
        "data": {
            "task": task,
            "clients": {"records": str(records)},
            "val_fraction": 0.0,
            "test_fraction": 0.0,
        }
    }


def load(
    models: tuple[str, str], source: dict[str, Any], overrides: list[str], samples: int, seed: int
) -> tuple[list[Backbone], tuple[Examples, Examples]]:
    """Both backbones, and the drawn records as examples for each of them."""
    import torch

    from befit.config.load import load_experiment
    from befit.protocol.registry import ALONE
    from befit.protocol.site import Backbone
    from befit.runs.loading import load_federation, load_model

    common = {**source, "method": ALONE, "baselines": []}
    experiments = [load_experiment({**common, "model": {"id": model}}, overrides) for model in models]
    federation = load_federation(experiments[0])
    records = federation.clients[0].train if "data" in source else federation.public
    if not len(records):
        raise DataError(f"{federation.name} has no public records; give --records")
    order = torch.randperm(len(records), generator=torch.Generator().manual_seed(seed))[:samples].tolist()
    chosen = [records[place] for place in order]
    backbones, examples = [], []
    for name, experiment in zip(models, experiments, strict=True):
        model, task, fingerprint = load_model(experiment, federation.task, federation.label_names)
        backbones.append(Backbone(name, fingerprint, model, task))
        examples.append(task.prepare(chosen))
    return backbones, (examples[0], examples[1])


def _blocks(blocks: int | None, backbones: list[Backbone]) -> int:
    """How many blocks to mark. Raises ModelError, before anything is computed, for more than a model has."""
    from befit.adapters.pq import placement

    configs: list[Any] = [backbone.model.backbone.config for backbone in backbones]
    depths = [config.get_text_config().num_hidden_layers for config in configs]
    for depth in depths:
        placement(blocks or 0, depth)
    return min(4, *depths) if blocks is None else blocks


def as_dict(cka: LayerCka, blocks: int) -> dict[str, Any]:
    from befit.studies.cka_map import layer_names

    rows, columns = map(layer_names, cka.values.shape)
    return {
        "models": list(cka.models),
        "tokens": cka.tokens,
        "records": cka.records,
        "rows": rows,
        "columns": columns,
        "cka": cka.values.tolist(),
        "blocks": cka.placed(blocks),
    }


def write(out: Path, cka: LayerCka, summary: dict[str, Any], blocks: int) -> None:
    from befit.core.storage import atomic_write, write_json
    from befit.studies.cka_map import cka_csv, cka_page, cka_png

    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "cka.json", summary)
    atomic_write(out / "cka.csv", cka_csv(cka).encode())
    atomic_write(out / "cka.html", cka_page(cka, blocks).encode())
    atomic_write(out / "cka.png", cka_png(cka, blocks))


def show(cka: LayerCka, summary: dict[str, Any]) -> None:
    from befit.studies.cka_map import matched_blocks

    depths = " and ".join(
        f"{model} ({count - 1} blocks)" for model, count in zip(cka.models, cka.values.shape, strict=True)
    )
    say(f"{depths}, at {cka.tokens:,} tokens of {cka.records:,} records\n")
    show_table(screen(), matched_blocks(cka, len(summary["blocks"]), ("A", "B")))
    mean, most = float(cka.values[1:, 1:].mean()), cka.values[1:, 1:].amax(1)
    say(
        f"CKA of all pairs of blocks: mean {mean:.3f}; of a block of A and the most alike of B: mean "
        f"{float(most.mean()):.3f}, least {float(most.min()):.3f}",
        "dim",
    )
