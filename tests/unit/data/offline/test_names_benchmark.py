"""`names`: what docs/names.md says of its parts, clients and backbones."""

import hashlib
import importlib
import json
import sys

import numpy as np
import pytest

from befit.core.errors import ConfigError, DataError
from befit.data.offline import name_strings as strings_module
from befit.data.offline.name_strings import (
    CLIENT_LANGUAGES,
    KINDS,
    PUBLIC_LANGUAGES,
    STRINGS_SHA256,
    Name,
    clean,
    fold,
    name_hash,
    name_strings,
)
from befit.data.offline.names import MINIMUM, draw, names, names_small, shipped, split_pools
from befit.data.partition import partition_hash
from befit.data.registry import build

DRAWN_WITH = "2.4.6"  # the NumPy of the lists that ship

# The name of the module is also the name of the function in it.
names_module = importlib.import_module("befit.data.offline.names")


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_cache(cache, monkeypatch):
    monkeypatch.setenv("BEFIT_CACHE", str(cache))


@pytest.fixture(scope="session")
def federation(cache):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BEFIT_CACHE", str(cache))
        return names()


def everyone(federation):
    return (*federation.clients, *federation.newcomers)


def key(record):
    """The key that a record's name stands for, in any language: "territory-FR"."""
    return record["id"].split("-", 1)[1]


def test_there_are_four_clients_and_four_newcomers_in_each_of_fifteen_languages(federation):
    assert [client.id for client in federation.clients] == [f"{one}-{k}" for one in CLIENT_LANGUAGES for k in range(4)]
    assert len(federation.newcomers) == 60
    assert not {c.id for c in federation.clients} & {c.id for c in federation.newcomers}
    for client in everyone(federation):
        assert client.info == {"language": client.id.split("-")[0]}
        assert {record["language"] for record in (*client.train, *client.test)} == {client.info["language"]}
        assert len(client.train) >= 69 and len(client.test) >= 36, client.id


def test_no_name_is_held_twice_and_only_training_names_are_dropped(federation):
    held = [record["id"] for client in everyone(federation) for record in (*client.train, *client.test)]
    assert len(held) == len(set(held))
    usable = {row.id for row in name_strings() if row.language in CLIENT_LANGUAGES}
    assert len(usable - set(held)) == federation.manifest["dropped"]["training names equal to a test name"] == 8


def test_no_test_name_equals_a_training_name_of_anyone_in_any_language(federation):
    trained = {fold(record["text"]) for client in everyone(federation) for record in client.train}
    tested = {fold(record["text"]) for client in everyone(federation) for record in client.test}
    assert trained and tested and not trained & tested


def test_no_test_name_is_a_translation_of_a_training_name(federation):
    trained = {key(record) for client in everyone(federation) for record in client.train}
    tested = {key(record) for client in everyone(federation) for record in client.test}
    assert not trained & tested
    seen = {key(record) for client in federation.clients for record in client.train}
    new = {key(record) for client in federation.newcomers for record in client.train}
    assert not seen & new


def test_public_names_are_of_other_languages_and_equal_no_clients_name(federation):
    held = {fold(record["text"]) for c in everyone(federation) for record in (*c.train, *c.test)}
    assert {record["language"] for record in federation.public} == set(PUBLIC_LANGUAGES)
    assert not held & {fold(record["text"]) for record in federation.public}


def test_labels_say_what_kind_of_name_it_is(federation):
    """Frankreich is a territory; its code FR has the same place in all languages."""
    by_id = {record["id"]: record for c in everyone(federation) for record in (*c.train, *c.test)}
    assert by_id["de-territory-FR"] == {"id": "de-territory-FR", "text": "Frankreich", "label": 1, "language": "de"}
    assert by_id["zh-territory-FR"]["text"] == "法国"
    assert federation.label_names == KINDS == ("language", "territory", "currency", "script")
    assert {KINDS[record["label"]] for record in by_id.values()} == set(KINDS)


def test_cleaning_keeps_one_of_equal_names_none_of_two_kinds_and_languages_with_an_even_hash():
    even, odd = (next(k for k in ("aa", "ab", "ae", "af", "ak") if name_hash(k) % 2 == rest) for rest in (0, 1))
    given = [
        Name("en", "language", even, "One"),
        Name("en", "language", odd, "Two"),
        Name("en", "territory", "XA", "Same"),
        Name("en", "territory", "XB", "SAME"),
        Name("en", "territory", "TH", "Thai"),
        Name("en", "script", "Thai", "thai"),
        Name("en", "currency", "XXX", "¤"),
    ]
    assert [(name.kind, name.key) for name in clean(given)] == [("language", even), ("territory", "XA")]


def test_the_raw_count_of_names_is_that_of_the_pinned_babel():
    """44,340 names of two characters or more in 34 languages, before repeats and half of the languages go."""
    babel = pytest.importorskip("babel")
    total = 0
    for language in (*CLIENT_LANGUAGES, *PUBLIC_LANGUAGES):
        locale = babel.Locale.parse(language)
        tables = (locale.languages, locale.territories, locale.currencies, locale.scripts)
        total += sum(len(text) >= 2 for table in tables for text in table.values())
    assert total == 44_340


def test_the_strings_come_from_the_cache_the_second_time_without_babel(tmp_path, monkeypatch):
    monkeypatch.setenv("BEFIT_CACHE", str(tmp_path / "new" / "folder"))
    first = name_strings()
    (file,) = (tmp_path / "new" / "folder").iterdir()
    assert hashlib.sha256(file.read_bytes()).hexdigest() == STRINGS_SHA256
    monkeypatch.setitem(sys.modules, "babel", None)
    assert name_strings() == first and len(first) == 33_366


def test_a_damaged_cache_is_built_again_and_said_so(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("BEFIT_CACHE", str(tmp_path))
    first = name_strings()
    (file,) = tmp_path.iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    assert name_strings() == first and file.read_bytes() == whole
    assert f"{file} does not match its hash" in caplog.text


def test_without_babel_the_error_names_the_extra_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("BEFIT_CACHE", str(tmp_path))
    monkeypatch.setitem(sys.modules, "babel", None)
    with pytest.raises(DataError, match=r"not installed: pip install '\.\[benchmarks\]'"):
        names()


def test_another_babel_is_refused_naming_both_releases(tmp_path, monkeypatch):
    import babel

    monkeypatch.setenv("BEFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(babel, "__version__", "2.17.0")
    with pytest.raises(DataError, match=r"built from Babel 2\.18\.0.*Babel 2\.17\.0 is installed"):
        names()


def test_other_strings_than_the_recorded_ones_are_refused_and_not_cached(tmp_path, monkeypatch):
    monkeypatch.setenv("BEFIT_CACHE", str(tmp_path))
    monkeypatch.setattr(strings_module, "build_strings", lambda: [Name("en", "script", "Latn", "Latin")])
    with pytest.raises(DataError, match=f"recorded is {STRINGS_SHA256[:12]}"):
        name_strings()
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_says_which_variable_helps(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BEFIT_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DataError, match="Set BEFIT_CACHE to"):
        name_strings()


def test_the_shipped_partitions_are_the_ones_that_are_drawn():
    """NumPy does not promise the same draws in every version: another one than drew the lists is reported only."""
    pools, _ = split_pools(name_strings())
    for language in CLIENT_LANGUAGES:
        for pool in ("seen", "new"):
            rows = {split: pools[language, pool, split] for split in MINIMUM}
            parts, drawn = shipped(language, pool, 4, 0.5, 0), draw(rows, language, pool, 4, 0.5, 0)
            assert parts is not None
            for split in MINIMUM:
                assert sorted(np.concatenate(parts[split]).tolist()) == list(range(len(rows[split])))
                same = partition_hash(parts[split]) == partition_hash(drawn[split])
                if not same and np.__version__ != DRAWN_WITH:
                    pytest.skip(f"NumPy {np.__version__} draws other partitions than the ones that ship")
                assert same, (language, pool, split)


def test_a_shipped_partition_that_was_changed_is_refused(tmp_path, monkeypatch):
    stored = json.loads((names_module.files("befit.data.offline") / "names_partitions.json").read_text())
    stored["en/seen"]["indices"]["train"][0].pop()
    (tmp_path / "names_partitions.json").write_text(json.dumps(stored))
    monkeypatch.setattr(names_module, "files", lambda package: tmp_path)
    with pytest.raises(DataError, match=r"names_partitions\.json does not match its hash"):
        names(languages=["en"])


def test_clients_are_skewed_and_alike_in_train_and_test(federation):
    def mix(records):
        return np.bincount([record["label"] for record in records], minlength=4) / len(records)

    shares = [(mix(client.train), mix(client.test)) for client in federation.clients]
    assert 0.5 < np.mean([train.max() for train, _ in shares]) < 0.7
    rolled = [*shares[1:], shares[0]]
    own = np.mean([np.abs(train - test).sum() for train, test in shares])
    others = np.mean([np.abs(train - test).sum() for (train, _), (_, test) in zip(shares, rolled, strict=True)])
    assert own < others / 2


def test_one_client_per_language_holds_the_whole_language():
    federation = names(clients_per_language=1, languages=["hi", "en"], pool="seen")
    assert [client.id for client in federation.clients] == ["hi-0", "en-0"] and not federation.newcomers
    pools, _ = split_pools(name_strings())
    assert [r["id"] for r in federation.clients[1].test] == [row.id for row in pools["en", "seen", "test"]]


@pytest.mark.parametrize(("fraction", "least"), [(0.05, 5), (0.2, 14)])
def test_validation_names_are_taken_from_training_and_never_from_test(federation, fraction, least):
    """A twentieth of some 80 names would be 4: at least 5 are held out. A fifth of the smallest 69 is 14."""
    held = names(languages=["en"], val_fraction=fraction)
    plain = {client.id: client for client in everyone(federation)}
    for client in everyone(held):
        whole = [record["id"] for record in plain[client.id].train]
        val = [record["id"] for record in client.val]
        assert len(val) == max(5, round(fraction * len(whole))) >= least
        assert sorted([*val, *(record["id"] for record in client.train)]) == sorted(whole)
        assert client.test == plain[client.id].test


def test_fewer_training_names_are_drawn_and_leave_the_other_splits_alone() -> None:
    whole = names(languages=["en"], val_fraction=0.2, pool="seen")
    few = names(languages=["en"], val_fraction=0.2, pool="seen", train=10)
    for all_of, some in zip(whole.clients, few.clients, strict=True):
        assert len(some.train) == 10 and all(row in all_of.train for row in some.train)
        assert some.train != all_of.train[:10]  # drawn: the first are of one kind
        assert (some.val, some.test) == (all_of.val, all_of.test)
    assert few.manifest["partition"]["args"]["train"] == 10


def test_names_small_has_five_languages_and_the_same_clients(federation):
    small = names_small()
    whole = {client.id: client for client in everyone(federation)}
    assert len(small.clients) == len(small.newcomers) == 20 and small.name == "names-small"
    assert {client.info["language"] for client in small.clients} == {"en", "de", "ru", "hi", "zh"}
    assert all(whole[client.id] == client for client in everyone(small))


def test_the_seed_changes_who_holds_what_but_not_what_is_tested():
    first, second = (names(languages=["fi"], seed=seed) for seed in (0, 1))
    held = [sorted(r["id"] for c in one.clients for r in c.test) for one in (first, second)]
    assert held[0] == held[1]
    assert first.manifest["partition"]["sha256"] != second.manifest["partition"]["sha256"]
    assert names(languages=["fi"], seed=1).clients == second.clients


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"languages": ["en", "sw"]}, ConfigError, "benchmark.languages: 'sw' is not one of ar, bg"),
        ({"languages": ["en", "de", "en"]}, ConfigError, "benchmark.languages: en is there twice"),
        ({"languages": []}, ConfigError, "must name at least one language"),
        ({"train": 0}, ConfigError, "benchmark.train: must be positive, got 0"),
        ({"val_fraction": 1.0}, ConfigError, "benchmark.val_fraction: must be at least 0 and below 1, got 1.0"),
        ({"clients_per_language": 10}, DataError, "do not give each of 10 clients 30; use 1 to 9 clients_per_language"),
        ({"clients_per_language": 0}, DataError, "each of 0 clients"),
        ({"alpha": 0.0}, DataError, "alpha must be positive, got 0.0"),
        ({"seed": -1}, DataError, "a seed must be 0 or more, got -1"),
    ],
)
def test_impossible_arguments_are_refused_by_name(arguments, error, words):
    with pytest.raises(error, match=words):
        build("names", None, arguments)
