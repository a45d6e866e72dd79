"""The command line: one clear message and an exit code where something goes wrong, and no import of torch for help.

Exit codes: 0 fine, 2 a user's mistake, 1 the world's (a full disk, too few replies, a defect), 130 interrupted.
"""

from __future__ import annotations

import re
import sys
from inspect import getdoc
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from befit.cli import (
    ablate,
    adapt,
    adapter,
    cka,
    compare,
    cost,
    flower,
    init,
    inspect,
    merge,
    partition,
    plan,
    run,
    select,
)
from befit.cli.output import CONFIG, messages, print_error, say
from befit.core.errors import UNNAMED, BefitError, ConfigError, RunError
from befit.core.garbage import collect_seldom
from befit.core.plugins import in_plugin, named_reason
from befit.core.version import __version__


def exit_code(error: BaseException) -> int:
    """2 for what the user can put right, 1 for the rest.

    A run directory that is missing or belongs to another run is the user's mistake; one that cannot be written is not.
    """
    if isinstance(error, RunError):
        cause = error.__cause__
        missing = (FileNotFoundError, FileExistsError, NotADirectoryError, IsADirectoryError)
        return 1 if isinstance(cause, OSError) and not isinstance(cause, missing) else 2
    return 2 if in_plugin(error) or (isinstance(error, BefitError) and isinstance(error, ValueError)) else 1


def explain_error(error: BaseException, as_json: bool = False) -> None:
    """One message on standard error, without a traceback; with `as_json` an object with it on standard output too."""
    text = named_reason(error)
    if in_plugin(error):
        text = f"a plugin failed: {text}\n  the same command with --debug shows how it got there"
    elif not isinstance(error, (BefitError, OSError, MemoryError)):
        text = f"befit failed in a way that it should not: {text}\n  the same command with --debug shows where"
    say(text, "red", messages())
    if as_json:
        print_error(error)


class _Commands(TyperGroup):
    """Commands whose errors become a message and an exit code; `--debug` is taken wherever it stands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["befit.json"] = "--json" in args
        if "--debug" in args:
            args = ["--debug", *(argument for argument in args if argument != "--debug")]
        return super().parse_args(ctx, args)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except Exception as error:
            if "Did you mean" in getattr(error, "message", ""):  # typer's, beside which click would add its own
                error.possibilities = None  # type: ignore[attr-defined]
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and not in_plugin(error):
                raise
            as_json = ctx.meta.get("befit.json", False)
            if as_json and hasattr(error, "format_message"):
                print_error(error)  # what typer refuses: an unknown option; it tells people itself
            typers = isinstance(error, (typer.Exit, typer.Abort)) or hasattr(error, "exit_code")  # typer's control flow
            if typers or ctx.params.get("debug") or isinstance(error, BrokenPipeError):
                raise
            if isinstance(error, ConfigError) and error.where == UNNAMED and (file := ctx.meta.get(CONFIG)):
                error = ConfigError(error.problems, file)
            explain_error(error, as_json)
            raise typer.Exit(exit_code(error)) from None


app = typer.Typer(
    name="befit",
    cls=_Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"befit {__version__}\n")
        raise typer.Exit


@app.callback()
def befit(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Federated fine-tuning with LoRA in which every client ends with its own adapter.

    Start with [bold]befit demo[/bold]; then, with data of your own, [bold]befit init DIR[/bold].
    """


app.command("demo", rich_help_panel="Train")(run.demo)
app.command("init", rich_help_panel="Train")(init.init)
app.command("run", rich_help_panel="Train")(run.run)
app.command("report", rich_help_panel="Inspect")(run.report)
app.command("plan", rich_help_panel="Train")(plan.plan)
app.command("check", rich_help_panel="Inspect")(inspect.check)
app.command("cost", rich_help_panel="Inspect")(cost.cost)
app.command("methods", rich_help_panel="Inspect")(inspect.methods)
app.command("benchmarks", rich_help_panel="Inspect")(inspect.benchmarks)
app.command("explain", rich_help_panel="Inspect")(inspect.explain)
app.command("schema", rich_help_panel="Inspect")(inspect.schema)
app.command("cka", rich_help_panel="Inspect")(cka.cka)
app.command("partition", rich_help_panel="Inspect")(partition.partition)
app.command("select", rich_help_panel="Inspect")(select.select)
app.command("ablate", rich_help_panel="Train")(ablate.ablate)
app.command("compare", rich_help_panel="Train")(compare.compare)
app.command("export", rich_help_panel="Use")(adapter.export)
app.command("eval", rich_help_panel="Use")(adapter.evaluate)
app.command("push", rich_help_panel="Use")(adapter.push)
app.command("predict", rich_help_panel="Use")(adapter.predict)
app.command("adapt", rich_help_panel="Use")(adapt.adapt)
app.command("merge", rich_help_panel="Use")(merge.merge)
app.command("worker", rich_help_panel="On many machines")(flower.worker)
app.command("doctor", rich_help_panel="On many machines")(flower.doctor)
app.add_typer(flower.app, name="flower", rich_help_panel="On many machines")
for _command in (*app.registered_commands, *flower.app.registered_commands):
    # Of all paragraphs but the first typer keeps the line ends, which are those of the source.
    _command.help = re.sub(r"(?<!\n)\n(?!\n)", " ", getdoc(_command.callback) or "")


def main() -> None:
    """Entry point of the `befit` script."""
    collect_seldom()
    app()
