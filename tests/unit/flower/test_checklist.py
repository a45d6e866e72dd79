"""The checklist before real records are used: every point can be done, and what is not done is named with its mend."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from typer.testing import CliRunner

from befit.cli.main import app
from befit.config.experiment import Experiment
from befit.flower.app_folder import write_app
from befit.flower.checklist import DONE, NOT, POINTS, UNSEEN
from befit.flower.keys import write_certificates, write_site_keys
from befit.flower.site_file import claim, load_site
from tests.unit.flower.test_doctor import superlink

Points = dict[str, dict[str, str]]
STRICT = """
client: hospital-a
data: data
models: {digits-vit: digits-vit, hub: owner/name@0123456789012345678901234567890123456789}
columns: {text: note, label: ward}
tasks: [text-classification]
label_names: [a, b]
methods: [fedit]
limits: {min_records: 50, max_rounds: 200}
"""
LOOSE = """
client: hospital-a
data: data
models: {hub: owner/name, main: owner/name@main}
shares: [personal]
scores: exact
errors: text
limits: {min_records: 1, max_length: 9000}
require_secure_sums: true
benchmarks: [digits]
plugins: [ours.py]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of a site that has its keys and the server's authority."""
    tmp_path.chmod(0o755)
    write_certificates(tmp_path, ["127.0.0.1"])
    write_site_keys(tmp_path / "keys")
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    (data / "train.jsonl").write_text('{"note": "x", "ward": "a"}\n')
    (tmp_path / "ours.py").write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def ask(*words: str) -> Points:
    done = CliRunner().invoke(app, ["doctor", *words, "--checklist", "--json"])
    said: dict[str, Any] = json.loads(done.stdout)
    points = {one["point"]: one for one in said["points"]}
    assert said["in_order"] == (done.exit_code == 0) == (NOT not in {one["status"] for one in points.values()})
    assert all(bool(one["mend"]) == (one["status"] != DONE) for one in points.values())
    return points


def named(points: Points, status: str) -> set[str]:
    return {name for name, one in points.items() if one["status"] == status}


def test_a_strict_site_has_done_all_that_can_be_seen(folder: Path) -> None:
    (folder / "site.yaml").write_text(STRICT)
    points = ask("site.yaml")
    assert points.keys() == {point.name for point in POINTS if point.at == "site"}
    assert named(points, NOT) == ({"user"} if os.geteuid() == 0 else set())
    assert named(points, UNSEEN) - {"user"} == {"way in", "code"}


def test_of_a_loose_site_every_point_is_named(folder: Path) -> None:
    (folder / "site.yaml").write_text(LOOSE)
    claim(load_site(folder / "site.yaml")).chmod(0o755)
    (folder / "keys" / "site.key").chmod(0o644)
    (folder / "ca.crt").unlink()
    points = ask("site.yaml")
    wrong = {
        "authority",
        "key",
        "state",
        "tasks",
        "classes",
        "methods",
        "scores",
        "errors",
        "limits",
        "models",
        "peers",
    }
    assert named(points, NOT) - {"user"} == wrong
    assert named(points, UNSEEN) - {"user"} == {"way in", "code", "columns", "shares", "benchmarks", "plugins"}
    assert points["limits"]["found"] == "min_records 1 (default 10), max_length 9000 (default 8192)"
    assert "hub: owner/name@COMMIT, main: owner/name@COMMIT" in points["models"]["mend"]
    write_site_keys(folder / "other")
    (folder / "site.yaml").write_text(f"{LOOSE}key: keys/site.key\npeers: {{b: other/site.pub}}\n")
    peers = ask("site.yaml")["peers"]
    assert peers["status"] == UNSEEN and peers["found"].startswith("b SHA256:")
    assert "chmod 700" in points["state"]["mend"] and "chmod 600" in points["key"]["mend"]


def test_data_that_other_users_can_come_to_is_named(folder: Path) -> None:
    """Folders of tests are this user's alone, so the data is in one that is not."""
    with TemporaryDirectory() as place:
        data = Path(place, "data")
        data.mkdir(mode=0o755)
        (data / "train.jsonl").write_text("{}")
        Path(place).chmod(0o711)
        if not all(folder.stat().st_mode & 0o001 for folder in data.parents):
            pytest.skip("all temporary folders are this user's alone")
        (folder / "site.yaml").write_text(STRICT.replace("data: data", f"data: {data}"))
        assert "chmod go-rwx" in ask("site.yaml")["data"]["mend"]
        Path(place).chmod(0o700)
        assert ask("site.yaml")["data"]["status"] == DONE


def test_data_that_a_shared_group_can_come_to_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not where the group is one user's alone, nor where a folder above is closed to it."""
    grp = pytest.importorskip("grp")
    pwd = pytest.importorskip("pwd")
    with TemporaryDirectory() as place:
        data = Path(place, "data")
        data.mkdir(mode=0o750)
        (data / "train.jsonl").write_text("{}")
        (data / "train.jsonl").chmod(0o640)
        Path(place).chmod(0o711)
        if not all(above.stat().st_mode & 0o001 for above in data.parents):
            pytest.skip("all temporary folders are this user's alone")
        (folder / "site.yaml").write_text(STRICT.replace("data: data", f"data: {data}"))
        group, name = data.stat().st_gid, pwd.getpwuid(os.geteuid()).pw_name
        me = pwd.struct_passwd((name, "x", os.geteuid(), group, "", "/", "/bin/sh"))
        monkeypatch.setattr(pwd, "getpwuid", lambda number: me)
        for called, members, status in ((name, [], DONE), (name, ["other"], NOT), ("staff", [], NOT)):
            entry = grp.struct_group((called, "x", group, members))
            monkeypatch.setattr(grp, "getgrgid", lambda number, entry=entry: entry)
            assert ask("site.yaml")["data"]["status"] == status, (called, members)
        Path(place).chmod(0o700)
        assert ask("site.yaml")["data"]["status"] == DONE


def test_a_site_whose_file_cannot_be_read_has_nothing_done_by_it(folder: Path) -> None:
    (folder / "site.yaml").write_text("client: [")
    points = ask("site.yaml")
    assert {"tasks", "limits", "models"} <= named(points, UNSEEN)


@pytest.mark.parametrize(("answer", "status"), [(404, DONE), (403, DONE), (405, NOT), (200, NOT)])
def test_a_server_whose_control_can_be_reached_is_named(answer: int, status: str, folder: Path) -> None:
    (folder / "site.yaml").write_text(STRICT)
    with superlink(folder, version("flwr"), control=answer) as port:
        assert ask("site.yaml", "--server", f"127.0.0.1:{port}")["way in"]["status"] == status


def test_the_servers_points_are_of_its_certificates_and_the_app(
    folder: Path, experiment: Callable[..., Experiment], tmp_path_factory: pytest.TempPathFactory
) -> None:
    out = tmp_path_factory.mktemp("apps")
    loose, strict, runs = out / "loose", out / "strict", out / "runs"
    write_app(experiment(), loose, runs, insecure=True)
    points = ask("--certificates", str(folder), "--app", str(loose))
    assert points.keys() == {point.name for point in POINTS if point.at == "server"}
    assert named(points, NOT) == {"keys", "app", "replies", "guard", "weight"}
    assert named(points, UNSEEN) == {"known nodes", "way in", "run directory"}
    clients = {f"client-0{number}": str(folder / f"keys-{number}" / "site.pub") for number in range(3)}
    for path in clients.values():
        write_site_keys(Path(path).parent)
    write_app(
        experiment(
            benchmark={"name": "digits", "clients": 3},
            engine={"kind": "flower", "keys": clients},
            federation={"rounds": 1, "min_replies": 3, "max_weight": 0.6},
            guard={"clip": 1.0},
        ),
        strict,
        runs,
    )
    runs.mkdir(mode=0o700)
    assert "run directory" in named(ask("--app", str(strict)), UNSEEN)  # where the database is cannot be known
    database = out / "server" / "superlink.db"
    database.parent.mkdir()
    database.touch(0o600)
    points = ask("--certificates", str(folder), "--app", str(strict))
    (folder / "site.yaml").write_text(STRICT)
    both = CliRunner().invoke(app, ["doctor", "site.yaml", "--app", str(loose), "--checklist", "--json"])
    key = next(one for one in json.loads(both.stdout)["points"] if (one["at"], one["point"]) == ("site", "key"))
    assert key["status"] == DONE  # whatever keys the app lacks
    assert named(points, NOT) == set() and named(points, UNSEEN) == {"known nodes", "way in"}
    assert points["keys"]["found"] == "3 keys"


@pytest.mark.parametrize(
    ("federation", "guard", "wrong"),
    [
        ({"min_replies": 3}, {"clip": 1.0}, set()),
        ({"min_replies": 2}, {"clip": 1.0}, {"replies", "guard"}),
        ({"min_replies": 3, "asynchronous": {"buffer": 2}}, {"clip": 1.0}, {"replies", "guard"}),
        ({"min_replies": 2}, {"rule": "median"}, {"replies"}),
        ({"cohort": 2, "min_replies": 1.0}, {"clip": 1.0}, {"replies", "guard"}),
    ],
)
def test_replies_and_clip_are_judged_by_the_fewest_that_make_a_round(
    federation: dict[str, Any], guard: dict[str, Any], wrong: set[str], experiment: Callable[..., Experiment]
) -> None:
    """A clip shortens nothing below three replies, and an asynchronous round waits for `buffer` of them."""
    made = experiment(
        benchmark={"name": "digits", "clients": 4},
        engine={"kind": "flower"},
        federation={"rounds": 1, "max_weight": 0.5, **federation},
        guard=guard,
    )
    with TemporaryDirectory() as place:
        write_app(made, Path(place, "app"), Path(place, "runs"))
        points = ask("--app", f"{place}/app")
    assert named(points, NOT) & {"replies", "guard"} == wrong
