"""report.md and report.html of whole run directories."""

import random
import re
import sys
from html.parser import HTMLParser

import matplotlib
import pytest

import befit
from befit.core.errors import RunError
from befit.core.schema import plain
from befit.core.storage import log_line, read_sealed, write_json, write_sealed
from befit.methods.parts.recipe.branches import RANGE, WEIGHT
from befit.protocol.method import Diagnostic
from befit.report import write_report
from befit.report.sections import outbound_groups, outbound_totals
from tests.backbones import short_vit

HOSTILE = [
    "<script>alert(1)</script>",
    'a|b $x_1$ "q" <img src=x>',
    "名前-01 \N{MOBILE PHONE}",
    "c\x00\x1b[31m\nd",
    "x" * 90,
]


def write_run(path, clients, baselines=("local", "fedit"), weights=True, unscored=(), **more):
    """A run directory as `befit run` leaves it, with made-up numbers."""
    draw = random.Random(0)
    rows, lines = {}, []
    for client in clients:
        score = draw.randint(60, 90) / 100
        rows[client] = {
            "accuracy": None if client in unscored else score,
            "loss": 0.3,
            "examples": 100,
            "train_examples": 50,
            "bytes_up": 600,
            "bytes_down": 900,
            "bytes_scoring": 30,
            "seconds": 1.25,
            "cpu_seconds": 1.25,
            "adapter": f"clients/{client}/adapter",
            "diagnostics": {"w": draw.random(), "trace_fed": 2.5e8} if weights else {},
            "baselines": {label: score - 0.05 for label in baselines},
        }
        lines += [
            {
                "kind": "score",
                "stage": "federate",
                "round": k,
                "client": client,
                "split": "test",
                "metric": "accuracy",
                "value": score * k / 2,
                "examples": 100,
            }
            for k in (1, 2)
        ]
    values = [row["accuracy"] for row in rows.values() if row["accuracy"] is not None]
    mean = sum(values) / len(values) if values else None
    summary = {
        "mean": mean,
        "std": 0.01,
        "worst": {"client": clients[0], "value": 0.6} if values else None,
        "bytes_up": 600 * len(rows),
        "bytes_down": 900 * len(rows),
        "bytes_scoring": 30,
        "seconds": 2.0,
        "cpu_seconds": 2.0,
    }
    curve = [
        {
            "round": k,
            "mean": None if mean is None else mean * k / 2,
            "min": 0.1,
            "max": 0.95,
            "bytes_up": 300 * k * len(rows),
            "bytes_down": 450 * k * len(rows),
        }
        for k in (1, 2)
    ]
    silent = [{**point, "bytes_up": 0, "bytes_down": 0} for point in curve]
    results = {
        "name": "trial",
        "method": "potara",
        "task": "image-classification",
        "model": "digits-vit",
        "seed": 0,
        "partition": {"name": "dirichlet", "sha256": "ab" * 32},
        "metric": "accuracy",
        "split": "test",
        "higher_is_better": True,
        "clients": rows,
        "summary": summary,
        "failures": [],
        "diagnostics": plain([WEIGHT]),
        "baselines": {label: {**summary, "seconds": 1.0, "cpu_seconds": 1.0} for label in baselines},
        "curves": {"potara": curve, **{label: silent if label == "local" else curve for label in baselines}},
        **more,
    }
    entry = {
        "stage": "federate",
        "name": "shared/block.00.q_proj/A",
        "shape": [8, 64],
        "dtype": "float32",
        "bytes": 2048,
        "count": 60,
    }
    files = {
        "outbound.json": {client: [entry] for client in clients},
        "env.json": {"python": "3.11.9", "packages": {"torch": "2.6.0"}},
    }
    path.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        write_json(path / name, value)
    write_sealed(path / "results.json", results)
    ledger = [
        {
            "stage": "federate",
            "round": 1,
            "client": client,
            "purpose": "train",
            "bytes_up": 600,
            "bytes_down": 900,
            "seconds": 0.5,
            "cpu_seconds": 0.5,
            "peak_memory_mib": 100.0,
        }
        for client in clients
    ]
    for name, each in (("metrics.jsonl", lines), ("ledger.jsonl", ledger)):
        (path / name).write_bytes(b"".join(map(log_line, each)))
    (path / "config.yaml").write_text("name: trial\nmethod:\n  name: potara\n")
    return path


class Page(HTMLParser):
    """What a browser would see: tags with attributes, the text of table cells, and ids."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.cells, self.text, self.inside = [], [], "", False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag in ("td", "th"):
            self.cells.append("")
            self.inside = True

    def handle_endtag(self, tag):
        self.inside = self.inside and tag not in ("td", "th")

    def handle_data(self, data):
        self.text += data
        if self.inside:
            self.cells[-1] += data

    def named(self, tag):
        return [attributes for name, attributes in self.tags if name == tag]


def page_of(path, plots=True):
    write_report(path, plots=plots)
    return Page((path / "report.html").read_text())


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """A run of two clients with its report, which tests leave as it is."""
    path = write_run(tmp_path_factory.mktemp("two"), ["c0", "c1"])
    write_report(path)
    return path


@pytest.fixture(scope="module")
def of_three(tmp_path_factory):
    """The same of three clients."""
    path = write_run(tmp_path_factory.mktemp("three"), ["c0", "c1", "c2"])
    write_report(path)
    return path


def test_the_page_shows_the_same_numbers_as_the_tables_and_the_markdown(of_three):
    page = Page((of_three / "report.html").read_text())
    markdown = (of_three / "report.md").read_text()
    score = read_sealed(of_three / "results.json")["clients"]["c1"]["accuracy"]
    row = page.cells[page.cells.index("c1") :][:7]
    assert row == [
        "c1",
        "100",
        f"{100 * score - 5:.1f}%",
        f"{100 * score - 5:.1f}%",
        f"{100 * score:.1f}%",
        "+5.0",
        "+5.0",
    ]
    assert "| c1 | 100 | " + " | ".join(row[2:]) in markdown
    assert "No clear difference on average; 3 of 3 clients did better with Potara: mean gain over training" in page.text
    assert "1.80 kB" in page.cells and "2.70 kB" in page.cells
    assert "shared/block.00.q_proj/A" in page.cells and "2,048" in page.cells


def test_the_page_needs_no_other_file_and_runs_no_script(of_two):
    text = (of_two / "report.html").read_text()
    page = Page(text)
    assert not {"script", "link", "img", "iframe", "object", "image"} & {tag for tag, _ in page.tags}
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links and all(link.startswith("#") for link in links)
    assert not re.search(r"url\((?!#)|@import|@font-face", text)
    policy = next(meta for meta in page.named("meta") if meta.get("http-equiv") == "Content-Security-Policy")
    assert policy["content"].startswith("default-src 'none'")


def test_every_plot_is_inline_and_its_references_resolve(of_two):
    text = (of_two / "report.html").read_text()
    page = Page(text)
    labels = [attributes["aria-label"] for attributes in page.named("svg")]
    assert labels == [
        "Accuracy over rounds",
        "Accuracy over communication",
        "Accuracy of every client",
        "Mixing weights of every client",
    ]
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    assert used and used <= set(ids)


def test_scores_of_one_round_are_no_curve_and_the_page_says_which_key_gives_more(tmp_path, of_two):
    point = {"round": 2, "mean": 0.7, "min": 0.6, "max": 0.8, "bytes_up": 1000, "bytes_down": 1000}
    curves = {"potara": [point], "fedit": [{**point, "bytes_down": 800}]}
    page = page_of(write_run(tmp_path, ["c0", "c1"], curves=curves))
    labels = [attributes["aria-label"] for attributes in page.named("svg")]
    assert "Accuracy over rounds" not in labels and "Accuracy over communication" in labels
    assert "evaluate.every" in page.text
    assert "evaluate.every" not in Page((of_two / "report.html").read_text()).text
    # The last point has room for its marker, 5 wide, before the frame ends at 456.
    text = (tmp_path / "report.html").read_text()
    plot = text[text.index('aria-label="Accuracy over communication"') :]
    end = float(re.search(r'id="bytes-patch_2">\s*<path d="M [\d. ]+L ([\d.]+)', plot).group(1))
    points = [float(x) for x in re.findall(r'<use x="([\d.]+)"[^>]*var\(--run-0\)[^>]*#bytes-', plot)]
    assert 0.9 * end < max(points) < end - 5


def test_all_diagnostics_come_with_the_page_of_the_method(tmp_path, of_two):
    assert "docs/methods/potara.md" in (of_two / "report.md").read_text()
    write_report(write_run(tmp_path, ["c0", "c1"], method="mine"), plots=False)
    assert "docs/methods" not in (tmp_path / "report.md").read_text()


def test_a_report_without_plots_has_everything_else_and_says_so(tmp_path, of_two, monkeypatch):
    """And does without matplotlib, whose import takes longer than the page."""
    drawn = Page((of_two / "report.html").read_text())
    monkeypatch.setitem(sys.modules, "befit.report.run_plots", None)
    page = page_of(write_run(tmp_path, ["c0", "c1"]), plots=False)
    assert drawn.named("svg") and not page.named("svg") and page.cells == drawn.cells
    assert "report.plots" in page.text and "report.plots" not in drawn.text


def test_plots_take_their_colours_from_the_page_so_that_dark_mode_reaches_them(of_two):
    text = (of_two / "report.html").read_text()
    drawings = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert "var(--run-0)" in drawings and "var(--text)" in drawings
    assert not re.search(r"#0101|#0102|#000000", drawings)
    assert set(re.findall(r"var\((--[a-z0-9-]+)\)", drawings)) <= set(re.findall(r"(--[a-z0-9-]+):", text))


def test_hostile_names_are_text_everywhere(tmp_path):
    failure = {"client": HOSTILE[0], "stage": "federate", "round": 3, "kind": "DataError", "reason": "</table><b>no"}
    page = page_of(write_run(tmp_path, HOSTILE, failures=[failure], name="<h1>|trial"))
    assert HOSTILE[0] in page.cells and HOSTILE[1] in page.cells and HOSTILE[2] in page.cells
    assert "DataError: </table><b>no" in page.cells
    assert not {"script", "img", "b"} & {tag for tag, _ in page.tags}
    markdown = (tmp_path / "report.md").read_text()
    assert "<script" not in markdown and "<img" not in markdown and "</table" not in markdown
    assert "a\\|b \\$x\\_1\\$" in markdown
    for text in (page.text, markdown):
        assert "\x1b" not in text and "\x00" not in text and "c\N{REPLACEMENT CHARACTER}" in text


def with_maps(path, clients):
    """A run with numbers of clients for clients, and gates."""
    write_run(path, clients)
    results = read_sealed(path / "results.json")
    for client, row in results["clients"].items():
        row["on_others"] = {other: 0.25 for other in clients if other != client}
        row["weights"] = {other: float(other != client) / (len(clients) - 1) for other in clients}
        row["gates"] = {"block.00.q_proj": 0.5, "block.01.q_proj": 0.475}
    results["diagnostics"] += plain([Diagnostic("weights", (), "Each row sums to 1.", "Who learns from whom")])
    write_sealed(path / "results.json", results)
    return path


def test_clients_against_clients_are_maps_and_tables_with_names_as_text(tmp_path):
    page = page_of(with_maps(tmp_path, HOSTILE))
    labels = [attributes["aria-label"] for attributes in page.named("svg")]
    assert "Each row sums to 1." in labels and sum("each client's model" in label for label in labels) == 1
    assert any("0.475 to 0.500" in label for label in labels)
    assert not {"script", "img", "b"} & {tag for tag, _ in page.tags}
    assert HOSTILE[0] in page.cells and page.cells.count("25.0%") == 20 and page.cells.count("0.25") >= 20
    markdown = (tmp_path / "report.md").read_text()
    assert "Who learns from whom" in markdown and "Every model on every client's examples" in markdown
    assert "<script" not in markdown and "<img" not in markdown


def test_many_clients_have_no_maps_and_no_tables_of_each_other(tmp_path):
    page = page_of(with_maps(tmp_path, [f"c{number}" for number in range(41)]))
    assert "Who learns from whom" not in page.text and "Every model on every" not in page.text


def test_writing_twice_gives_the_same_bytes(of_three):
    first = [(of_three / name).read_bytes() for name in ("report.html", "report.md")]
    write_report(of_three)
    assert [(of_three / name).read_bytes() for name in ("report.html", "report.md")] == first


def test_drawing_leaves_the_settings_of_matplotlib_as_they_were_and_ignores_them(tmp_path, of_two):
    write_run(tmp_path, ["c0", "c1"])
    expected = (of_two / "report.html").read_bytes()
    with matplotlib.rc_context({"axes.linewidth": 5, "xtick.direction": "in", "svg.fonttype": "path"}):
        before = dict(matplotlib.rcParams)
        write_report(tmp_path)
        assert dict(matplotlib.rcParams) == before
    assert (tmp_path / "report.html").read_bytes() == expected


def test_a_run_without_baselines_or_diagnostics_says_so_and_draws_no_gains(tmp_path):
    page = page_of(write_run(tmp_path, ["c0", "c1"], baselines=(), weights=False))
    assert "No baseline was run" in page.text
    assert "s.e." not in page.text and "Mixing weights" not in page.text
    assert len(page.named("svg")) == 3


def test_one_client_is_enough(tmp_path):
    page = page_of(write_run(tmp_path, ["only"]))
    assert "for only" in page.text and "1 of 1" in page.cells


def test_many_clients_become_distributions_and_every_one_is_still_in_the_table(tmp_path):
    clients = [f"client-{index:03d}" for index in range(500)]
    page = page_of(write_run(tmp_path, clients))
    assert "Accuracy over all clients" in [attributes["aria-label"] for attributes in page.named("svg")]
    assert {"client-000", "client-499"} <= set(page.cells)
    drawings = re.findall(r"<svg.*?</svg>", (tmp_path / "report.html").read_text(), re.DOTALL)
    assert not any("client-000" in drawing for drawing in drawings)
    assert "over the middle half of the clients" in page.text
    assert "client-000, client-001, client-002 and 497 more, all alike" in page.text


def test_a_client_without_a_score_is_shown_as_such(tmp_path):
    page = page_of(write_run(tmp_path, ["c0", "c1", "c2"], unscored=["c1"]))
    row = page.cells[page.cells.index("c1") :]
    assert row[4] == row[5] == "–"
    assert "1 client of 3 ended without a score" in page.text
    assert "mean accuracy, 2 of 3 clients" in page.text


def test_adapters_that_do_not_exist_are_not_listed(tmp_path):
    write_run(tmp_path, ["c0", "c1", "c2"], unscored=["c1"])
    results = read_sealed(tmp_path / "results.json")
    results["clients"]["c1"]["adapter"] = None
    results["failures"] = [
        {"client": "c1", "stage": "export", "round": 0, "kind": "RunError", "reason": "never trained"}
    ]
    write_sealed(tmp_path / "results.json", results)
    page = page_of(tmp_path, plots=False)
    assert "adapters of 2 (PEFT checkpoints)" in page.cells
    for text in (page.text, (tmp_path / "report.md").read_text()):
        assert "1 client of 3 has no adapter." in text
        assert "failed in the export has no adapter" in text and "left out of that round" not in text


def test_a_newcomer_that_failed_was_left_out_of_no_round(tmp_path):
    write_run(tmp_path, ["c0", "c1", "c2"])
    results = read_sealed(tmp_path / "results.json")
    results["failures"] = [{"client": "new", "stage": "federate", "round": 0, "kind": "DataError", "reason": "no text"}]
    write_sealed(tmp_path / "results.json", results)
    text = page_of(tmp_path, plots=False).text
    assert "A newcomer that failed has no model." in text and "left out of that round" not in text


def test_a_gated_run_says_that_the_checkpoints_are_one_slot_alone(tmp_path):
    """From a real run: the report reads what the real export wrote."""
    for method, gated in (("fedalt", True), ("fedit", False)):
        config = {
            "benchmark": {"name": "digits", "clients": 2, "alpha": 10.0},
            "method": method,
            "baselines": [],
            "federation": {"rounds": 1},
            "train": {"max_steps": 1},
            "model": {"id": short_vit()},
            "limit": {"records": 20},
            "report": {"plots": False},
        }
        befit.run(config, out=tmp_path / method)
        for name in ("report.html", "report.md"):
            text = re.sub(r"&#39;", "'", (tmp_path / method / name).read_text())
            assert ("Each is the slot 'personal' alone, and scores differently" in text) == gated


def test_colours_mark_only_what_is_beyond_two_standard_errors_of_a_difference(tmp_path):
    """Five points on 100 examples are within: 2 s.e. are 8 to 13 points. On 10,000 they are beyond."""
    for examples, metric, classes in (
        (100, "accuracy", {"unclear"}),
        (10_000, "accuracy", {"gain"}),
        (10_000, "token_accuracy", set()),
    ):
        write_run(tmp_path, ["c0", "c1", "c2"])
        results = read_sealed(tmp_path / "results.json")
        results["metric"] = metric
        for row in results["clients"].values():
            row |= {"examples": examples, metric: row["accuracy"]}
        write_sealed(tmp_path / "results.json", results)
        page = page_of(tmp_path)
        assert {
            cell["class"] for cell in page.named("td") if cell.get("class") in ("gain", "loss", "unclear")
        } == classes
        assert ("two standard errors of a difference" in page.text) == (metric == "accuracy")
        assert ("± s.e. of a difference is binomial" in page.text) == (metric == "accuracy")
        assert "The standard error over clients" in page.text


@pytest.mark.parametrize("count", [3, 60])
def test_weights_of_groups_are_drawn_as_ranges_with_a_caption_that_says_so(tmp_path, count):
    write_run(tmp_path, [f"c{k}" for k in range(count)], curves={})  # of which there would be plots too
    results = read_sealed(tmp_path / "results.json")
    assert "from w_min to w_max" not in page_of(tmp_path).text
    results["diagnostics"] = plain([RANGE])
    drawings = []
    for w, least, most in ((0.99, 0.25, 0.75), (0.01, 0.25, 0.75), (0.99, 0.2, 0.75), (0.99, 0.25, 0.8)):
        for row in results["clients"].values():
            row["diagnostics"] = {"w": w, "w_min": least, "w_max": most}
        write_sealed(tmp_path / "results.json", results)
        page = page_of(tmp_path)
        assert page.cells.count(f"{least:.2f}–{most:.2f}") == count
        names = [attributes["aria-label"] for attributes in page.named("svg")]
        assert names[-1] == (
            f"Mixing weights{' of every client, least to largest' if count == 3 else ': ranges of all clients'}"
        )
        assert "from w_min to w_max" in page.text and "used for the task head only" in page.text
        drawings.append(re.findall(r"<svg.*?</svg>", (tmp_path / "report.html").read_text(), re.DOTALL)[-1])
    assert drawings[0] == drawings[1] and len(set(drawings)) == 3  # w is not in it, both ends are


def test_a_run_in_which_nothing_was_scored_still_gets_its_report(tmp_path):
    page = page_of(write_run(tmp_path, ["c0", "c1"], baselines=(), unscored=["c0", "c1"]))
    assert "No client has a score" in page.text
    assert page.named("svg")[0]["aria-label"] == "Mixing weights of every client"


def test_files_that_are_missing_are_named(tmp_path):
    write_run(tmp_path, ["c0", "c1"])
    for name in ("outbound.json", "ledger.jsonl", "env.json"):
        (tmp_path / name).unlink()
    page = page_of(tmp_path)
    assert "not in this report: ledger.jsonl, outbound.json, env.json" in page.text
    assert "What left each client" not in page.text


def test_a_directory_without_a_finished_run_is_refused(tmp_path):
    with pytest.raises(RunError, match=r"has no results\.json"):
        write_report(tmp_path)
    write_sealed(tmp_path / "results.json", {"method": "potara"})
    with pytest.raises(RunError, match="it has no metric, clients, summary"):
        write_report(tmp_path)
    assert not list(tmp_path.glob("report.*"))


def test_a_broken_log_is_refused_rather_than_half_read(tmp_path):
    write_run(tmp_path, ["c0"])
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "sco')
    with pytest.raises(RunError, match=r"metrics\.jsonl is damaged in line \d+:"):
        write_report(tmp_path)


def test_clients_that_sent_the_same_are_listed_once_and_others_apart():
    """Numbers differ in the length of their text, which is no difference; a different count or shape is."""
    array = {"stage": "federate", "name": "shared/m/A", "shape": [8, 64], "dtype": "float32", "bytes": 2048, "count": 3}
    loss = {"stage": "federate report", "name": "loss", "shape": [], "dtype": "float", "bytes": 17, "count": 3}
    outbound = {"a": [array, loss], "b": [array, {**loss, "bytes": 19}], "c": [{**array, "count": 2}, loss]}
    groups = outbound_groups(outbound)
    assert [group.clients for group in groups] == [("a", "b"), ("c",)]
    assert groups[0].table.texts == [
        ["federate", "shared/m/A", "8 × 64", "float32", "2,048", "3"],
        ["federate report", "loss", "one value", "float", "17 to 19", "3"],
    ]
    totals = {row[0]: row[1:] for row in outbound_totals(outbound).texts}
    assert totals["federate"] == ["3", "1", "0", "16.4 kB"]  # 2048 * (3 + 3 + 2)
    assert totals["federate report"] == ["3", "0", "1", "159 B"]  # 17 * 3 + 19 * 3 + 17 * 3


def test_the_method_alone_has_a_band_over_rounds_and_the_others_a_bar_at_the_end(of_three):
    page = (of_three / "report.html").read_text()
    plot = page[
        page.index('aria-label="Accuracy over rounds"') : page.index('aria-label="Accuracy over communication"')
    ]
    assert plot.count("fill-opacity: 0.13") == 1
    assert [f"spread-{index}" in plot for index in (0, 1, 2)] == [False, True, True]
    assert "the band, and each bar at the end, goes from the lowest to the highest client" in page
