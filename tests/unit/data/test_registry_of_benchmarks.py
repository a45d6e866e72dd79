"""The registry of benchmarks: signatures as schema, suggestions, and light imports."""

import subprocess
import sys

import pytest

from befit.core.errors import ConfigError
from befit.core.schema import parameters_of
from befit.data.registry import build, get, names


def test_every_benchmark_is_listed_with_what_a_person_needs_to_choose():
    assert {"digits", "names", "names-small"} <= set(names()) and names() == sorted(names())
    for name in names():
        entry = get(name)
        assert entry.name == name and entry.summary and entry.default_model and entry.version
        described = {one.name: one.description for one in parameters_of(entry.build)}
        assert "seed" in described and all(described.values()), described


def test_listing_benchmarks_imports_no_heavy_library():
    code = (
        "import sys; from befit.data import registry; assert {'names', 'names-small'} <= set(registry.names()); "
        "heavy = ('torch', 'transformers', 'sklearn', 'babel', 'datasets', 'pyarrow'); "
        "print([m for m in heavy if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_an_unknown_benchmark_is_refused_with_a_suggestion():
    with pytest.raises(ConfigError, match=r"unknown benchmark 'digit'\. Did you mean: digits\? Known: .*digits-vqa"):
        get("digit")


def test_all_wrong_arguments_and_the_version_are_named_at_once():
    with pytest.raises(ConfigError) as caught:
        build("digits", "7", {"client": 3, "alpha": "half", "seed": 1.5})
    problems = caught.value.problems
    assert len(problems) == 4
    for words in (
        "benchmark.client: unknown key for digits. Did you mean: clients?",
        "benchmark.alpha: must be a number",
        "benchmark.seed: must be a whole number",
        "digits is at version 1 here, not 7",
    ):
        assert any(words in problem for problem in problems), words


def test_arguments_reach_the_benchmark():
    assert len(build("digits", "1", {"clients": 4, "alpha": 5.0}).clients) == 4


@pytest.mark.parametrize(("name", "key"), [("cifar100-10", "clients"), ("skills-low", "train"), ("hflb", "newcomers")])
def test_what_a_variant_fixes_is_no_key_of_its_configuration(name, key):
    with pytest.raises(ConfigError, match=rf"benchmark\.{key}: unknown key for {name}"):
        build(name, None, {key: 3})
