"""Languages and classes of FedP2EFT's data sets, and who comes later in Fed-Aya, written down here a second time.

Lee et al. 2025a, setup; the order of languages and the positions of newcomers are those of SamsungLabs/fedp2eft.
"""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from befit.data.papers.fedaya import CLIENTS, NEWCOMERS
from befit.data.papers.fedaya import LANGUAGES as AYA_LANGUAGES
from befit.data.papers.masakhanews import LABELS as NEWS_LABELS
from befit.data.papers.masakhanews import LANGUAGES as NEWS_LANGUAGES
from befit.data.papers.xnli import LABELS as XNLI_LABELS
from befit.data.papers.xnli import LANGUAGES as XNLI_LANGUAGES


@pytest.mark.parametrize(
    ("found", "written"),
    [
        (XNLI_LANGUAGES, "ar bg de el en es fr hi ru sw th tr ur vi zh"),
        (XNLI_LABELS, "entailment neutral contradiction"),
        (NEWS_LANGUAGES, "amh eng fra hau ibo lin lug orm pcm run sna som swa tir xho yor"),
        (NEWS_LABELS, "business entertainment health politics religion sports technology"),
        (AYA_LANGUAGES, "ar en es fr pt ru te zh"),
    ],
    ids=["XNLI", "its classes", "MasakhaNEWS", "its classes too", "Fed-Aya"],
)
def test_languages_and_classes_are_in_their_order(found: Iterable[str], written: str) -> None:
    assert " ".join(found) == written


def test_newcomers_of_fed_aya_are_eight_of_38_by_their_place_in_the_file() -> None:
    assert (CLIENTS, NEWCOMERS) == (38, (21, 22, 23, 24, 25, 26, 27, 34))
