"""Where a method and a federation do not fit, found before anything is trained: one list, for every caller."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice

from befit.adapters.keys import NOTHING, slot_of
from befit.adapters.mixers import ByInput
from befit.core.errors import ConfigError, DataError, ModelError, did_you_mean
from befit.core.plugins import returned
from befit.core.text import first_of
from befit.core.values import TensorSpec
from befit.data.federation import ClientData, Federation
from befit.data.folds import too_few_to_part
from befit.merge.robust import least_replies
from befit.protocol.context import Context, Problem
from befit.protocol.guard import MAJORITY
from befit.protocol.method import Method
from befit.protocol.private_checks import refused
from befit.protocol.registry import standard_method
from befit.protocol.schedule import replies_of
from befit.protocol.secure.fixed import FixedPoint
from befit.protocol.secure.masks import FEWEST, fewest_left
from befit.protocol.settings import GuardSettings
from befit.protocol.weights import dominating
from befit.protocol.wire import compressed


def check(method: Method, context: Context) -> list[Problem]:
    """Everything that is wrong between a method and what it is to run on, and everything a user should know of both.

    What the method says of models is asked only where its adapters fit them.
    """
    problems = [Problem("error", "", text) for text in _unmet(method, context)]
    fitting = dict(context.shapes)
    for family, shapes in context.shapes.items():
        try:
            method.layout.specs(shapes)
        except ModelError as error:
            of = f" (the model of family {family})" if len(context.shapes) > 1 else ""
            problems.append(Problem("error", "", f"{error}{of}"))
            del fitting[family]
        problems += [
            Problem("error", "base.targets", f"{word} is none of the modules that adapter.targets adapts")
            for word in method.layout.unknown_targets(shapes)
        ]
    if context.privacy is not None:
        problems += refused(method, context.privacy, context)
    fitted, sums = replace(context, shapes=fitting), [*_sums(method, context), *_asynchronous(method, context)]
    return [
        *problems,
        *_slots(method, fitted),
        *_wide(method, fitted),
        *_by_input(method, context),
        *_start(method, context),
        *_trust(method, context),
        *_uncompressed(method, fitted),
        *sums,
        *_apart(method, fitted),
        *_newcomers(method, context),
        *returned(method.check, method.check(fitted), Iterable),
    ]


def _slots(method: Method, context: Context) -> Iterator[Problem]:
    """Slots that the method names, and that hold nothing in any backbone's layout."""
    if not context.shapes:
        return
    keys = {key for shapes in context.shapes.values() for key in method.layout.specs(shapes)}
    known = dict.fromkeys([*(slot.name for slot in method.layout.slots), *sorted(map(slot_of, keys))])
    for place, names in _named_slots(method):
        for name in dict.fromkeys(name for name in names if name not in known):
            text = f"no slot {name!r}; there are {', '.join(known)}.{did_you_mean(name, known)}"
            yield Problem("error", "", f"{place}: {text}")


def _wide(method: Method, context: Context) -> Iterator[Problem]:
    """A rank above what the narrowest adapted module can use."""
    modules = [module for shapes in context.shapes.values() for module in shapes.targets.items()]
    if not modules:
        return
    name, shape = min(modules, key=lambda module: min(module[1].d_in, module[1].d_out))
    width, rank = min(shape.d_in, shape.d_out), max((slot.rank for slot in method.layout.slots), default=0)
    if rank > width:
        most = f"the largest that an update of {name} ({shape.d_out} x {shape.d_in}) can have"
        yield Problem("warning", "", f"rank {rank} is above {width}, {most}")


def _by_input(method: Method, context: Context) -> Iterator[Problem]:
    """Adapted modules at which nothing says whose a row is."""
    if isinstance(method.use.mixer, ByInput):
        for reason in dict.fromkeys(shapes.mixes_rows for shapes in context.shapes.values() if shapes.mixes_rows):
            text = f"{reason}, and this method weighs its adapters for each input; name no such module"
            yield Problem("error", "adapter.targets", text)


def _start(method: Method, context: Context) -> Iterator[Problem]:
    if context.started and not method.starting():
        yield Problem(
            "error", "adapter.start", "this method trains no low-rank adapter that could start as one of PEFT"
        )


def _named_slots(method: Method) -> Iterator[tuple[str, Iterable[str]]]:
    """The slots that a method names, by where it does."""
    yield "use", method.use.slots
    for stage in method.plan():
        messages = (("sends up", stage.up), ("receives", stage.down))
        for what, chosen in ((what, message.selectors) for what, message in messages if message is not None):
            yield f"what stage {stage.name} {what}", sorted(frozenset().union(*(each.slots for each in chosen)))
        if stage.trains is not None:
            yield f"what stage {stage.name} trains", sorted(stage.trains.slots)
    for work in method.work():
        yield "what is computed in training", work.active


def _uncompressed(method: Method, context: Context) -> Iterator[Problem]:
    """Forms of the wire that are not for the method."""
    if context.wire.compresses:
        layouts = [method.layout.specs(shapes) for shapes in context.shapes.values()]
        yield from (Problem("error", "wire", text) for text in uncompressed(method, layouts))


def uncompressed(method: Method, layouts: Sequence[Mapping[str, TensorSpec]]) -> Iterator[str]:
    """Why int8 and top_k are not for a method.

    layouts  all arrays of the installed layout, of every backbone
    """
    stages = [stage for stage in method.plan() if stage.federated and stage.who == "cohort"]
    if layouts and stages and not any(compressed(stage, layout) for stage in stages for layout in layouts):
        yield (
            "int8 and top_k compress what clients train and both receive and send, and there is nothing of that here; "
            "dtype: bfloat16 without top_k halves all bytes"
        )
    updates = {key for stage in stages for layout in layouts for key in compressed(stage, layout)}
    for stage in stages:
        whole = {key for layout in layouts for key in stage.reply.specs(layout).keys() - compressed(stage, layout)}
        if both := sorted(updates & whole):
            yield (
                f"int8 and top_k compress {both[0]!r} as a change of what a client received, and in the stage "
                f"{stage.name!r} clients send it whole; take dtype: bfloat16 without top_k"
            )


def _trust(method: Method, context: Context) -> Iterator[Problem]:
    """Rules that cannot be kept here, and a client that counts for more than all others."""
    guard, clients = context.guard, context.federation.clients
    if all(stage.up is None for stage in method.plan()):
        return
    if context.max_weight is None:
        for sentence in dominating({client.id: len(client.train) for client in clients}, context.families):
            text = f"{sentence}; 0.5 limits its weight to half"
            yield Problem("warning", "federation.max_weight", text)
    families = Counter(context.families.get(client.id, "") for client in clients)
    at_most = replies_of(len(clients), context.cohort, context.asynchronous)
    if guard.clip is not None and (most := min(max(families.values(), default=0), at_most)) < MAJORITY:
        text = f"shortens no update: none is usual among fewer than {MAJORITY} of one backbone, and a round has {most}"
        yield Problem("warning", "guard.clip", text)
    if guard.rule == "none":
        if guard.attackers != GuardSettings.attackers:
            yield Problem("error", "guard.attackers", "is how many a guard.rule allows for, and the rule is none")
        return
    if method.needs.individual_updates and guard.rule != "multi-krum":
        text = (
            f"the rule {guard.rule} makes one update of all, and here the server needs each client's own; multi-krum "
            "leaves the least likely ones out, and guard.clip shortens what is long"
        )
        yield Problem("error", "guard.rule", text)
    fewest, needed = min(*families.values(), at_most), least_replies(guard.attackers)
    if fewest < needed:
        text = f"the rule {guard.rule} needs {needed} clients of one backbone in a round for this many, not {fewest}"
        yield Problem("error", "guard.attackers", text)


def _sums(method: Method, context: Context) -> Iterator[Problem]:
    """Why the server cannot do with sums of updates."""
    if context.secure_sums is None or all(stage.up is None for stage in method.plan()):
        return
    key = "federation.secure_sums"
    for stage in unsummed(method):
        text = (
            f"in stage {stage} the server needs each client's own reply, which no sum has, or does not say that a mean "
            f"will do (Stage.mean); {_another()}"
        )
        yield Problem("error", key, text)
    if _several_backbones(context):
        yield Problem("error", key, "clients of different backbones have no sum; give one backbone to all")
    clients = replies_of(len(context.federation.clients), context.cohort, None)
    if clients < FEWEST:
        yield Problem("error", key, f"a sum hides nobody among fewer than {FEWEST} clients in a round, not {clients}")
    elif fewest_left(clients, context.secure_sums.threshold) == clients:
        text = f"all {clients} clients of a round have to stay to its end; without one of them the run ends"
        yield Problem("warning", f"{key}.threshold", text)
    carrying = [stage.name for stage in method.plan() if stage.mean is not None and stage.carries]
    if carrying and clients < len(context.federation.clients):
        text = (
            f"in stage {carrying[0]} clients go on from what they kept, and a secure sum is then of clients that were "
            "sent the same in all rounds; set federation.cohort to null"
        )
        yield Problem("error", "federation.cohort", text)
    try:
        assert FixedPoint(context.secure_sums, {}, clients, weighted=True).width
    except ConfigError as error:
        yield from (Problem("error", "", problem) for problem in error.problems)


def _asynchronous(method: Method, context: Context) -> Iterator[Problem]:
    """Why rounds cannot end before all have answered, as far as a method's stages say it."""
    settings, key = context.asynchronous, "federation.asynchronous"
    if settings is None or all(stage.up is None for stage in method.plan()):
        return
    for stage in unsummed(method):
        text = f"in stage {stage} the server needs each client's own reply, and late ones are changes that it adds up"
        yield Problem("error", key, f"{text}; {_another()}")
    for stage in (stage for stage in method.plan() if stage.mean is not None and stage.turns):
        text = f"the rounds of stage {stage.name} take turns in what they move, and a late update has missed its turn"
        yield Problem("error", key, f"{text}; {_another()}")
    if _several_backbones(context):
        yield Problem("error", key, "clients of different backbones are sent different values; give one to all")
    if settings.buffer > (clients := len(context.federation.clients)):
        text = f"{settings.buffer} are more than the {clients} clients, so every round waits for all of them"
        yield Problem("warning", f"{key}.buffer", text)
    if isinstance(settings.times, Mapping):
        yield from unknown_clients(f"{key}.times", settings.times, context)


def _apart(method: Method, context: Context) -> Iterator[Problem]:
    """Stages whose late replies are no change of what everybody is sent now: what clients send is more than changes, or
    the server moves what they are expressed in."""
    if context.asynchronous is None:
        return
    for stage in (stage for stage in method.plan() if stage.mean is not None):
        for layout in (method.layout.specs(shapes) for shapes in context.shapes.values()):
            changes = compressed(stage, layout)
            if not changes == stage.reply.specs(layout).keys() == stage.down.specs(layout).keys():
                text = (
                    f"in stage {stage.name} clients send more than changes of what they were sent, or the server moves "
                    f"what these are expressed in, so a late one does not fit a later round; {_another()}"
                )
                yield Problem("error", "federation.asynchronous", text)
                break


def _another() -> str:
    return f"take another method, such as {standard_method()}, or set it to null"


def _several_backbones(context: Context) -> bool:
    return len({context.families.get(client.id) for client in context.federation.clients}) > 1


def unsummed(method: Method) -> list[str]:
    """The stages in which the server needs each client's own reply."""
    return [stage.name for stage in method.plan() if stage.federated and stage.mean is None]


def _unmet(method: Method, context: Context) -> Iterator[str]:
    """What the method needs and the federation does not have."""
    needs, federation = method.needs, context.federation
    groups: dict[str, int] = {}
    for client in federation.clients:
        family = "" if needs.mixed else context.families.get(client.id, "")
        groups[family] = groups.get(family, 0) + 1
    for family, size in groups.items():
        if size < needs.min_clients and len(groups) == 1:
            yield f"needs at least {needs.min_clients} clients, there are {size}"
        elif size < needs.min_clients:
            yield (
                f"serves each backbone by itself and needs at least {needs.min_clients} clients of each; the family "
                f"{family} has {size}"
            )
    yield from without_examples(needs.splits, federation)
    yield from _without_parts(method, federation)
    if needs.public and not len(federation.public):
        yield f"needs public records, and {federation.name} has none (data.public names those of your own)"
    if needs.public_mixed and _several_backbones(context) and not len(federation.public):
        yield (
            "needs public records to let clients of different backbones learn from each other, and "
            f"{federation.name} has none; give one backbone to all, or take a method that serves each by itself"
        )


def _without_parts(method: Method, federation: Federation) -> Iterator[str]:
    """The first client whose training examples are too few for the parts that stages leave out."""
    parts = max((stage.parts for stage in method.plan()), default=1)

    def problem(client: ClientData) -> str:
        try:
            return too_few_to_part(client, parts)
        except DataError:  # its records are elsewhere: that site looks at their groups
            return ""

    if parts > 1:
        yield from islice(filter(None, map(problem, (c for c in federation.clients if len(c.train)))), 1)


def _newcomers(method: Method, context: Context) -> Iterator[Problem]:
    """Newcomers without the training examples that stages of their own need."""
    own = [
        stage for stage in method.plan() if not stage.federated and stage.who == "cohort" and stage.trains != NOTHING
    ]
    least = max((stage.parts for stage in own), default=0)
    measured = [client for client in context.federation.newcomers if client.id in context.families]
    if few := [client.id for client in measured if len(client.train) < least]:
        too_few = "no training examples" if least == 1 else f"fewer than {least} training examples"
        yield Problem("warning", "", f"newcomers with {too_few} will have no model of it: {first_of(few, 5)}")


def without_examples(splits: Iterable[str], federation: Federation) -> Iterator[str]:
    """What is missing, and how to mend it, for every split of which some client has no examples."""
    for split in splits:
        if empty := [client.id for client in federation.clients if not getattr(client, split)]:
            mend = " (val_fraction, of data or of the benchmark, holds some out)" if split == "val" else ""
            yield f"needs {split} examples at every client; {empty[0]} has none{mend}"


def unknown_clients(key: str, patterns: Collection[str], context: Context) -> list[Problem]:
    """Patterns of client ids in an option that fit no client and no newcomer, where no limit leaves clients out."""
    federation = context.federation
    everybody = [client.id for client in (*federation.clients, *federation.newcomers)]
    return [
        Problem("error", f"{key}.{pattern}", f"{pattern} is no client.{client_hint(pattern, everybody)}")
        for pattern in (patterns if federation.has_all_clients else ())
        if not any(fnmatchcase(client, pattern) for client in everybody)
    ]


def client_hint(pattern: str, clients: Collection[str]) -> str:
    """The client that may be meant, or the names of the clients."""
    return did_you_mean(pattern, clients) or f" The clients are {first_of(clients, 10)}"
