"""The doctor, of a server: over TLS to a real one that says what a SuperLink says, and of the server's own files."""

from __future__ import annotations

import json
import os
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPSConnection
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.core.errors import ConfigError
from befit.flower.agreement import Misfits
from befit.flower.doctor import Finding, examine
from befit.flower.doctor_server import server_seen
from befit.flower.keys import fingerprint, write_certificates, write_site_keys
from befit.flower.site_file import load_site

HOUR = 1 / 24


@contextmanager
def superlink(folder: Path, flwr: str, late_s: int = 0, control: int = 405) -> Iterator[str]:
    """A server with the certificate of a folder, a version of Flower, a clock that is behind and an answer to those who
    want to control it; yields its port."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            said = json.dumps({"info": {"title": "SuperLink API", "version": flwr}}).encode()
            self.send_response(control if self.path.startswith("/v1/control/") else 200)
            self.send_header("Content-Length", str(len(said)))
            self.end_headers()
            self.wfile.write(said)

        def date_time_string(self, timestamp: float | None = None) -> str:
            import time

            return super().date_time_string(time.time() - late_s)

        def log_message(self, *words: object) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Answer)
    server.handle_error = lambda *words: None  # type: ignore[method-assign]  # who does not believe it hangs up
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.crt", folder / "server.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield str(server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def wrong(findings: list[Finding]) -> dict[str, str]:
    return {one.what: one.mend for one in findings if one.mend}


def seen(folder: Path, flwr: str, host: str = "127.0.0.1", late_s: int = 0, ca: Path | None = None) -> list[Finding]:
    with superlink(folder, flwr, late_s) as port:
        return list(server_seen(f"{host}:{port}", ca or folder / "ca.crt"))


def test_a_server_that_is_in_order_tells_its_names_dates_version_and_clock(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["server.example", "127.0.0.1"])
    findings = seen(tmp_path, version("flwr"))
    assert not wrong(findings)
    said = {one.what: one.found for one in findings}
    assert said.keys() == {"server", "server's certificate", "server's flwr", "clocks"}
    assert said["server's certificate"].startswith("for server.example, 127.0.0.1, valid from 2")
    assert said["server's flwr"] == version("flwr")


@pytest.mark.parametrize(
    ("prepare", "what", "mend"),
    [
        (lambda folder: seen(folder, "1.2.3"), "server's flwr", "install the same minor version on both sides"),
        (lambda folder: seen(folder, version("flwr"), late_s=60), "clocks", "NTP"),
        (lambda folder: seen(folder, version("flwr"), host="localhost"), "server", "lacks the name localhost"),
        (lambda folder: seen(folder, "1", ca=folder / "none.crt"), "server", "operator has ca.crt"),
        (lambda folder: list(server_seen("127.0.0.1", folder / "ca.crt")), "server", "HOST:PORT"),
    ],
)
def test_each_thing_that_is_wrong_with_a_server_is_found(
    prepare: Callable[[Path], list[Finding]], what: str, mend: str, tmp_path: Path
) -> None:
    write_certificates(tmp_path, ["127.0.0.1"])
    found = wrong(prepare(tmp_path))
    assert list(found) == [what] and mend in found[what]


def test_the_connection_to_a_server_that_is_not_believed_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_certificates(tmp_path, ["127.0.0.1"])
    closed: list[Any] = []
    close = HTTPSConnection.close
    monkeypatch.setattr(HTTPSConnection, "close", lambda line: closed.append(line) or close(line))
    assert "lacks the name" in wrong(seen(tmp_path, version("flwr"), host="localhost"))["server"]
    assert closed


def test_an_expired_certificate_is_told_as_that(tmp_path: Path) -> None:
    """Its validity began five minutes ago and ended three minutes ago."""
    write_certificates(tmp_path, ["127.0.0.1"], days=HOUR / 30)
    found = wrong(seen(tmp_path, version("flwr")))
    assert "has expired" in found["server"] and "has expired" in found["server's certificate"]
    own = wrong(examine(None, None, Path("none"), Path("none"), tmp_path))
    assert set(own) == {"authority", "certificate"} and all("has expired" in mend for mend in own.values())


def test_the_servers_own_files_are_looked_at_without_a_site(tmp_path: Path) -> None:
    for name in ("one", "other"):
        write_certificates(tmp_path / name, ["server.example"])

    def diagnosed(*more: str) -> dict[str, str]:
        done = CliRunner().invoke(app, ["doctor", "--certificates", str(tmp_path / "one"), *more, "--json"])
        found = wrong([Finding(**one) for one in json.loads(done.stdout)["findings"]])
        assert done.exit_code == (2 if found else 0)
        return found

    assert diagnosed() == {}
    assert "lacks the name elsewhere.invalid" in diagnosed("--server", "elsewhere.invalid:1")["certificate"]
    key = tmp_path / "one" / "server.key"
    key.chmod(0o644)
    assert "chmod 600" in diagnosed()["server's key"]
    key.write_bytes((tmp_path / "other" / "server.key").read_bytes())
    assert "it is not the certificate's" in diagnosed()["server's key"]
    (tmp_path / "one" / "ca.crt").write_bytes((tmp_path / "other" / "ca.crt").read_bytes())
    assert diagnosed().keys() == {"certificate", "server's key"}


def test_a_certificate_that_ends_soon_is_told_in_time(tmp_path: Path) -> None:
    write_certificates(tmp_path, ["server.example"], days=20)
    assert "it expires in 19 days" in wrong(examine(None, None, Path("none"), Path("none"), tmp_path))["authority"]


def records(folder: Path, names: dict[str, str]) -> Path:
    """Twelve records of two classes, in columns of these names; where the site's file is to be."""
    rows = [{names["text"]: f"text {number}", names["label"]: "ab"[number % 2]} for number in range(12)]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "site.yaml"


@pytest.mark.parametrize(
    ("text", "wrong", "right"),
    [
        ("columns: {text: nope}\ntasks: [text-classification]", "there is no nope; the columns are note, ward", ""),
        ("columns: {text: note, label: ward}\nlabel_names: [a, c]", 'label "b" is not one of a, c', ""),
        ("columns: {text: note, label: ward}\nlimits: {min_records: 13}", "12 train records", ""),
        ("tasks: [causal-lm]", "there is no instruction", ""),
        (
            "columns: {text: note, label: ward}\ntasks: [text-classification, vqa]",
            "columns.text: vqa has no",
            "a: 6, b: 6",
        ),
        ("columns: {text: note, label: ward}", "", "12 train records; train records of each class: a: 6, b: 6"),
    ],
)
def test_the_doctor_reads_the_data_as_a_run_does(text: str, wrong: str, right: str, tmp_path: Path) -> None:
    site = records(tmp_path, {"text": "note", "label": "ward"})
    site.write_text(f"client: a\ndata: data.jsonl\nmodels: {{ours: digits-vit}}\n{text}\n")
    findings = [one for one in examine(site, None, Path("none"), Path("none")) if one.what.startswith("data")]
    refused, fine = [one for one in findings if one.mend], [one for one in findings if not one.mend]
    assert [wrong in one.found for one in refused] == [True] * bool(wrong)
    assert [right in one.found for one in fine] == [True] * bool(right)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "2 of its 12 records would be test (data.test_fraction 0.2, unless a run says otherwise): fewer than"),
        ("limits: {min_records: 2}", ""),
        ("scores: none", ""),
        ("data: {train: data.jsonl, test: few.jsonl}", "its 1 test records are fewer than limits.min_records, 10, so"),
    ],
)
def test_the_doctor_says_which_data_is_too_little_for_a_score(text: str, told: str, tmp_path: Path) -> None:
    """It is no mistake: the site trains as any other."""
    site = records(tmp_path, {"text": "text", "label": "label"})
    (tmp_path / "few.jsonl").write_text('{"text": "another", "label": "a"}\n')
    data = "" if "data:" in text else "data: data.jsonl\n"
    site.write_text(f"client: a\n{data}models: {{ours: digits-vit}}\ntasks: [text-classification]\n{text}\n")
    (found,) = [one for one in examine(site, None, Path("none"), Path("none")) if one.what.startswith("data,")]
    assert not found.mend and told in found.found and ("tells no score" in found.found) == bool(told)


def test_key_and_authority_are_looked_for_beside_the_sites_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site"
    write_certificates(folder, ["127.0.0.1"])
    write_site_keys(folder / "keys")
    (folder / "site.yaml").write_text("client: a\nmodels: {digits-vit: digits-vit}\nbenchmarks: [digits]\n")
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["doctor", "site/site.yaml", "--json"])
    assert done.exit_code == 0, done.stdout


def test_what_no_site_can_work_with_is_found(tmp_path: Path) -> None:
    site = records(tmp_path, {"text": "text", "label": "label"})
    site.write_text(
        "{client: a, data: data.jsonl, models: {foo: nosuch-model, bar: models/x, baz: ./gone, ours: digits-vit},"
        " benchmarks: [nope], methods: [fedid, fedit], device: 'cuda:77'}"
    )
    found = wrong(examine(site, None, tmp_path / "ca.crt", tmp_path / "site.key"))
    assert {"model foo", "model bar", "model baz", "benchmarks", "methods", "device"} <= found.keys()
    assert (
        "a folder counts from the site's file), or fetch it: hf download nosuch-model" in found["model foo"]
        and "Did you mean: fedit?" in found["methods"]
    )
    assert "model ours" not in found and "data" not in found


def test_what_a_site_agrees_to_and_keeps_is_looked_at(tmp_path: Path) -> None:
    site, runs = tmp_path / "site.yaml", tmp_path / "state" / "runs"
    text = "client: a\ndata: site.yaml\nmodels: {ours: digits-vit}\nmethods: [fedit, fedalt]\ntasks: [vqaa]\n"
    site.write_text(text + "limits: {max_runs: 2}\n")

    def found() -> dict[str, str]:
        return wrong(examine(site, None, tmp_path / "ca.crt", tmp_path / "site.key"))

    assert "add shares: [personal]" in found()["shares"] and "Did you mean: vqa?" in found()["tasks"]
    for age, name in enumerate(("second", "first")):
        (runs / name).mkdir(parents=True)
        os.utime(runs / name, (1000 - age, 1000 - age))
    assert f"remove runs that are over, the oldest first: {runs / 'first'}" in found()["runs"]
    misfits = Misfits(load_site(site))
    for number in range(3):
        misfits.add({"number": number})
    assert "set tasks, columns and label_names" in found()["questions"]
    site.write_text("client: a\ndata: site.yaml\nmodels: {ours: digits-vit}\n")
    assert not found().keys() & {"shares", "tasks", "runs", "questions"}


def test_a_site_without_an_authority_is_sent_to_the_operator_and_makes_none(tmp_path: Path) -> None:
    at_site = wrong(examine(tmp_path / "site.yaml", None, tmp_path / "ca.crt", tmp_path / "site.key"))["authority"]
    assert "operator" in at_site and "makes new" not in at_site
    assert "makes new" in wrong(examine(None, None, Path("none"), Path("none"), tmp_path))["authority"]


def test_a_port_that_no_machine_has_is_told_as_that() -> None:
    assert "65535" in wrong(list(server_seen("127.0.0.1:99999", Path("ca.crt"))))["server"]


def test_a_rank_that_no_module_can_use_is_warned_of_before_there_is_an_app_and_by_the_doctor(tmp_path: Path) -> None:
    config, out = tmp_path / "config.yaml", tmp_path / "app"
    config.write_text("benchmark: {name: digits, clients: 2}\nmethod: {name: fedit, rank: 100}\n")
    words = "warning: method fedit: rank 100 is above 64, the largest that an update of block.00.q_proj"
    for asked in (["flower", "app", str(config), "--out", str(out)], ["doctor", "--app", str(out)]):
        told = " ".join(CliRunner().invoke(app, asked).stderr.split())
        assert told.count(words) == 1, told


def test_an_app_without_keys_is_warned_of_and_one_with_keys_shows_them(tmp_path: Path) -> None:
    """The fingerprints are those of `ssh-keygen -l`, for two people to compare."""
    clients = ("client-00", "client-01")
    for client in clients:
        write_site_keys(tmp_path / client)
    config = tmp_path / "config.yaml"
    config.write_text("benchmark: {name: digits, clients: 2}\nmethod: fedit\n")
    write = ["flower", "app", str(config), "--out"]
    bare = CliRunner().invoke(app, [*write, str(tmp_path / "bare")])
    assert bare.exit_code == 0 and "keys" in bare.stdout and "engine.keys" in bare.stdout
    listed = ", ".join(f"{client}: {client}/site.pub" for client in clients)
    keyed = CliRunner().invoke(app, [*write, str(tmp_path / "keyed"), f"engine.keys={{{listed}}}"])
    assert keyed.exit_code == 0 and "engine.keys" not in keyed.stdout, keyed.output
    found = {name: examine(None, None, tmp_path, tmp_path, app=tmp_path / name) for name in ("bare", "keyed")}
    assert list(wrong(found["bare"])) == ["keys"] and not wrong(found["keyed"])
    shown = {one.what: one.found for one in found["keyed"]}
    assert shown["key of client-01"] == fingerprint((tmp_path / "client-01" / "site.pub").read_bytes())
    (tmp_path / "bare" / "befit_app" / "experiment.yaml").unlink()
    assert list(wrong(examine(None, None, tmp_path, tmp_path, app=tmp_path / "bare"))) == ["app"]


def test_a_folder_that_is_not_of_its_services_user_is_told_with_what_makes_it_so(tmp_path: Path) -> None:
    """Only where they would run: a copy of the folder elsewhere, as in a container, is nobody's mistake."""
    pwd = pytest.importorskip("pwd")
    owner = pwd.getpwuid(tmp_path.stat().st_uid).pw_name
    other = next(entry.pw_name for entry in pwd.getpwall() if entry.pw_uid != tmp_path.stat().st_uid)
    (tmp_path / "site.yaml").write_text("client: a\nbenchmarks: [digits]\n")
    for user, folder, mend in (
        (owner, tmp_path, ""),
        (other, tmp_path, f"chown -R {other}: {tmp_path}"),
        ("nobody-at-all", tmp_path, "useradd --system"),
        ("nobody-at-all", "/srv/befit", None),
    ):
        (tmp_path / "befit-worker.service").write_text(f"[Service]\nUser={user}\nWorkingDirectory={folder}\n")
        findings = examine(tmp_path / "site.yaml", None, tmp_path / "ca.crt", tmp_path / "site.key")
        told = [one.mend for one in findings if one.what == "services"]
        assert not told if mend is None else len(told) == 1 and told[0].startswith(mend) and bool(told[0]) == bool(mend)


def test_the_configuration_of_a_run_is_no_sites_file(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("benchmark: digits\nmethod: fedit\n")
    with pytest.raises(ConfigError, match="this is a run's configuration, and no site's file"):
        load_site(tmp_path / "my.yaml")
