"""What faults cost a federation: killed processes, sites that drop out or are late, and an expired certificate.

Two parts. Ten sites in this process, over Flower's Grid without a network: 30 % of them away in every round, or too
late, drawn anew, against the same runs with everybody. And two sites with a real SuperLink, TLS and keys over loopback,
where one process after the other is killed and started again, as a supervisor would. What was measured goes to
results/faults.json, where parts that are not run again stay, and as tables to docs/security.md.

    python benchmarks/faults.py [--seeds 3] [--only dropouts|kills|certificate]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from befit.config.experiment import Experiment, to_yaml
from befit.config.load import load_experiment
from befit.flower.app_folder import write_app
from befit.flower.doctor_server import server_seen
from befit.flower.keys import write_site_keys
from befit.flower.server_app import run_over
from befit.report.table import Table, markdown
from befit.runs.runner import Run
from common import HERE, RESULTS, machine, put_section

sys.path.insert(0, str(HERE.parent))  # the tests' federations
from tests.integration.flower_network import Network, wait_for
from tests.integration.test_flower_faults import Expired, programs
from tests.unit.flower.faulty import FaultyGrid
from tests.unit.flower.loopback import write_site

RAW, PAGE = RESULTS / "faults.json", HERE.parent / "docs" / "security.md"
SITES, ROUNDS, SHARE = 10, 20, 0.3
METHODS = ("fedit", "potara")
Row = dict[str, Any]


def dropouts(seeds: int, folder: Path) -> list[Row]:
    """Score and used updates of runs with everybody, with 30 % away, and with 30 % beyond the deadline."""
    rows = []
    for method in METHODS:
        for fault in ("none", "away", "late"):
            done = [faulty_run(method, fault, seed, folder / f"{method}-{fault}-{seed}") for seed in range(seeds)]
            scores = [run.results["summary"]["mean"] or 0.0 for run in done]
            used = [sum(row["updates"] for row in run.results["clients"].values()) for run in done]
            lost = [len([one for one in run.results["failures"] if one["stage"] != "export"]) for run in done]
            rows.append(
                {
                    "method": method,
                    "fault": fault,
                    "score": statistics.fmean(scores),
                    "sd": statistics.stdev(scores) if seeds > 1 else 0.0,
                    "updates": statistics.fmean(used),
                    "left out": statistics.fmean(lost),
                }
            )
            print(rows[-1], flush=True)
    return rows


def faulty_run(method: str, fault: str, seed: int, out: Path) -> Run:
    engine = {"kind": "flower", "wait_s": 30, "deadline_s": 0.1 if fault == "late" else 600}
    experiment = load_experiment(
        {
            "benchmark": {"name": "digits", "clients": SITES, "alpha": 1.0, "seed": seed},
            "method": method,
            "baselines": [],
            "train": {"max_steps": 5, "lr": 5e-3},
            "federation": {"rounds": ROUNDS, "seed": seed, "min_replies": 1},
            "engine": engine,
            "report": {"plots": False},
        }
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    config = out.with_name(f"{out.name}.yaml")
    config.write_text(to_yaml(experiment))
    grid = FaultyGrid(config, out, SITES, fault, seed, SHARE)
    done = run_over(grid, experiment, out, pinned=False, observer=grid.draw, poll_s=0.01)
    trained = [line for line in lines(out) if line["kind"] == "train"]
    assert len({(line["stage"], line["round"]) for line in trained}) >= ROUNDS, "a round was lost"
    return done


def lines(run_dir: Path) -> list[Row]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


class Federation:
    """Two sites over a real SuperLink, a run that goes on and on, and whoever starts again what has been killed."""

    def __init__(self, network: Network) -> None:
        self.network, self.out = network, network.folder / "run"
        for number in range(2):
            network.register(self.start_site(number, connect=False))
            self.start_site(number)
        keys = {f"client-0{number}": str(self.site(number).parent / "keys" / "site.pub") for number in range(2)}
        engine = {"kind": "flower", "deadline_s": 20, "wait_s": 200, "keys": keys}
        self.experiment = kills_experiment(engine)
        write_app(self.experiment, network.folder / "app", self.out)
        self.number = network.run(network.folder / "app")

    def site(self, number: int) -> Path:
        return self.network.folder / f"site-{number}" / "site.yaml"

    def start_site(self, number: int, connect: bool = True) -> Path:
        site = write_site(self.network.folder / f"site-{number}", f"client-0{number}")
        if connect:
            self.start_worker(number)
            self.network.connect(f"node-{number}", site)
        return site

    def start_worker(self, number: int) -> None:
        self.network.start(f"worker-{number}", ["python", "-m", "befit", "worker", self.site(number)])

    def rounds(self) -> int:
        path = self.out / "checkpoint.json"
        return json.loads(path.read_text())["round"] if path.exists() else 0

    def replied(self, number: int) -> int:
        """The last round whose reply a site has made."""
        stamps = list((self.site(number).parent / "state").rglob("fedsa/stamp.json"))
        return json.loads(stamps[0].read_text())["last"]["last"] if stamps else 0

    def resume(self) -> None:
        with contextlib.suppress(AssertionError):  # it may have ended by itself
            self.network.flwr("stop", self.number, "befit")
        self.number = self.network.run(self.network.folder / "app", "resume=true")


def kills_experiment(engine: dict[str, Any]) -> Experiment:
    return load_experiment(
        {
            "benchmark": {"name": "digits", "clients": 2},
            "train": {"max_steps": 2},
            "federation": {"rounds": 500},
            "baselines": [],
            "method": "fedsa",
            "engine": engine,
        }
    )


def kill_worker(there: Federation) -> None:
    there.network.stop("worker-1", signal.SIGKILL)
    there.start_worker(1)


def kill_node(there: Federation) -> None:
    there.network.stop("node-1", signal.SIGKILL)
    there.network.connect("node-1", there.site(1))


def kill_link(there: Federation) -> None:
    there.network.stop("link", signal.SIGKILL)
    _kill_programs(there, "flwr-superexec", "flwr-serverapp")  # which it started
    there.network.start_link()
    there.resume()


def kill_server(there: Federation) -> None:
    _kill_programs(there, "flwr-serverapp")
    there.resume()


def _kill_programs(there: Federation, *names: str) -> None:
    found = [pid for name in names for pid in programs(name, there.network.address)]
    assert found, f"no process runs {' or '.join(names)}"
    for pid in found:
        os.kill(pid, signal.SIGKILL)


KILLS: dict[str, Callable[[Federation], None]] = {
    "worker": kill_worker,
    "SuperNode": kill_node,
    "ServerApp": kill_server,
    "SuperLink": kill_link,
}


def kills(folder: Path) -> Iterator[Row]:
    """Each process killed while its site trains (before the reply), and between its reply and the round's end."""
    with Network(folder) as network:
        there = Federation(network)
        wait_for("the first round", lambda: there.rounds() >= 1)
        for name, kill in KILLS.items():
            for step in ("before the reply", "after the reply"):
                done = there.rounds()
                wait_for("a round", lambda done=done: there.rounds() > done)
                done = there.rounds()
                if step == "after the reply":
                    wait_for("a reply", lambda done=done: there.replied(1) > done)
                done = there.rounds()  # of these nothing may be lost
                kill(there)
                killed = time.monotonic()
                wait_for_round(there, done)
                after = time.monotonic() - killed
                wait_for("everybody", lambda: both_again(there))
                whole = time.monotonic() - killed
                failed = [one for one in lines(there.out) if one["kind"] == "failure" and one["round"] > done]
                rounds = {one["round"] for one in lines(there.out) if one["kind"] == "train"}
                row = {
                    "killed": name,
                    "when": step,
                    "rounds lost": done - len(rounds & set(range(1, done + 1))),
                    "replies left out": len(failed),
                    "next round after s": round(after, 1),
                    "both sites again after s": round(whole, 1),
                }
                print(row, flush=True)
                yield row


def wait_for_round(there: Federation, done: int) -> None:
    """The next round; a SuperNode that Flower turns away, because the old connection still counts, tries again."""

    def again() -> bool:
        keep_nodes(there)
        return there.rounds() > done

    wait_for("the next round", again)


def both_again(there: Federation) -> bool:
    """Whether the last complete round has the replies of both."""
    keep_nodes(there)
    last = there.rounds()
    return len([one for one in lines(there.out) if one["kind"] == "train" and one["round"] == last]) == 2


def keep_nodes(there: Federation) -> None:
    for number in range(2):
        process = there.network.processes.get(f"node-{number}")
        if process is None or process.poll() is not None:
            there.network.connect(f"node-{number}", there.site(number))


def certificate(folder: Path) -> Row:
    """A SuperLink whose certificate has expired: what a site's SuperNode says, and what the doctor says."""
    with Expired(folder) as network:
        site = write_site(folder / "site-0", "client-00")
        write_site_keys(site.parent / "keys")
        network.connect("node-0", site)
        wait_for("the complaint", lambda: "certificate has expired" in network.log("node-0"))
        found = [one for one in server_seen(network.address, network.ca) if one.mend]
        return {
            "SuperNode": "CERTIFICATE_VERIFY_FAILED: certificate has expired",
            "connected": "SuperNode ID" in network.log("node-0"),
            "doctor": [f"{one.what}: {one.mend}" for one in found],
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=("dropouts", "kills", "certificate"))
    options = parser.parse_args()
    logging.getLogger("befit").setLevel(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="befit-faults-") as folder:
        if options.only in (None, "dropouts"):
            keep("dropouts", dropouts(options.seeds, Path(folder) / "dropouts"))
            put_section(PAGE, "faults_dropouts", dropouts_table(options.seeds))
        if options.only in (None, "kills"):
            place = Path(folder) / "kills"
            place.mkdir()
            keep("kills", list(kills(place)))
            put_section(PAGE, "faults_kills", kills_table())
        if options.only in (None, "certificate"):
            place = Path(folder) / "certificate"
            place.mkdir()
            keep("certificate", [certificate(place)])


def kept() -> dict[str, dict[str, Any]]:
    return json.loads(RAW.read_text()) if RAW.exists() else {}


def keep(part: str, rows: list[Row]) -> None:
    RAW.write_text(json.dumps({**kept(), part: {"machine": machine(), "data": rows}}, indent=2) + "\n")
    print(json.dumps(rows, indent=1))


def kills_table() -> str:
    rows = [
        [
            str(one["killed"]),
            str(one["when"]),
            *(str(one[what]) for what in ("rounds lost", "replies left out")),
            *(f"{one[what]} s" for what in ("next round after s", "both sites again after s")),
        ]
        for one in kept()["kills"]["data"]
    ]
    headers = ["killed", "when", "rounds lost", "replies left out", "next round after", "both sites again after"]
    return markdown(Table("Kills", headers, rows))


def dropouts_table(seeds: int) -> str:
    """Scores in percent, with their standard deviation over the seeds."""
    rows = [
        [
            one["method"],
            one["fault"],
            f"{100 * one['score']:.1f} ± {100 * one['sd']:.1f}",
            *(f"{one[what]:.0f}" for what in ("updates", "left out")),
        ]
        for one in kept()["dropouts"]["data"]
    ]
    headers = ["method", "30 % are", f"score (± standard deviation over {seeds} seeds)", "updates used", "left out"]
    return markdown(Table("Dropouts", headers, rows))


if __name__ == "__main__":
    main()
