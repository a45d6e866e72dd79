"""Ways round a promise that were found from outside: each is closed, and stays so."""

from __future__ import annotations

import json
import logging
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from befit.core.errors import ConfigError, RunError
from befit.data.federation import GROUP
from befit.flower.amounts import fewest_records
from befit.flower.consent import refused_run
from befit.flower.engine import ask
from befit.flower.keys import fingerprint, fingerprints, public_key, write_site_keys
from befit.flower.members import Members
from befit.flower.service import SiteService
from befit.flower.worker import serve_site
from befit.protocol.registry import build_method
from befit.runs.artifacts import predict
from befit.runs.runner import run
from tests.security.requests import changed, header_of
from tests.security.test_amounts import answer, site_of, wants


def reason(tmp_path: Path, method: dict[str, Any], **settings: Any) -> str:
    """What a site of 60 records says to a hello; empty where it takes part."""
    said, _ = answer(SiteService(site_of(tmp_path, 60, scores="none")), "hello", wants(method=method, **settings))
    return "" if said["kind"] == "hello" else said["reason"]


@pytest.mark.parametrize(
    "method",
    [
        {"name": "potara", "guard": "validation"},
        {"name": "potara", "statistics": {"split": "val"}},
        {"name": "interpolation", "w": "best"},
        {"name": "lora", "base": {"name": "potara", "guard": "validation"}},
    ],
    ids=str,
)
def test_no_method_measures_on_fewer_val_records_than_a_score_needs(method: dict[str, Any], tmp_path: Path) -> None:
    """A guard reports each candidate's accuracy on them; of one record that is the record."""
    small = reason(tmp_path, method, data={"val_fraction": 0.02})
    assert "it would measure on fewer val records" in small and "limits.min_records" in small
    assert not reason(tmp_path, method, run="r2", data={"val_fraction": 0.3})


def test_no_site_chooses_what_it_deploys_by_fewer_either(tmp_path: Path) -> None:
    best = reason(tmp_path, {"name": "fedit"}, data={"val_fraction": 0.02}, federation={"deploy": "best"})
    assert "it would measure on fewer val records" in best


@pytest.mark.parametrize(
    ("method", "what"),
    [
        ({"name": "fedl2p", "draws": 1, "outer": 1, "validation": 0.5}, "method.draws: 1 records are fewer"),
        ({"name": "fedl2p", "validation": 0.01}, "an update would be of fewer train records"),
        ({"name": "fedl2p", "validation": 0.99}, "an update would be of fewer train records"),
        ({"name": "potara", "statistics": {"samples": 1}}, "method.statistics.samples: 1 records are fewer"),
        ({"name": "lora", "base": {"name": "fisher_merging", "statistics": {"samples": 1}}}, "base.statistics.samples"),
    ],
    ids=str,
)
def test_no_method_draws_a_single_record(method: dict[str, Any], what: str, tmp_path: Path) -> None:
    """FedL2P sends the exact loss of the records that it draws, and a gradient of theirs."""
    told = reason(tmp_path, method)
    assert what in told and "limits.min_records" in told


def test_of_a_stream_the_records_that_come_first_count() -> None:
    """In order of tasks, of which the first is small, or all tasks together."""
    train = [{"task": "small"}] * 6 + [{"task": "large"}] * 54
    for kind, first in (("dynamic", 6), ("static", 30)):
        assert fewest_records(train, wants(stream={"kind": kind}), build_method("fedit")) == first


def test_of_a_method_that_leaves_out_a_part_the_records_beside_the_largest_count() -> None:
    method = build_method({"name": "interpolation", "w": "cross-fitted"})
    within = build_method({"name": "bayestune", "base": {"name": "interpolation", "w": "cross-fitted"}})
    patients = [{GROUP: "a"}] * 40 + [{GROUP: "b"}] * 12 + [{GROUP: "c"}] * 8
    for one in (method, within):
        assert fewest_records([{}] * 61, wants(), one) == 40 and fewest_records(patients, wants(), one) == 20


def test_a_site_refuses_parts_that_leave_it_too_few_records(tmp_path: Path) -> None:
    asked = wants(method={"name": "interpolation", "w": "cross-fitted"})
    for records, refused in ((60, False), (14, True)):
        site = site_of(tmp_path / str(records), records, scores="none")
        said, _ = answer(SiteService(site), "hello", asked)
        assert (said["kind"] != "hello") is refused
    assert "an update would be of fewer train records than the site allows" in said["reason"]


def test_what_a_method_within_a_method_holds_out_counts_too() -> None:
    """No method of befit's own can be there, but one of a plugin can."""
    within = replace(wants(), method={"name": "lora", "base": {"name": "fedl2p", "validation": 0.05}})
    assert fewest_records([{}] * 60, within, build_method("lora")) == 3


def test_loops_within_loops_are_limited_together(tmp_path: Path) -> None:
    """Each below the limit, and the site at work for years."""
    told = reason(tmp_path, {"name": "fedl2p", "validation": 0.5, "draws": 100, "terms": 100, "outer": 100})
    assert "outer x draws x terms: 1000000 is more than the site allows, 10000 (limits.max_steps)" in told


def test_ordinary_draws_are_taken(tmp_path: Path) -> None:
    assert not reason(tmp_path, {"name": "fedl2p", "validation": 0.5})


def test_a_public_key_in_pem_is_the_key_and_nobody_without_one_is_its_client(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_public_key

    _, public = write_site_keys(tmp_path)
    line = public.read_bytes()
    pem = tmp_path / "site.pem"
    pem.write_bytes(load_ssh_public_key(line).public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    assert public_key(str(pem)) == public_key(str(public)) == " ".join(line.decode().split()[:2])
    members = Members(["north"], keys=fingerprints({"north": str(pem)}, ["north"]))
    assert members.owner(1, line) == "north" and members.owner(2, b"") is None and fingerprint(b"") == ""
    assert Members(["north"], keys={"north": ""}).owner(2, b"no key") is None


def test_a_worker_starts_where_its_predecessors_number_is_in_use(tmp_path: Path) -> None:
    """As in a container, whose first process has the same number every time."""
    site = tmp_path / "site.yaml"
    site.write_text("client: north\nmodels: {digits-vit: digits-vit}\nbenchmarks: [digits]\n")
    (tmp_path / "state").mkdir()
    left = tmp_path / "state" / "worker.json"
    left.write_text(json.dumps({"address": str(tmp_path / "gone"), "token": "00", "pid": os.getpid(), "version": ""}))

    class Up(Exception):
        pass

    def up(address: str) -> None:
        assert json.loads(left.read_text())["address"] == address
        with pytest.raises(RunError, match=re.escape(str(left))):  # the one that is up now does answer
            serve_site(site)
        raise Up

    with pytest.raises(Up):
        serve_site(site, up)
    assert not left.exists()


@pytest.mark.parametrize(
    "change",
    [{"settings.model.id": "\x1b[2J\n" + "x\n" * 10**5 + "x" * 10**6}, {"do": "\x1b]0;"}, {"run": "\x1b[2J"}],
    ids=["a model", "what to do", "a run"],
)
def test_a_server_writes_no_control_characters_and_no_megabytes_into_a_sites_log(
    change: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    service, header = SiteService(site_of(tmp_path)), header_of(wants(), "hello", "fedit", "r", "north")
    header = changed(header, change)
    service.answer(ask(header.pop("do", "hello"), header, {}))
    told = "\n".join(logging.Formatter().format(record) for record in caplog.records)
    assert f"site {service.site.client} " in told and len(told) < 20_000
    assert told.replace("\n", "").isprintable()


def test_a_site_of_another_name_is_told_so_before_it_connects(tmp_path: Path) -> None:
    """At the server it would be a line in the log, and at the site nothing."""
    assert refused_run(site_of(tmp_path), wants()) == []
    (problem,) = refused_run(replace(site_of(tmp_path), client="007"), wants())
    assert problem == "client: 007 is no client of this run (data.clients); it has north"


@pytest.mark.parametrize("method", [{"name": "lora"}, {"name": "bayestune"}])
@pytest.mark.parametrize("of_base", [False, True])
def test_passes_over_the_records_count_as_the_steps_that_they_are(
    method: dict[str, Any], of_base: bool, tmp_path: Path
) -> None:
    def asking(epochs: int) -> dict[str, Any]:
        passes = {"epochs": epochs}
        return {**method, **({"base": {"name": "fedit", **passes}} if of_base else passes)}

    assert "the steps of 9000 passes" in reason(tmp_path, asking(9000))
    assert not reason(tmp_path, asking(2))


def test_passes_of_a_run_and_those_in_small_batches_of_a_base_count_as_their_steps(tmp_path: Path) -> None:
    base, steps = {"name": "fedit", "epochs": 1000, "train": {"batch_size": 2}}, {"max_steps": 10}
    assert "base.epochs: the steps of 1000 passes" in reason(tmp_path, {"name": "lora", "base": base}, train=steps)
    assert "train.epochs: the steps of 9000 passes" in reason(tmp_path, {"name": "fedit"}, train={"epochs": 9000})


def test_a_run_directory_brings_no_code(tmp_path: Path) -> None:
    config = {"benchmark": {"name": "digits", "clients": 2}, "method": "local", "train": {"max_steps": 1}}
    done = run({**config, "federation": {"rounds": 1}}, out=tmp_path / "run")
    (done.path / "evil.py").write_text(f"open({str(tmp_path / 'canary')!r}, 'w').close()\n")
    with (done.path / "config.yaml").open("a") as file:
        file.write("plugins: [evil.py]\n")
    text = (done.path / "config.yaml").read_text().replace("plugins: []\n", "")
    (done.path / "config.yaml").write_text(text)
    for use in (
        lambda: predict(done.path, "client-00", ["a.png"]),
        lambda: run({**config, "federation": {"rounds": 1}}, out=done.path, resume=True),
    ):
        with pytest.raises(ConfigError, match=r"plugins: evil\.py may have come with the run directory"):
            use()
    assert not (tmp_path / "canary").exists()
