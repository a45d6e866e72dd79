"""Progress from events, against a clock that the test moves."""

import io

import pytest
from rich.console import Console

from befit.runs.progress import Progress, RunProgress, seconds_left

STAGES = [{"name": "federate", "rounds": 60}, {"name": "alone", "rounds": 40}]


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def started(run="potara", stages=STAGES):
    return {"kind": "run_started", "run": run, "stages": stages, "clients": 10}


def client(round_, done, run="potara", stage="federate", span=1):
    return {"kind": "client", "run": run, "stage": stage, "round": round_, "span": span, "done": done, "of": 10}


def round_over(round_, run="potara", stage="federate", rounds=60, failed=0, bytes_up=0):
    return {
        "kind": "round",
        "run": run,
        "stage": stage,
        "round": round_,
        "rounds": rounds,
        "clients": 10 - failed,
        "failed": failed,
        "loss": 0.5,
        "bytes_up": bytes_up,
        "bytes_down": bytes_up,
    }


@pytest.fixture
def clock():
    return Clock()


def watch(clock, planned=(), terminal=False, **options):
    console = Console(file=io.StringIO(), force_terminal=terminal, width=100, _environ={"TERM": "xterm"})
    return Progress(console, planned, clock=clock, **options)


def shown(progress):
    assert isinstance(progress.console.file, io.StringIO)
    return progress.console.file.getvalue()


def test_stages_before_the_present_one_count_in_full(clock):
    run = RunProgress("potara", STAGES, 10, 0.0)
    run.update(round_over(30))
    assert run.share_done == 0.30
    run.update(round_over(20, stage="alone", rounds=40))
    assert run.share_done == 0.80


def test_a_run_that_goes_on_shows_what_was_sent_before(clock):
    progress = watch(clock)
    progress({**started(), "bytes_up": 3_400_000, "bytes_down": 2_200_000})
    progress(client(31, 1))
    assert "up 3.40 MB, down 2.20 MB" in progress.line(progress.runs["potara"])


def test_clients_within_a_round_count_as_parts_of_it():
    run = RunProgress("potara", STAGES, 10, 0.0)
    run.update(round_over(30))
    run.update(client(31, 5))
    assert run.share_done == pytest.approx(0.305)
    run.update(client(31, 10))
    assert int(run.round) == 30  # complete only with the round's own event


def test_a_message_of_several_rounds_counts_as_many():
    run = RunProgress("potara", STAGES, 10, 0.0)
    run.update(client(20, 5, stage="alone", span=20))
    assert run.round == pytest.approx(10)


def test_time_left_follows_the_pace(clock):
    """30 of 100 rounds in 15 s leave 70 * 0.5 s."""
    progress = watch(clock)
    progress(started())
    assert progress.left() is None
    clock.now = 15.0
    progress(round_over(30))
    assert progress.left() == pytest.approx(35)


def test_runs_to_come_take_the_mean_of_those_that_started(clock):
    """local took 10 s; fedit will take 20 s, half of it is over; potara counts (10 + 20) / 2."""
    progress = watch(clock, planned=["local", "fedit", "potara"])
    progress(started("local", [{"name": "local", "rounds": 1}]))
    clock.now = 10.0
    progress(round_over(1, "local", "local", 1))
    progress({"kind": "run_finished", "run": "local", "mean": 0.8})
    progress(started("fedit", [{"name": "federate", "rounds": 60}]))
    clock.now = 20.0
    progress(round_over(30, "fedit"))
    assert progress.left() == pytest.approx(10 + 15)
    assert progress.waiting == ["potara"]


def test_what_an_earlier_process_did_is_not_this_one_s_pace(clock):
    """Resumed at 50 of 60: 5 rounds in 10 s, so the last 5 take 10 s, not 10 / 55 * 5."""
    run = RunProgress("fedit", [{"name": "federate", "rounds": 60}], 10, 0.0)
    run.update(client(51, 1, "fedit"))
    run.update(round_over(55, "fedit"))
    assert seconds_left([run], 0, 10.0) == pytest.approx(10)


def test_runs_that_an_earlier_process_finished_are_not_waited_for(clock):
    progress = watch(clock, planned=["local", "fedit", "potara"])
    progress(started("fedit"))
    assert progress.waiting == ["potara"]


def test_runs_that_are_planned_anew_take_the_place_of_those_before_under_a_title_of_their_own(clock):
    progress = watch(clock, title="a pilot")
    progress(started("local", [{"name": "local", "rounds": 1}]))
    progress({"kind": "run_finished", "run": "local", "mean": 0.8})
    progress({"kind": "planned", "runs": ["local", "fedit"], "title": "a pilot, fold 2 of 3"})
    assert progress.waiting == ["local", "fedit"] and progress.title == "a pilot, fold 2 of 3"
    assert shown(progress).splitlines()[-1] == "a pilot, fold 2 of 3"
    progress(started("local", [{"name": "local", "rounds": 1}]))
    assert progress.waiting == ["fedit"] and list(progress.runs) == ["local"]


def test_the_metric_has_its_name_before_there_is_a_score(clock):
    progress = watch(clock)
    progress({**started(), "metric": "exact_match"})
    assert progress.metric == "exact_match"


def test_a_pipe_gets_a_line_now_and_then_and_one_at_the_end(clock):
    progress = watch(clock, every_s=5.0)
    with progress:
        progress(started(stages=STAGES[:1]))
        for number in range(1, 61):
            clock.now += 0.5
            progress(round_over(number, bytes_up=1000 * number))
        progress({"kind": "score", "run": "potara", "stage": "federate", "round": 60, "mean": 0.75, "metric": "rougeL"})
        progress({"kind": "run_finished", "run": "potara", "mean": 0.875})
    lines = shown(progress).splitlines()
    assert len(lines) == 7  # at 0.5, 5.5, … 25.5 s, and at the end
    assert lines[1] == (
        "potara federate 11/60 · clients 10/10 · loss 0.500 · up 11.0 kB, down 11.0 kB · 0:05 elapsed · 0:24 left"
    )
    assert lines[-1].endswith("rougeL 0.875 · up 60.0 kB, down 60.0 kB · 0:30 elapsed · done")
    assert "\x1b" not in shown(progress)


def test_failures_are_told_at_once_but_not_for_ever(clock):
    progress = watch(clock)
    progress(started())
    for number in range(100):
        progress(
            {
                "kind": "failure",
                "run": "potara",
                "client": f"[b]c{number}",
                "stage": "federate",
                "round": 3,
                "reason": "refused: norm 1e9",
                "scoring": number == 1,
            }
        )
    text = shown(progress)
    assert "potara federate round 3: left out [b]c0: refused: norm 1e9" in text
    assert "potara federate round 3: no score of [b]c1: refused: norm 1e9" in text
    assert text.count("left out") == 4 and "further failures" in text
    assert (progress.failures, progress.unscored) == (99, 1)


def test_quiet_says_nothing(clock):
    progress = watch(clock, quiet=True)
    with progress:
        progress(started())
        progress(round_over(1))
        progress({"kind": "run_finished", "run": "potara", "mean": 0.5})
    assert shown(progress) == ""


def test_a_terminal_gets_a_table_of_all_runs(clock):
    progress = watch(clock, planned=["local", "potara"], terminal=True, title="demo: digits")
    with progress:
        progress(started("local", [{"name": "alone", "rounds": 40}]))
        clock.now = 60.0
        progress(round_over(20, "local", "alone", 40, failed=1, bytes_up=2_500_000))
        progress({"kind": "score", "run": "local", "stage": "alone", "round": 20, "mean": 0.8125, "metric": "accuracy"})
    text = shown(progress)
    for part in (
        "demo: digits",
        "20/40",
        "9/10",
        "0.500",
        "0.812",
        "2.50 MB",
        "waiting",
        "25%",
        "1:00 elapsed",
        "3:00",
    ):
        assert part in text


@pytest.mark.parametrize("terminal", [True, False])
def test_a_run_that_an_earlier_process_finished_is_done_and_costs_no_time(clock, terminal):
    """30 of potara's 100 rounds took 60 s, so 70 take 140 s."""
    progress = watch(clock, planned=["local", "potara"], terminal=terminal)
    with progress:
        progress({"kind": "run_started", "run": "local", "stages": [], "clients": 10})
        progress({"kind": "run_finished", "run": "local", "mean": 0.875})
        progress(started())
        assert progress.left() is None
        clock.now = 60.0
        progress(round_over(30))
        assert progress.left() == pytest.approx(140)
    text = shown(progress)
    assert "0.875" in text and "done" in text and "0/0" not in text and "waiting" not in text


def test_a_notebook_gets_one_line_that_is_written_over(clock):
    pytest.importorskip("IPython", reason="only a notebook has IPython")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    progress = Progress(Console(file=io.StringIO(), force_jupyter=True), clock=clock)
    with capture_output() as seen, progress:
        progress(started())
        progress(round_over(1))
        progress({"kind": "best", "run": "potara", "stage": "federate", "round": 1, "rounds": 60, "mean": 0.5})
        progress({"kind": "run_finished", "run": "potara", "mean": 0.5})
    lines = [one.data["text/plain"] for one in seen.outputs]
    assert len(lines) > 1 and all(one.update for one in seen.outputs[1:])
    assert "best round 1 of 60" in lines[-1] and lines[-1].endswith("done")
