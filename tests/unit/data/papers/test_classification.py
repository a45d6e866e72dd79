"""CIFAR-100, XNLI and MasakhaNEWS from files of their own schema, made here: who gets what, and what is refused."""

import numpy as np
import pytest

from befit.core.errors import ConfigError, DataError
from befit.data.papers import masakhanews
from befit.data.papers.cifar100 import FINE_LABELS
from befit.data.registry import build
from tests.unit.data.papers.paper_data import (
    cifar_images,
    write_cifar,
    write_news,
    write_parquet,
    write_xnli,
    xnli_rows,
)


@pytest.fixture(scope="module")
def cifar():
    return cifar_images()


SMALL = {"minimum_train": 20, "minimum_test": 5, "val_fraction": 0.1}


@pytest.fixture(scope="module")
def parquet(tmp_path_factory, cifar):
    folder = tmp_path_factory.mktemp("cifar")
    for split in cifar:
        write_cifar(folder, cifar, split)
    return folder


def test_cifar_has_all_its_classes_by_name():
    assert len(set(FINE_LABELS)) == 100 and list(FINE_LABELS) == sorted(FINE_LABELS)


@pytest.mark.parametrize(("name", "clients"), [("cifar100-10", 10), ("cifar100-20", 20)])
def test_every_image_is_in_one_split_of_one_client(parquet, name, clients):
    found = build(name, None, {"root": str(parquet), **SMALL, "minimum_train": 10, "minimum_test": 1})
    assert len(found.clients) == clients
    ids = [
        record["id"] for one in found.clients for split in ("train", "val", "test") for record in getattr(one, split)
    ]
    assert len(ids) == len(set(ids)) == 1000
    assert sum(len(one.val) for one in found.clients) == 80
    image = found.clients[0].train[0]["image"]
    assert image.shape == (32, 32, 3) and image.dtype == np.uint8


def test_labels_stay_with_their_images(parquet, cifar):
    pixels, labels = cifar["train"]
    known = {one.tobytes(): int(label) for one, label in zip(pixels, labels, strict=True)}
    found = build("cifar100-10", None, {"root": str(parquet), **SMALL})
    for one in found.clients:
        for record in (*one.train, *one.val):
            assert known[record["image"].tobytes()] == record["label"]


def test_parquet_a_permutation_of_it_and_the_binary_version_are_one_federation(parquet, cifar, tmp_path):
    """Records are ordered by their pixels, so neither the order of rows nor the kind of file can be seen."""
    shuffled, binary = tmp_path / "shuffled", tmp_path / "binary"
    binary.mkdir()
    for split, (pixels, labels) in cifar.items():
        write_cifar(shuffled, cifar, split, np.random.default_rng(1).permutation(len(labels)))
        table = np.zeros((len(labels), 3074), dtype=np.uint8)
        table[:, 1], table[:, 2:] = labels, pixels.transpose(0, 3, 1, 2).reshape(len(labels), -1)
        table.tofile(binary / f"{split}.bin")
    made = [build("cifar100-10", None, {"root": str(root), **SMALL}) for root in (parquet, shuffled, binary)]
    assert len({one.manifest["partition"]["sha256"] for one in made}) == 1
    assert len({one.manifest["sources"][0]["sha256"] for one in made}) == 1
    images = [one.clients[3].train[0]["image"].tobytes() for one in made]
    assert images[0] == images[1] == images[2]


def test_another_seed_is_another_partition_and_the_same_seed_the_same(parquet):
    hashes = [
        build("cifar100-10", None, {"root": str(parquet), **SMALL, "seed": seed}).manifest["partition"]["sha256"]
        for seed in (42, 42, 52)
    ]
    assert hashes[0] == hashes[1] != hashes[2]


def test_train_and_test_are_divided_alike(tmp_path):
    """Classes of 100 and 100 images by one draw of shares: counts differ by less than rounding does."""
    rng = np.random.default_rng(0)
    data = {
        split: (rng.integers(0, 256, (200, 32, 32, 3), dtype=np.uint8), np.repeat([3, 7], 100))
        for split in ("train", "test")
    }
    for split in data:
        write_cifar(tmp_path, data, split)
    found = build(
        "cifar100-10", None, {"root": str(tmp_path), "minimum_train": 1, "minimum_test": 1, "val_fraction": 0}
    )
    for one in found.clients:
        for label in (3, 7):
            counts = [sum(record["label"] == label for record in getattr(one, split)) for split in ("train", "test")]
            assert counts[0] == counts[1]


def test_validation_is_divided_by_the_shares_of_train_and_test(tmp_path):
    """Largest remainders are within one of the exact count, so shares of n and m images differ by at most 1/n + 1/m."""
    rng = np.random.default_rng(0)
    data = {
        split: (rng.integers(0, 256, (400, 32, 32, 3), dtype=np.uint8), np.repeat([3, 7], 200))
        for split in ("train", "test")
    }
    for split in data:
        write_cifar(tmp_path, data, split)
    arguments = {"root": str(tmp_path), "minimum_train": 1, "minimum_test": 1, "val_fraction": 0.5}
    found = build("cifar100-10", None, arguments)
    for label in (3, 7):
        counts = {
            split: np.array([sum(record["label"] == label for record in getattr(one, split)) for one in found.clients])
            for split in ("train", "val", "test")
        }
        for split in ("train", "test"):
            bound = 1 / counts["val"].sum() + 1 / counts[split].sum()
            assert abs(counts["val"] / counts["val"].sum() - counts[split] / counts[split].sum()).max() <= bound


def test_minimums_that_no_draw_reaches_are_named(parquet, monkeypatch):
    monkeypatch.setattr("befit.data.partition._ATTEMPTS", 5)
    with pytest.raises(DataError, match="gives every client 500 training and 5 test images; use a larger alpha"):
        build("cifar100-10", None, {"root": str(parquet), **SMALL, "minimum_train": 500})


def test_wrong_values_of_cifar_are_refused(parquet, tmp_path):
    (tmp_path / "train.bin").write_bytes(b"123")
    with pytest.raises(DataError, match="has 3 bytes, which is no number of records of 3074"):
        build("cifar100-10", None, {"root": str(tmp_path)})
    with pytest.raises(ConfigError, match=r"(?s)val_fraction: must be at least 0.*alpha: must be positive, got 0\.0"):
        build("cifar100-10", None, {"root": str(parquet), "val_fraction": 1.0, "alpha": 0.0})
    rows = [{"img": {"bytes": b"no picture", "path": None}, "fine_label": 1}]
    write_parquet(tmp_path / "bad" / "train.parquet", rows)
    with pytest.raises(DataError, match=r"train\.parquet, row 1: img is no picture"):
        build("cifar100-10", None, {"root": str(tmp_path / "bad")})
    write_parquet(tmp_path / "other" / "train.parquet", [{"image": "x", "label": 1}])
    with pytest.raises(DataError, match="there is no img, fine_label; found image, label"):
        build("cifar100-10", None, {"root": str(tmp_path / "other")})


TINY = {"clients": 2, "train": 20, "test": 10}


@pytest.fixture(scope="module")
def xnli_root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xnli")
    write_xnli(folder)
    return folder


def test_xnli_has_clients_and_newcomers_of_every_language_with_equal_sizes(xnli_root):
    found = build("xnli-600", None, {"root": str(xnli_root), **TINY})
    assert [len(found.clients), len(found.newcomers)] == [30, 30]
    assert [one.id for one in (*found.clients, *found.newcomers)] == [f"client-{number:03d}" for number in range(60)]
    assert [found.clients[number].info["language"] for number in (0, 1, 2, 29)] == ["ar", "ar", "bg", "zh"]
    assert {(len(one.train), len(one.test)) for one in (*found.clients, *found.newcomers)} == {(10, 5)}
    assert found.label_names == ("entailment", "neutral", "contradiction")


def test_all_languages_of_xnli_have_the_same_rows_in_translation(xnli_root):
    found = build("xnli-600", None, {"root": str(xnli_root), **TINY})
    english = {one.id: one for one in found.clients if one.info["language"] == "en"}
    german = {one.id: one for one in found.clients if one.info["language"] == "de"}
    for first, second in zip(english.values(), german.values(), strict=True):
        for one, other in zip(first.train, second.train, strict=True):
            number = one["text"].split()[-1]
            assert one["text"] == f"en premise {number}" and one["text_pair"] == f"en hypothesis {number}"
            assert other["text"] == f"de premise {number}" and other["label"] == one["label"] == int(number) % 3


@pytest.mark.parametrize(("split", "rows"), [("train", 20), ("test", 10)])
def test_every_row_of_xnli_is_one_clients_or_one_newcomers_in_each_language(xnli_root, split, rows):
    found = build("xnli-600", None, {"root": str(xnli_root), **TINY})
    pools = [
        [record["text"] for one in pool for record in getattr(one, split)] for pool in (found.clients, found.newcomers)
    ]
    assert [len(texts) for texts in pools] == [rows * 15] * 2
    assert len({*pools[0], *pools[1]}) == 2 * rows * 15


def label_shares(records, classes):
    return np.bincount([record["label"] for record in records], minlength=classes) / len(records)


def mean_largest(pool, split, classes):
    """Mean over clients of the share of their most frequent label."""
    return np.mean([label_shares(getattr(one, split), classes).max() for one in pool])


def distances(pool, classes):
    """Total variation between training and test labels: the mean of a client's own two, and of two clients'."""
    train = np.stack([label_shares(one.train, classes) for one in pool])
    test = np.stack([label_shares(one.test, classes) for one in pool])
    each = abs(train[:, None] - test[None]).sum(-1) / 2
    own = each.trace() / len(pool)
    return own, (each.sum() / len(pool) - own) / (len(pool) - 1)


@pytest.fixture(scope="module")
def xnli_defaults(tmp_path_factory):
    """Root of as many rows as the paper's sizes take, and the federation of them."""
    folder = tmp_path_factory.mktemp("xnli of the paper's size")
    write_xnli(folder, train=4000, test=1000)
    return folder, build("xnli-600", None, {"root": str(folder)})


def test_xnli_has_300_clients_and_300_newcomers_of_100_and_25_by_default(xnli_defaults):
    _, found = xnli_defaults
    assert [len(found.clients), len(found.newcomers)] == [300, 300]
    assert {(len(one.train), len(one.val), len(one.test)) for one in (*found.clients, *found.newcomers)} == {
        (100, 0, 25)
    }


def test_labels_of_xnli_are_skewed_for_clients_and_newcomers_alike(xnli_defaults):
    """Labels by chance would give a largest share of about 0.38 of 100 and 0.43 of 25; Dirichlet(0.5) gives 0.75."""
    _, found = xnli_defaults
    for pool in (found.clients[:20], found.newcomers[:20]):
        for split in ("train", "test"):
            assert mean_largest(pool, split, 3) > 0.65, split
        own, others = distances(pool, 3)
        assert own < 0.2 and others > 0.5


def leading_labels(pool, split):
    """The most frequent label of every client, and its share."""
    shares = np.stack([label_shares(getattr(one, split), 3) for one in pool])
    return shares.argmax(1), shares.max(1)


def test_a_client_of_xnli_draws_train_and_test_from_one_mixture(xnli_defaults):
    """At alpha 0.01 a mixture is one label. A third of the rows is enough for six clients of twenty, so that the first
    six get what they draw, whoever else wants it; newcomers have the clients' mixtures."""
    folder, _ = xnli_defaults
    for seed in (1, 2):
        few = {"train": 1000, "test": 250}
        found = build("xnli-600", None, {"root": str(folder), **few, "alpha": 0.01, "seed": seed})
        first = [
            leading_labels(pool[:6], split) for pool in (found.clients, found.newcomers) for split in ("train", "test")
        ]
        assert min(shares.min() for _, shares in first) > 0.8
        assert len({tuple(labels) for labels, _ in first}) == 1
        assert len(set(first[0][0])) > 1


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_seed_chooses_the_rows_of_xnlis_pools(xnli_root, split):
    """Of 60 and 30 rows, 20 and 10 are a pool's: no two of these seeds agree on them."""
    rows = [
        [
            frozenset(record["text"].split()[-1] for one in pool for record in getattr(one, split))
            for pool in (found.clients, found.newcomers)
        ]
        for seed in (42, 42, 52, 62)
        for found in [build("xnli-600", None, {"root": str(xnli_root), **TINY, "seed": seed})]
    ]
    assert rows[0] == rows[1]
    for position in (0, 1):
        assert len({pools[position] for pools in rows}) == 3


def test_newcomers_that_share_the_clients_indices_have_nearly_no_skew(xnli_defaults):
    """A run of the released partitioner (SamsungLabs/fedp2eft) found 0.39 of training labels."""
    folder, own = xnli_defaults
    shared = build("xnli-600", None, {"root": str(folder), "unseen": "shared_indices"})
    assert mean_largest(shared.newcomers[:20], "train", 3) < 0.45
    assert mean_largest(shared.clients[:20], "train", 3) == mean_largest(own.clients[:20], "train", 3) > 0.65


@pytest.mark.parametrize("split", ["train", "test"])
def test_shared_indices_divide_newcomers_as_the_clients_are(xnli_root, split):
    def positions(pool):
        return [[record["id"].split("-")[2] for record in getattr(one, split)] for one in pool]

    shared = build("xnli-600", None, {"root": str(xnli_root), **TINY, "unseen": "shared_indices"})
    own = build("xnli-600", None, {"root": str(xnli_root), **TINY})
    assert positions(shared.clients) == positions(shared.newcomers) == positions(own.clients)
    assert positions(own.newcomers) != positions(own.clients)


def test_rows_of_xnli_in_another_order_are_the_same_federation(xnli_root, tmp_path):
    write_parquet(tmp_path / "all_languages" / "train.parquet", xnli_rows(60)[::-1])
    write_parquet(tmp_path / "all_languages" / "test.parquet", xnli_rows(30, offset=10_000)[::-1])
    made = [build("xnli-600", None, {"root": str(root), **TINY}) for root in (xnli_root, tmp_path)]
    assert [one["text"] for one in made[0].clients[4].train] == [one["text"] for one in made[1].clients[4].train]
    assert made[0].manifest["sources"] == made[1].manifest["sources"]


def test_too_little_of_xnli_and_other_columns_are_refused(xnli_root, tmp_path):
    with pytest.raises(DataError, match="60 rows are too few for two pools of 40"):
        build("xnli-600", None, {"root": str(xnli_root), **TINY, "train": 40})
    with pytest.raises(ConfigError, match="test: 1 rows are too few for 2 clients"):
        build("xnli-600", None, {"root": str(xnli_root), **TINY, "test": 1})
    write_parquet(tmp_path / "train.parquet", [{"premise": "a", "hypothesis": "b", "label": 0}] * 60)
    with pytest.raises(DataError, match=r"premise must be .*; found string and string"):
        build("xnli-600", None, {"root": str(tmp_path), **TINY})
    write_parquet(tmp_path / "en" / "train.parquet", [{"sentence1": "a", "label": 0}])
    with pytest.raises(DataError, match="there is no premise, hypothesis; found sentence1, label"):
        build("xnli-600", None, {"root": str(tmp_path / "en"), **TINY})


@pytest.fixture(scope="module")
def news(tmp_path_factory):
    folder = tmp_path_factory.mktemp("news")
    write_news(folder)
    return folder


def test_masakhanews_gives_half_of_every_language_to_newcomers(news):
    found = build("masakhanews-320", None, {"root": str(news), "clients": 3})
    assert [len(found.clients), len(found.newcomers)] == [48, 48]
    assert [one.id for one in (*found.clients, *found.newcomers)] == [f"client-{number:03d}" for number in range(96)]
    assert [one.info["language"] for one in found.clients[:4]] == ["amh", "amh", "amh", "eng"]
    for language, position in (("amh", 0), ("yor", 15)):
        sizes = [
            sum(len(one.train) for one in pool if one.info["language"] == language)
            for pool in (found.clients, found.newcomers)
        ]
        assert sizes == [(24 + 2 * position + 6) // 2] * 2
    texts = [record["text"] for pool in (found.clients, found.newcomers) for one in pool for record in one.train]
    assert len(texts) == len(set(texts)) and any("validation" in text for text in texts)


def test_the_seed_chooses_the_halves_of_masakhanews(news):
    """12 test rows have 924 halves, other splits many more: three seeds agree on none of these."""
    halves = []
    for seed in (42, 42, 52, 62):
        found = build("masakhanews-320", None, {"root": str(news), "clients": 3, "seed": seed})
        halves.append(
            {
                (language, split): frozenset(
                    record["text"]
                    for one in found.clients
                    if one.info["language"] == language
                    for record in getattr(one, split)
                )
                for language in masakhanews.LANGUAGES
                for split in ("train", "test")
            }
        )
    assert halves[0] == halves[1]
    for key in halves[0]:
        assert len({one[key] for one in halves}) == 3, key


@pytest.fixture(scope="module")
def much_news(tmp_path_factory):
    """The federation of twenty times as many rows."""
    folder = tmp_path_factory.mktemp("much news")
    write_news(folder, times=20)
    return build("masakhanews-320", None, {"root": str(folder)})


def test_labels_of_masakhanews_are_skewed_in_both_pools_and_alike_in_train_and_test(much_news):
    """Of seven labels by chance the largest share of 12 to 24 test rows is about 0.3."""
    assert [len(much_news.clients), len(much_news.newcomers)] == [160, 160]
    for pool in (much_news.clients, much_news.newcomers):
        for split in ("train", "test"):
            assert mean_largest(pool, split, 7) > 0.45, split
        own, others = distances(pool, 7)
        assert own < 0.35 and others > 0.5


def test_clients_of_masakhanews_share_their_mixtures_over_languages_and_pools(much_news):
    """The k-th clients of two languages, or of both pools, are skewed alike; others are not."""

    def shares(pool, language):
        """(clients, classes), without the last two clients, who take what the others leave."""
        held = [[record["label"] for record in one.train] for one in pool if one.info["language"] == language]
        return np.array([np.bincount(labels, minlength=7) / len(labels) for labels in held[:-2]])

    first = shares(much_news.clients, "amh")
    others = [(much_news.clients, "eng"), (much_news.newcomers, "amh"), (much_news.newcomers, "hau")]
    for other in (shares(pool, language) for pool, language in others):
        apart = np.abs(first[:, None] - other[None]).sum(-1)  # (clients, clients)
        same = np.eye(len(apart), dtype=bool)
        assert apart[same].mean() < 0.4 < 0.7 < apart[~same].mean()


def test_labels_of_masakhanews_are_numbers_of_all_seven_classes(news):
    found = build("masakhanews-320", None, {"root": str(news), "clients": 3})
    assert found.label_names == masakhanews.LABELS
    for one in found.clients:
        for record in one.train:
            classes = 6 if record["language"] == "yor" else 7
            assert record["label"] == int(record["text"].split()[-1]) % classes


def test_masakhanews_reads_the_files_of_its_authors_as_the_converted_branch(news, tmp_path):
    found = build("masakhanews-320", None, {"root": str(news), "clients": 3})
    mine = [record for one in found.clients for record in one.train if record["language"] == "lug"]
    assert mine and all(record["text"].startswith(("lug train", "lug validation")) for record in mine)
    assert {record["label"] for record in mine} <= set(range(7))
    (tmp_path / "amh").mkdir()
    (tmp_path / "amh" / "train.tsv").write_text("category\theadline\ttext\turl\nculture\tx\ty\t\n")
    with pytest.raises(DataError, match=r'train\.tsv, line 2: category must be one of business, .*got "culture"'):
        build("masakhanews-320", None, {"root": str(tmp_path)})


def test_masakhanews_refuses_labels_it_does_not_have(news, tmp_path):
    for split in ("train", "validation", "test"):
        write_parquet(tmp_path / "amh" / f"{split}.parquet", [{"label": 7, "headline_text": "x"}])
    with pytest.raises(DataError, match=r"train\.parquet, row 1: label must be 0 to 6, got 7"):
        build("masakhanews-320", None, {"root": str(tmp_path)})
    with pytest.raises(DataError, match="6 rows of a pool are too few for 7 clients"):
        build("masakhanews-320", None, {"root": str(news), "clients": 7})
