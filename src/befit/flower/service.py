"""Answers requests at a site: bytes in, bytes out, the same in Flower's process and in a resident worker."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from filelock import FileLock

from befit.core.errors import PASSING, BefitError, ConfigError, PayloadMismatch
from befit.core.names import folder_name
from befit.core.storage import remove_litter
from befit.core.text import readable
from befit.core.values import ClientInfo, Cost, Failure, Payload, Score, State, Tick, Update
from befit.flower.agreement import (
    AnsweredRequests,
    agree,
    agreed,
    agreed_methods,
    check_agreed,
    check_data,
    check_known,
    check_room,
    check_sums,
    keyed_hash,
)
from befit.flower.budget import Account
from befit.flower.frame import digest, hash_of_run, unpack
from befit.flower.keys import SiteIdentity
from befit.flower.policy import experiment_here, names_a_place
from befit.flower.replies import scalars
from befit.flower.requests import check_request, is_name, kept_of, tick_of
from befit.flower.site_file import SiteFile, claim
from befit.flower.site_hosts import SiteHosts, lacking
from befit.flower.site_reply import (
    NOT_WRITTEN,
    WITHHELD,
    Header,
    Reply,
    measured,
    stage_of,
    tells_nothing,
    told_numbers,
    told_report,
    traced,
)
from befit.flower.site_state import SiteMemory, SiteVault, Stamp, has_memory
from befit.protocol.accountant import Release
from befit.protocol.download import check_download
from befit.protocol.guard import check_finite
from befit.protocol.method import Deployment, Method, run_stages, trained_alone
from befit.protocol.privacy import hides, planned
from befit.protocol.private_checks import refused
from befit.protocol.registry import build_method
from befit.protocol.secure.desk import SecureDesk, without_shares
from befit.protocol.serve import final_stages, stage_named
from befit.protocol.settings import PrivacySettings
from befit.protocol.stage import Stage
from befit.runs.artifacts import export_name, write_client
from befit.runs.deploy import HELD_OUT, choose_once_exported, chosen_run, has_chosen, note_held_out
from befit.runs.host import Host
from befit.runs.local import LocalEngine
from befit.runs.provenance import identify_client

_LOG = logging.getLogger(__name__)


class SiteService:
    """Answers requests for one site. It keeps its backbone for the next request.

    hosts  where it keeps that; None: in its own
    """

    def __init__(self, site: SiteFile, hosts: SiteHosts | None = None) -> None:
        self.site = site
        self._identity = None if site.key is None else SiteIdentity(site.client, site.key, site.peers)
        self.hosts = hosts or SiteHosts()

    def answer(self, request: bytes) -> bytes:
        """The reply to a request of the server; what goes wrong is a reply as well.

        Everything in a reply is in the site's outbound.json before this returns. Where nothing can be written there, as
        on a full disk, the reply says that and nothing else.
        """
        header: Header = {}
        try:
            header, arrays = unpack(request, "the request")
            check_request(header, self.site.client)
            with _alone(claim(self.site)):
                do = {
                    "hello": self._hello,
                    "train": self._train,
                    "score": self._score,
                    "export": self._export,
                    "secure": self._secure,
                }
                return do[header["do"]](header, arrays, digest(request))
        except Exception as error:
            do = readable(header.get("do", "a request"), 20)
            _LOG.error("site %s could not answer %s:\n%s", self.site.client, do, traced(error))
            try:
                with _alone(claim(self.site)):
                    return self._refusal(header, digest(request), error)
            except Exception:
                _LOG.exception("site %s cannot write what leaves it, so nothing does", self.site.client)
                return Reply(Path(self.site.state), self.site, header, digest(request)).frame(dict(NOT_WRITTEN), {})

    def _hello(self, header: Header, arrays: State, request: str) -> bytes:
        """Who this site is: what `Host.hello` says of it. From here on the run is what this request says it is."""
        settings, methods, run = header["settings"], header["methods"], self._run(header)
        experiments = [experiment_here(settings, block, self.site) for block in methods.values()]
        check_known(run, settings, methods)
        check_sums(experiments[0], methods)
        check_room(self.site, run)
        host, client = self.hosts.fitting(self.site, settings, experiments[0]), self.site.client
        (data,) = (data for data in host.federation.clients if data.id == client)
        problems = [
            problem
            for (label, block), experiment in zip(methods.items(), experiments, strict=True)
            for problem in lacking(label, build_method(block), experiment, host, data, self.site.limits)
        ]
        if problems:
            raise ConfigError(problems, f"what the server asks of site {client}")
        self._afford(header, host)
        about = host.hello(client)
        check_data(run, about["data"])
        agree(run, settings, methods, about["data"])
        if host.experiment.benchmark is None:  # the site's own data
            about["data"] = keyed_hash(Path(self.site.state), about["data"])
        return self._send(Reply(run, self.site, header, request), {"kind": "hello", **about}, "hello", about)

    def _afford(self, header: Header, host: Host) -> None:
        """Raise ConfigError where the methods of a new run, or of one that goes on, are not private or would cost more
        than the site has left."""
        experiment, info = host.experiment, self._info(host)
        if (privacy := host.context.privacy) is None or not privacy.by_example:
            return
        methods = {label: build_method(block) for label, block in header["methods"].items()}
        problems = [
            f"method {label}: {problem}"
            for label, method in methods.items()
            for problem in refused(method, privacy, host.context)
        ]
        if problems:
            raise ConfigError(problems, f"what the server asks of site {info.id}")
        releases = [
            replace(release, count=release.count * rounds)
            for method in methods.values()
            for _, rounds, release in planned(privacy, method, experiment.train, info.num_examples)
        ]
        Account(self.site).check(header["run"], releases, "this run", planned=True)

    def _info(self, host: Host) -> ClientInfo:
        """Of this site's client; a simulation has hosts with all of them."""
        return next(info for info in host.infos if info.id == self.site.client)

    def _charge(self, header: Header, host: Host, method: Method, at: Tick, request: str) -> None:
        """Count what the answer to this request will release, before anything is trained."""
        if (of := self._releases(host, method, at)) is not None:
            releases, what, agreed = of
            Account(self.site).charge(header["run"], header["label"], request, releases, what, agreed)

    def _releases(self, host: Host, method: Method, at: Tick) -> tuple[list[Release], str, PrivacySettings] | None:
        """What a training at this time releases, in words too, and the run's privacy; None where that has none."""
        privacy, stage, info = host.context.privacy, stage_named(method, at.stage), self._info(host)
        if privacy is None or not hides(privacy, method, stage):
            return None
        of_stages = planned(privacy, method, host.experiment.train, info.num_examples)
        (release,) = (release for planned_stage, _, release in of_stages if planned_stage.name == stage.name)
        releases = [replace(release, count=release.count * at.span)]
        return releases, f"round {at.last} of stage {at.stage}", privacy.settings

    def _train(self, header: Header, arrays: State, request: str) -> bytes:
        host, method, at = self._pinned(header)
        folder = self._folder(header)
        stage, memory = self._memory(header, host, method, at)
        stamp = Stamp(stage, at.round, at.last, request)
        wire = host.wire(method)
        reply = Reply(folder, self.site, header, request)
        if (again := memory.answered(stamp)) is not None:
            _LOG.info("stage %s, round %d was asked for again: the same reply once more", at.stage, at.last)
            kept, sent = unpack(again, "the kept reply")
            before = Update(self._me(host), Payload(sent, kept["scalars"]), kept["report"], Cost(**kept["cost"]))
            reply.note(at.stage, before, wire)
            return again
        check_room(self.site, self._run(header))
        asked = AnsweredRequests(folder, f"train {at.stage} {at.round}-{at.last}", request)
        received = _received(header, arrays, host, method, [stage_named(method, at.stage)])
        self._charge(header, host, method, at, request)
        asked.note()
        engine = LocalEngine.of(host, method, memory, sums=self._desk(header, host, method, SiteVault(folder)))
        (update,) = engine.answers({self.site.client: received}, at)
        if isinstance(update, Failure):
            if not tells_nothing(host, method, at):
                # Another try has noise of its own, and that this one failed is told.
                Account(self.site).answered(header["run"], header["label"], request)
                return self._failed(reply, at.stage, update)
            _LOG.error("stage %s failed: %s", at.stage, update.traceback or update.reason)
            update = Update(self._me(host), Payload(), {}, update.cost)
            client = self.site.client
            memory.save(client, memory.load(client) or method.client_init(host.site(self._info(host))))
        assert isinstance(update, Update)
        told = replace(update, report=told_report(self.site, header, update, host, method, at))
        sent = told.payload
        frame = reply.frame(
            {"kind": "update", "scalars": sent.scalars, "report": told.report, "cost": measured(told.cost)},
            sent.arrays,
        )
        reply.note(at.stage, told, wire)  # first: what cannot be written here must not move the memory on
        Account(self.site).answered(header["run"], header["label"], request)
        asked.close()  # what comes again, and is not the last, is trained again, with noise and draws of its own
        memory.keep(stamp, frame)
        return frame

    def _secure(self, header: Header, arrays: State, request: str) -> bytes:
        """A step of a secure sum; the same request gets the same reply again."""
        host, method, at = self._pinned(header)
        folder, step = self._folder(header), header["step"]
        reply, vault = Reply(folder, self.site, header, request), SiteVault(folder)
        asked = AnsweredRequests(folder, f"secure {step} {at.stage} {at.round}", request)
        if (again := vault.answered(request)) is not None:
            kept, sent = unpack(again, "the kept reply")
            reply.note(at.stage, Update(self._me(host), Payload(sent, kept["scalars"])))
            return again
        if step == "keys" and (of := self._releases(host, method, at)) is not None:
            # Who would refuse to train has to say so before anybody trains: others would be charged for no sum.
            Account(self.site).afford(header["run"], header["label"], *of)
        asked.note()
        engine = LocalEngine.of(host, method, SiteMemory(folder), sums=self._desk(header, host, method, vault))
        (update,) = engine.secure(step, {self.site.client: Payload(arrays, scalars(header))}, at)
        if isinstance(update, Failure):
            return self._failed(reply, at.stage, update)
        values = {"kind": "step", "scalars": update.payload.scalars, "report": {}, "cost": measured(update.cost)}
        frame = reply.frame(values, update.payload.arrays)
        reply.note(at.stage, update)
        vault.keep(request, frame)
        return frame

    def _me(self, host: Host) -> ClientInfo:
        return ClientInfo(self.site.client, host.fingerprint, 0)

    def _score(self, header: Header, arrays: State, request: str) -> bytes:
        host, method, at = self._pinned(header)
        folder, split = self._folder(header), header["split"]
        if self.site.scores == "none":
            raise ConfigError(["scores: none in its file, so it tells no scores"], f"site {self.site.client}")
        if host.experiment.privacy.unit == "example":
            raise ConfigError(
                ["scores: are computed from records without noise, so none is told where privacy.unit is example"],
                f"site {self.site.client}",
            )
        if (count := len(host.examples(self.site.client, split))) < self.site.limits.min_records:
            raise ConfigError(
                [f"{split}: {count} records are too few for a score that is told (limits.min_records)"],
                f"site {self.site.client}",
            )
        asked = AnsweredRequests(folder, f"score {split} {at.stage} {at.last}", request)
        engine = LocalEngine.of(host, method, self._memory(header, host, method, at)[1])
        received = _received(header, arrays, host, method, final_stages(method, at.stage))
        asked.note()
        (score,) = engine.score({self.site.client: received}, at, split)
        reply = Reply(folder, self.site, header, request)
        if isinstance(score, Failure):
            return self._failed(reply, at.stage, score)
        assert isinstance(score, Score)
        told = replace(score, metrics=told_numbers(self.site, score.metrics, host))
        reply.note(at.stage, told)
        values = {"metrics": told.metrics, "examples": told.examples, "cost": measured(told.cost)}
        return reply.frame({"kind": "score", **values}, {})

    def _export(self, header: Header, arrays: State, request: str) -> bytes:
        """Write the client's adapter at the site. Nothing of it leaves.

        Once the site has chosen among the run's methods, what it chose from and the choice stay: one for every model
        that a server sends would tell which of any two has the lower loss on the site's records.
        """
        host, method, at = self._pinned(header)
        folder = self._folder(header)
        asked = AnsweredRequests(folder, f"export {at.stage} {at.last}", request)
        chooses = host.experiment.federation.deploy == "best"
        settled = chooses and has_chosen(self._run(header)) and (self._place(folder) / HELD_OUT).exists()
        received = None if settled else _received(header, arrays, host, method, final_stages(method, at.stage))
        asked.note()
        failure: Failure | None = None
        if received is not None:
            engine = LocalEngine.of(host, method, self._memory(header, host, method, at)[1])
            try:
                deployed = engine.deployment(self.site.client, received, at)
                self._write_model(header, host, deployed)
                self._choose(header, host, method, deployed)
            except Exception as error:
                # Stages after the last exchange are without noise: whether they came to anything is told to nobody.
                hidden, final = host.experiment.privacy.unit == "example", not isinstance(error, PASSING)
                if not hidden and not (chooses and final):
                    raise
                _LOG.exception("%s has no adapter of %s", self.site.client, header["label"])
                if final:
                    self._choose(header, host, method, None)
                if not hidden:
                    failure = self._told("export", error)
        label = chosen_run(self._run(header)) if chooses and self.site.scores != "none" else None
        choice = {} if label is None else {"deployed": label}
        reply = Reply(folder, self.site, header, request)
        if failure is not None:
            reply.note("export", failure)
            told = {"kind": "exported", "error": failure.kind, "reason": failure.reason, **choice}
            return self._send(reply, told, "export", choice)
        return self._send(reply, {"kind": "exported", **choice}, "export", {"exported": True, **choice})

    def _write_model(self, header: Header, host: Host, deployed: Deployment) -> None:
        folder = self._folder(header)
        identify_client(folder, replace(host.experiment, method=dict(header["method"])), host, self.site.client)
        place = self._place(folder)
        write_client(place, deployed, host, header["label"], self.site.client)
        _LOG.info("the adapter of %s is in %s", self.site.client, place / export_name(place))

    def _choose(self, header: Header, host: Host, method: Method, deployed: Deployment | None) -> None:
        """With `deploy: best`, choose the run that this site prefers, once it has exported the last one and all others
        that it took part in; the losses that decide it stay here. None: it has no model of this method."""
        run, site, settings = self._run(header), host.site(self._info(host)), host.experiment
        if settings.federation.deploy != "best" or has_chosen(run):
            return
        place = self._place(self._folder(header))
        if deployed is not None or not (place / HELD_OUT).exists():
            note_held_out(place, deployed, site, settings.evaluate.batch_size, trained_alone(method))
        places = {label: self._place(run / label) for label in agreed_methods(run)}
        *before, last = places
        awaited = [*(label for label in before if has_memory(run / label)), last]
        label = choose_once_exported(run, places, awaited, settings.federation.deploy_margin)
        if label is not None:
            _LOG.info("%s deploys what %s made for it: %s", self.site.client, label, run / label)

    def _pinned(self, header: Header) -> tuple[Host, Method, Tick]:
        """Host, method and time of a request in a run that began here as it is now."""
        check_agreed(self._run(header), header["label"], header.get("settings"), header.get("method"))
        host, method = self.hosts.ready(self.site, header)
        check_data(self._run(header), host.hello(self.site.client)["data"])
        return host, method, tick_of(header, method, host.experiment)

    def _memory(self, header: Header, host: Host, method: Method, at: Tick) -> tuple[int, SiteMemory]:
        """The place of a request's stage in the plan, and the memory that the request is of."""
        stage = [planned_stage.name for planned_stage in run_stages(method)].index(at.stage)
        memory = SiteMemory(self._folder(header), kept_of(header, method, host.experiment))
        memory.ask(stage, at.last)
        return stage, memory

    def _desk(self, header: Header, host: Host, method: Method, vault: SiteVault) -> SecureDesk | None:
        if (secure := host.experiment.federation.secure_sums) is None:
            return None
        terms = hash_of_run(header["settings"], header["method"])
        return SecureDesk(secure, method, vault, self._identity, self.site.limits.min_sites, terms)

    def _run(self, header: Header) -> Path:
        return Path(self.site.state) / "runs" / header["run"]

    def _folder(self, header: Header) -> Path:
        return self._run(header) / header["label"]

    def _place(self, folder: Path) -> Path:
        """Where the folder of a method has its model, as the directory of a run has those of its clients: `befit
        predict`, `export` and `eval` read it."""
        return folder / "clients" / folder_name(self.site.client)

    def _send(self, reply: Reply, values: Header, stage: str, numbers: Mapping[str, Any]) -> bytes:
        reply.numbers(stage, numbers)
        return reply.frame(values, {})

    def _failed(self, reply: Reply, stage: str, failure: Failure) -> bytes:
        if failure.kind in (PayloadMismatch.__name__, ConfigError.__name__):  # a refusal, which says why
            raise PayloadMismatch(failure.reason)
        _LOG.error("stage %s failed: %s", stage, failure.traceback or failure.reason)
        told = failure if self.site.errors == "text" else replace(failure, reason=WITHHELD)
        reply.note(stage, told)
        values = {"error": told.kind, "reason": told.reason, "cost": measured(told.cost)}
        return reply.frame({"kind": "failure", **values}, {})

    def _told(self, stage: str, error: Exception) -> Failure:
        """A refusal of what the server asked for says why; any other error only what the site's file lets it say."""
        refuses = isinstance(error, (ConfigError, PayloadMismatch)) and not names_a_place(self.site, str(error))
        tells = refuses or self.site.errors == "text"
        text = error.in_a_line if isinstance(error, ConfigError) else str(error)
        return Failure(self.site.client, stage, 0, type(error).__name__, text if tells else WITHHELD)

    def _refusal(self, header: Header, request: str, error: Exception) -> bytes:
        stage = stage_of(header)
        told = self._told(stage, error)
        begun = isinstance(error, BefitError) and is_name(header.get("run")) and agreed(self._run(header))
        reply = Reply(self._run(header) if begun else Path(self.site.state), self.site, header, request)
        reply.note(stage, told)
        return reply.frame({"kind": "failure", "error": told.kind, "reason": told.reason}, {})


def _received(header: Header, arrays: State, host: Host, method: Method, stages: Sequence[Stage]) -> Payload:
    """What the server sent, as it travels. Raises PayloadMismatch where it is not finite, in another form than the
    wire's, or not what these stages declare."""
    payload = Payload(arrays, scalars(header))
    received = host.wire(method).received(payload)
    check_finite("the server sent", received)
    check_download(header["client"], stages, without_shares(received), host.model.specs)
    return payload


@contextmanager
def _alone(state: Path) -> Iterator[None]:
    """Wait until no other process works for this site; what one that was killed left half-written is removed."""
    with FileLock(state / ".lock"):
        remove_litter(state)
        yield
