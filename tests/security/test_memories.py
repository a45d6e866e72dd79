"""A server that fills the memories of sites differently, and later asks them for the sum over one model for all.

What a site kept may keep its update small whatever it is sent, so that the sum is the update of the only one that was
treated otherwise (after Pasquini et al. 2022). Sites whose past is not the same therefore have no masks in common.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from befit.config.load import load_experiment
from befit.core.errors import PayloadMismatch
from befit.core.values import Payload, State, Tick
from befit.flower.engine import ask
from befit.flower.frame import hash_of_run, unpack
from befit.flower.keys import write_site_keys
from befit.flower.policy import method_of, settings_of
from befit.flower.service import SiteService
from befit.flower.site_file import SiteFile
from befit.protocol.registry import build_method
from befit.protocol.secure.desk import (
    BEFORE,
    BOXES,
    HIDDEN,
    about_of,
    as_texts,
    hash_of_download,
    keys_as_payload,
    keys_of,
    parts,
    signatures,
    texts,
    with_shares,
)
from befit.protocol.secure.fixed import FixedPoint, Summed
from befit.protocol.secure.server import Server
from befit.protocol.secure.shamir import SHARE
from befit.protocol.serve import stage_named
from tests.backbones import short_vit

ALL = ["client-00", "client-01", "client-02"]


class Lying:
    """A server that sends each site what it likes."""

    def __init__(self, folder: Path, method: Mapping[str, Any]) -> None:
        values = {
            "benchmark": {"name": "digits", "clients": len(ALL)},
            "model": {"id": short_vit()},
            "method": method,
            "baselines": [],
            "train": {"max_steps": 1},
            "adapter": {"head": False},
            "federation": {"rounds": 2, "secure_sums": {"clip": 20.0}},
            "engine": {"kind": "flower"},
        }
        self.experiment = load_experiment(values)
        self.method = build_method(self.experiment.method)
        self.stage = stage_named(self.method, "federate")
        pairs = {name: write_site_keys(folder / name / "keys") for name in ALL}
        lines = {name: public.read_text().strip() for name, (_, public) in pairs.items()}
        self.sites = {
            name: SiteService(
                SiteFile(
                    name,
                    models={short_vit(): short_vit()},
                    benchmarks=["digits"],
                    state=str(folder / name / "state"),
                    shares=["personal"],
                    key=str(pairs[name][0]),
                    peers={other: line for other, line in lines.items() if other != name},
                )
            )
            for name in ALL
        }
        for name in ALL:
            self.say(name, "hello", Payload(), {"label": "hello", "methods": {"m": method_of(self.experiment.method)}})
        host = next(iter(self.sites[ALL[0]].hosts._hosts.values()))
        initial = host.install(self.method).initial
        self.layout = host.model.specs
        self.model = {key: initial[key] for key in self.stage.down.specs(self.layout)}

    def say(self, name: str, do: str, payload: Payload, more: Mapping[str, Any]) -> Payload:
        header = {
            "run": "r",
            "settings": settings_of(self.experiment),
            "client": name,
            "scalars": payload.scalars,
            **more,
        }
        said, arrays = unpack(self.sites[name].answer(ask(do, header, payload.arrays)), "a reply")
        if said["kind"] == "failure":
            raise PayloadMismatch(said["reason"])
        return Payload(arrays, said.get("scalars", {}))

    def round(self, number: int, models: Mapping[str, State], complete: bool = True) -> Summed | None:
        """One round; the sum, where it is completed."""
        at, terms = Tick("federate", number, 2, 0), method_of(self.experiment.method)
        about = {"label": "m", "method": terms, "at": asdict(at)}
        session = secrets.token_hex(16)
        begin = Payload({}, {"session": [session]})
        made = {name: self.say(name, "secure", begin, {**about, "step": "keys"}) for name in ALL}
        keys = {name: keys_of(reply)[name] for name, reply in made.items()}
        settings = self.experiment.federation.secure_sums
        assert settings is not None
        bound = about_of(session, at, hash_of_run(settings_of(self.experiment), terms))
        server, everybody = Server(bound, settings.threshold, keys), keys_as_payload(dict(sorted(keys.items())))
        for name in ALL:
            reply, near = self.say(name, "secure", everybody, {**about, "step": "shares"}), server.graph[name]
            server.take(name, dict(zip(near, parts(reply, BOXES, len(near), len(reply.arrays[BOXES][0])), strict=True)))
        form = FixedPoint(settings, self.stage.reply.specs(self.layout), len(ALL), self.stage.mean == "examples")
        total = np.zeros(form.length, np.uint64)
        for name in ALL:
            asked = with_shares(Payload(dict(models[name])), server.inbox(name))
            total += form.from_bytes(self.say(name, "train", asked, about).arrays[HIDDEN])
        if not complete:
            return None
        left = Payload({}, {"left": ALL})
        words = [signatures(self.say(name, "secure", left, {**about, "step": "agree"}), "words")[0] for name in ALL]
        ask_for = left | Payload({}, {"words": as_texts(words)})
        shares: dict[str, dict[str, bytes]] = {}
        for name in ALL:
            reply, owners = (
                self.say(name, "secure", ask_for, {**about, "step": "uncover"}),
                server.owners_of_shares(name),
            )
            shares[name] = dict(zip(owners, parts(reply, "shares", len(owners), SHARE), strict=True))
        before = texts(made[ALL[0]], BEFORE, 1)[0]
        server.uncover(total, ALL, shares, hash_of_download(self.stage, Payload(dict(models[ALL[0]])), before))
        return form.decode(total)


def changed(model: State) -> State:
    return {key: value + torch.ones_like(value) for key, value in model.items()}


@pytest.mark.parametrize("method", [{"name": "fedit", "rank": 2, "keep_optimiser": True}, {"name": "fedsa", "rank": 2}])
def test_sites_with_other_pasts_have_no_sum(method: dict[str, Any], tmp_path: Path) -> None:
    lying = Lying(tmp_path / "lying", method)
    others = changed(lying.model)
    lying.round(1, {**dict.fromkeys(ALL, others), ALL[0]: lying.model}, complete=False)
    with pytest.raises(PayloadMismatch, match=r"the sum is none of updates within federation\.secure_sums\.clip"):
        lying.round(2, dict.fromkeys(ALL, lying.model))
    honest = Lying(tmp_path / "honest", method)
    for number in (1, 2):
        assert honest.round(number, dict.fromkeys(ALL, honest.model)) is not None


def test_what_a_site_that_keeps_nothing_was_sent_before_does_not_matter(tmp_path: Path) -> None:
    """So that a site that missed a round takes part in the next one."""
    lying = Lying(tmp_path, {"name": "fedit", "rank": 2})
    lying.round(1, {**dict.fromkeys(ALL, changed(lying.model)), ALL[0]: lying.model}, complete=False)
    assert lying.round(2, dict.fromkeys(ALL, lying.model)) is not None
