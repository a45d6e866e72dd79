"""A budgeted adapter of one's own: what a method does once it has rank scales (Lee et al. 2025a, Figure 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

from torch import Tensor

from befit.adapters.bayestune import BUDGETED, LOW, SCALES, Budgeted, Scales
from befit.adapters.keys import Selector, factor, join, select, slot
from befit.adapters.layout import Extra, Layout, ModelShapes, Slot
from befit.core.errors import ConfigError, ModelError
from befit.core.values import Payload, State, Tick
from befit.methods.parts.budget.budget import affordable, compact, expand, keep, kept_ranks
from befit.protocol.check import unknown_clients
from befit.protocol.context import Context, Problem
from befit.protocol.jobs import Steps
from befit.protocol.site import Site
from befit.train.loop import training
from befit.train.passes import Pass

LEAST_STEPS = 4  # of a search: the first sends every scale to its lower bound, the next ones bring it back
WEIGHTS: Selector = slot(BUDGETED) & ~factor("lambda")


def budgeted_layout(rank_init: int, scale: float, clamped: bool, extras: tuple[Extra, ...] = ()) -> Layout:
    """The slot of the budgeted adapter and that of the scales, which has A and B of the former."""
    alpha = scale * rank_init
    adapter = Slot(BUDGETED, rank_init, alpha, form=Budgeted())
    return Layout((adapter, Slot(SCALES, rank_init, alpha, form=Scales(clamped=clamped))), extras=extras)


@dataclass(frozen=True)
class Limit:
    """What one client may have: `parameters` trained numbers, or `rank` times as many ranks as there are modules."""

    rank: int | None = None
    parameters: int | None = None


@dataclass(frozen=True)
class Budgets:
    """How many ranks a client may have.

    rank        r, of r * L ranks for L modules: the budget that is deployed
    others      further ones, trained and measured beside it from the same scales
    parameters  every client's limit in trained numbers of A and B, in place of r; None for none
    limits      budgets of single clients in place of both: patterns of ids, the first that fits counts
    """

    rank: int
    others: tuple[int, ...] = ()
    parameters: int | None = None
    limits: tuple[tuple[str, Limit], ...] = ()

    @property
    def names(self) -> dict[str, int]:
        """Slots under which the adapters are stored, with their r; the deployed one first."""
        return {BUDGETED: self.rank, **{f"{BUDGETED}-{r}": r for r in self.others if r != self.rank}}

    def limit(self, client: str) -> Limit:
        """The budget that one client deploys."""
        matching = (limit for pattern, limit in self.limits if fnmatchcase(client, pattern))
        return next(matching, Limit(self.rank, self.parameters))

    def check(self, context: Context) -> list[Problem]:
        """Limits for nobody, and limits into which a rank of the largest module does not fit, each with its first
        client.

        Which module the scales put first is known only after the search, and a limit is used up in their order.
        """
        problems = unknown_clients("limits", [pattern for pattern, _ in self.limits], context)
        for family, shapes in context.shapes.items():
            problems += self._too_small(shapes, context.members(family))
        return problems

    def _too_small(self, shapes: ModelShapes, clients: Sequence[str]) -> list[Problem]:
        widths = {name: shape.d_in + shape.d_out for name, shape in shapes.targets.items()}
        largest = max(widths, key=lambda name: widths[name], default="")
        first_clients: dict[tuple[str, int], str] = {}
        for client in clients:
            if limited := self.limit(client).parameters:
                first_clients.setdefault((self._key(client), limited), client)
        return [
            Problem(
                "error",
                key,
                f"a limit of {parameters} parameters ({parameters * 4 / 1e6:g} megabytes), as client {client} has, "
                + (
                    f"holds no rank: the smallest module takes {min(widths.values())} a rank. "
                    if parameters < min(widths.values())
                    else f"may hold no rank: {largest} takes {widths[largest]}, and the scales may put it first. "
                )
                + f"Give it {widths[largest]} or more, or rank in its place",
            )
            for (key, parameters), client in first_clients.items()
            if largest and parameters < widths[largest]
        ]

    def _key(self, client: str) -> str:
        """The option that says a client's limit."""
        pattern = next((pattern for pattern, _ in self.limits if fnmatchcase(client, pattern)), None)
        return "parameters or megabytes" if pattern is None else f"limits.{pattern}"

    def count(self, name: str, scales: Tensor, site: Site) -> int:
        """How many ranks the adapter `name` keeps. Raises ModelError where it is none, which `check` says before."""
        if name != BUDGETED:
            return self.names[name] * len(scales)
        limit = self.limit(site.info.id)
        if limit.parameters is None:
            return (limit.rank or self.rank) * len(scales)
        ranks = affordable(scales, list(site.model.shapes.targets.values()), limit.parameters)
        if not ranks:
            raise ModelError(
                f"client {site.info.id}: a limit of {limit.parameters} parameters holds no rank of the "
                "module that its scales put first. Give it more, or rank in its place"
            )
        return ranks


def steps_for(site: Site, epochs: int | None, rounds: int = 1) -> int:
    """`rounds` times train.max_steps; with epochs that many times over the client's training examples, in all."""
    if epochs is None:
        return rounds * site.budget.max_steps
    return epochs * -(-len(site.examples("train")) // site.budget.batch_size)


def few_steps(context: Context, epochs: int | None, rounds: int = 1) -> list[Problem]:
    """A warning about clients whose search takes too few steps for scales to leave their lower bound."""
    train, federation = context.train, context.federation
    taken = {
        client.id: replace(train, epochs=epochs or train.epochs).steps_for(len(client.train))
        * (1 if epochs else rounds)
        for client in federation.clients
    }
    few = {client: steps for client, steps in taken.items() if steps < LEAST_STEPS}
    if not few:
        return []
    who = "1 client searches" if len(few) == 1 else f"{len(few)} of {len(taken)} clients search"
    first, steps = next(iter(few.items()))
    text = (
        f"{who} for ranks in fewer than {LEAST_STEPS} steps, first {first} in {steps}: in one or two all scales end at "
        f"{LOW:g}, in three hardly above it, and which ranks are kept says nothing. "
    )
    more = "a larger train.max_steps" if epochs is None else "more epochs or a smaller train.batch_size"
    return [Problem("warning", "epochs" if epochs is not None else "", text + f"Give {more}")]


def pruned(site: Site, scales: Tensor, count: int) -> State:
    """Kept scales of every module, as arrays of the budgeted slot."""
    kept = keep(scales, count)
    return {join(BUDGETED, name, "lambda"): row for name, row in zip(site.model.shapes.targets, kept, strict=True)}


def fine_tune(
    site: Site,
    at: Tick,
    name: str,
    start: Mapping[str, Tensor],
    memory: Payload,
    steps: int,
    base: tuple[str, ...],
) -> Steps[tuple[State, Payload]]:
    """Train A and B of one budget's adapter from `start`, its scales frozen; only the task's loss.

    start   the budgeted slot's arrays
    memory  the client's, with what the optimiser goes on from
    ->      the adapter as it is stored under `name`, and what the optimiser goes on from next
    """
    model = site.model
    model.load(start)
    report = yield from training(
        site, [Pass(WEIGHTS, (*base, BUDGETED), name=name, keep_optimiser=True)], at, steps=steps, memory=memory
    )
    ranks = kept_ranks({key: value for key, value in start.items() if key.endswith("/lambda")})
    suffix = "" if name == BUDGETED else f"_{name}"
    site.report.update({f"{key}{suffix}": value for key, value in report.numbers().items()})
    numbers = {
        "ranks": sum(ranks.values()),
        "modules": sum(rank > 0 for rank in ranks.values()),
        "adapter_parameters": trained(site, {key.split("/")[1]: rank for key, rank in ranks.items()}),
    }
    site.report.update({f"{key}{suffix}": float(value) for key, value in numbers.items()})
    return compact(model.dump(slot(BUDGETED)), name), report.memory


def trained(site: Site, ranks: Mapping[str, int]) -> int:
    """`sum_l r_l (d_in + d_out)`: the trained numbers of A and B."""
    shapes = site.model.shapes.targets
    return sum(rank * (shapes[name].d_in + shapes[name].d_out) for name, rank in ranks.items())


def restored(stored: Mapping[str, Tensor], name: str, site: Site) -> State:
    """A stored adapter as arrays of the budgeted slot of a bare model."""
    initial = site.model.dump(slot(BUDGETED))
    return expand(select(dict(stored), slot(name)), name, initial)


def check_budgets(
    rank: int, budgets: Sequence[int], rank_max: int, parameters: int | None, megabytes: float | None
) -> list[str]:
    """What cannot work, each with the key it is about."""
    problems = []
    if rank_max < 1:
        problems.append(f"rank_max: must be at least 1, got {rank_max}")
    for r in (rank, *budgets):
        if not 1 <= r <= 2 * rank_max:
            key = "rank" if r == rank else "budgets"
            problems.append(f"{key}: must be from 1 to 2 * rank_max = {2 * rank_max}, got {r}")
    if parameters is not None and megabytes is not None:
        problems.append("parameters: and megabytes are two ways to give one limit; give one of them")
    if (parameters is not None and parameters < 1) or (megabytes is not None and not megabytes > 0):
        problems.append(f"{'parameters' if parameters is not None else 'megabytes'}: must be positive")
    elif megabytes is not None and not _entries(None, megabytes):
        problems.append(f"megabytes: {megabytes:g} are less than the 4 bytes of one parameter")
    return problems


def make_budgets(
    method: str,
    rank: int,
    budgets: Sequence[int],
    rank_max: int,
    parameters: int | None,
    megabytes: float | None,
    limits: Mapping[str, Any] | None,
) -> Budgets:
    """Checked budgets; a megabyte is 10^6 bytes of float32. Raises ConfigError with all problems."""
    problems = check_budgets(rank, budgets, rank_max, parameters, megabytes)
    for pattern, limit in (limits or {}).items():
        problems += [f"limits.{pattern}: {problem}" for problem in check_limit(limit, rank_max)]
    if problems:
        raise ConfigError(problems, method)
    by_pattern = tuple(
        (pattern, Limit(limit.get("rank"), _entries(limit.get("parameters"), limit.get("megabytes"))))
        for pattern, limit in (limits or {}).items()
    )
    return Budgets(rank, tuple(dict.fromkeys(budgets)), _entries(parameters, megabytes), by_pattern)


def check_limit(limit: Any, rank_max: int) -> list[str]:
    """What is wrong with one client's limit."""
    keys = ("rank", "parameters", "megabytes")
    if not isinstance(limit, Mapping) or len(limit) != 1 or next(iter(limit)) not in keys:
        return [f"takes one of {', '.join(keys)}, such as {{megabytes: 0.5}}; got {limit!r}"]
    ((key, value),) = limit.items()
    if isinstance(value, bool) or not isinstance(value, (int, float) if key == "megabytes" else int):
        return [f"{key} must be a {'number' if key == 'megabytes' else 'whole number'}, got {value!r}"]
    rank, parameters, megabytes = (limit.get(name) for name in keys)
    return check_budgets(1 if rank is None else rank, (), rank_max, parameters, megabytes)


def _entries(parameters: int | None, megabytes: float | None) -> int | None:
    return parameters if megabytes is None else int(megabytes * 1e6 / 4)
