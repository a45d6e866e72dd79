"""Hostile requests against a real site: each is refused with its reason, and the site keeps what it had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from befit.core.values import State
from befit.flower.engine import ask
from befit.flower.frame import unpack
from befit.flower.service import SiteService
from befit.flower.site_file import SiteFile
from tests.security.requests import CASES, CLIENT, LIES_BEFORE, LIES_LATER, SITE, Case, frame, header_of, honest


class Played:
    """A site with a run that has begun and trained one round, and an honest download for it."""

    def __init__(self, folder: Path) -> None:
        self.state = folder / "state"
        self.service = SiteService(SiteFile(**SITE, state=str(self.state)))
        said, _ = unpack(self.service.answer(ask("hello", header_of(honest(), "hello"), {})), "a reply")
        assert said["kind"] == "hello", said
        said, arrays = unpack(self.service.answer(ask("train", header_of(honest(), "train"), {})), "a reply")
        assert said["kind"] == "update", said
        self.download: State = arrays

    def kept(self) -> dict[str, bytes]:
        """Every file of the site but the lists of what left it."""
        files = (path for path in self.state.rglob("*") if path.is_file() and "outbound" not in path.name)
        return {str(path.relative_to(self.state)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Played]:
    yield Played(tmp_path_factory.mktemp("site"))


def test_there_are_as_many_as_promised_and_no_two_are_one() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    played = f"{len(CASES)} hostile requests, {len(LIES_BEFORE)} before a run and {len(LIES_LATER)} in one"
    assert played in page and f"| {len(CASES)} | {len(CASES)} refused, no file changed |" in page
    assert len({(case.name, case.do) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.do}: {case.name}")
def test_a_hostile_request_is_refused_and_changes_nothing(case: Case, played: Played) -> None:
    before = played.kept()
    said, arrays = unpack(played.service.answer(frame(case, played.download)), "a reply")
    assert said["kind"] == "failure" and not arrays
    assert case.reason in said["reason"], said["reason"]
    assert str(played.state) not in said["reason"]
    assert played.kept() == before
    assert [path.name for path in (played.state / "runs").iterdir()] == ["honest"]


def test_after_all_of_them_the_honest_run_goes_on(played: Played) -> None:
    """And asked for the same round with ever other arrays, the site stops answering."""
    header = {**header_of(honest(), "train"), "at": {**header_of(honest(), "train")["at"], "round": 2}}
    kinds = []
    for number in range(12):
        download = {key: value + number for key, value in played.download.items()}
        said, _ = unpack(played.service.answer(ask("train", header, download)), "a reply")
        kinds.append(said["kind"])
    assert kinds == ["update"] * 10 + ["failure"] * 2 and "answered 10 requests" in said["reason"]
    old, _ = unpack(played.service.answer(ask("train", header_of(honest(), "train"), played.download)), "a reply")
    assert old["kind"] == "failure" and "round 2 of stage 1 was the last" in old["reason"]


def test_scores_are_counted_too(played: Played) -> None:
    header, kinds = header_of(honest(), "score"), []
    for number in range(12):
        download = {key: value + number for key, value in played.download.items()}
        kinds += [unpack(played.service.answer(ask("score", header, download)), "a reply")[0]["kind"]] * 1
        again = unpack(played.service.answer(ask("score", header, download)), "a reply")[0]["kind"]
        assert again == kinds[-1]  # the same question is no new one
    assert kinds == ["score"] * 10 + ["failure"] * 2
    assert header["client"] == CLIENT
