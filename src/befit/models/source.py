"""Where a backbone's files are: a zoo name, a directory in an installed package, a local directory, or the hub.

Only configuration and safetensors weights are ever used. Formats that can run code when they are read (pickled
`.bin`, `.pt` and `.ckpt` files, modelling code from the hub) are refused.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from befit.core.errors import BefitError, ModelError, brief, did_you_mean
from befit.core.jsonfile import parse_json

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
UNSAFE = frozenset({".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack"})
ADAPTER = "adapter_config.json"
_MOST_BYTES = 2**26  # of an index, which names every tensor
HUB_PATTERNS = ("*.json", "*.safetensors", "*.txt", "*.model", "*.jinja")
HUB_IGNORED = ("*/*", "consolidated*")  # ONNX and original formats, which would double the download


def is_hub_id(name: str) -> bool:
    """Whether `find_model` would ask the hub: the name is neither of the zoo, nor a package's, nor a directory."""
    from befit.zoo import zoo_names

    return name not in zoo_names() and not name.startswith("package:") and not Path(name).expanduser().is_dir()


def find_model(name: str, revision: str | None = None, weights: bool = True) -> tuple[Path, str]:
    """The directory of model `name`, and where it was found, for people.

    Tried in this order, the first that matches wins:

    1. a model that ships with befit, by its zoo name: `digits-vit`
    2. `package:NAME` or `package:NAME/SUB/DIRECTORY`: inside an installed Python package, which is not imported
    3. an existing local directory; a relative one is relative to the current directory
    4. a hub id, `owner/model`, at `revision`: from the cache, or downloaded where the hub can be reached

    Raises ModelError that says what is missing. `weights` False asks for the configuration only.
    """
    from befit.zoo import zoo_path

    if not name:
        raise ModelError("model.id is empty; give a zoo name, package:NAME/SUB, a directory or a hub id")
    directory, source = zoo_path(name), f"the befit zoo ({name})"
    if directory is None and name.startswith("package:"):
        directory, source = package_directory(name), name
    elif directory is None and Path(name).expanduser().is_dir():
        directory, source = Path(name).expanduser(), name
    hint = ""
    if directory is None:
        directory, source = hub_directory(name, revision, weights), f"{name} at {revision or 'main'}"
        # A cache that holds part of a model answers without a network, and without an error.
        hint = f"\n  To fetch all that befit reads, run\n    {hub_command(name, revision)}"
    elif revision is not None:
        raise ModelError(f"model.revision {revision!r} is for hub ids; {name!r} is {source}. Remove model.revision")
    if problem := missing(directory, weights):
        raise ModelError(f"{source} {problem}{hint}")
    return directory, source


def weights_hash(name: str, revision: str | None = None) -> str:
    """What tells whether a model's files have changed: SHA-256 of its configuration and weights; of a hub model, which
    has to be in the cache, the commit. Raises ModelError, or OSError, where they are not there."""
    if is_hub_id(name):
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, revision=revision, local_files_only=True)).name
    directory, _ = find_model(name, revision)
    digest = hashlib.sha256()
    for path in (directory / "config.json", *sorted(directory.glob("*.safetensors"))):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def package_directory(name: str) -> Path:
    """`package:NAME/SUB` as a directory, from where the package is installed."""
    package, _, subdirectory = name.removeprefix("package:").partition("/")
    # A dotted name would import the parent package to find its child; what we look for is data.
    if not package.isidentifier() or ".." in Path(subdirectory).parts or subdirectory.startswith("/"):
        raise ModelError(f"model.id {name!r} is not of the form package:NAME or package:NAME/SUB/DIRECTORY")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ModelError(f"model.id {name!r}: the Python package {package} is not installed in this environment")
    for root in spec.submodule_search_locations:
        if (Path(root) / subdirectory).is_dir():
            return Path(root) / subdirectory
    raise ModelError(f"model.id {name!r}: the package {package} has no directory {subdirectory!r}")


def hub_directory(name: str, revision: str | None, weights: bool) -> Path:
    """The snapshot of a hub model, from the cache where it is complete for this revision."""
    if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name) or name.startswith("."):
        raise ModelError(
            f"model.id {name!r} is no zoo name, and no such directory exists (looked from {Path.cwd().name}/). "
            "Give a directory with config.json and model.safetensors, package:NAME/SUB, or a hub id such as owner/model"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    patterns = HUB_PATTERNS if weights else tuple(p for p in HUB_PATTERNS if p != "*.safetensors")
    try:
        return Path(
            snapshot_download(name, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(HUB_IGNORED))
        )
    except (OSError, ValueError, HfHubHTTPError, HFValidationError) as error:
        from befit.zoo import zoo_names

        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        hint = did_you_mean(name, zoo_names())
        raise ModelError(
            f"model.id {name!r} is no zoo name and no local directory, and the hub did not give it: {reason}"
            f"{hint and f'.{hint}'}\n"
            f"  On a machine with access run\n    {hub_command(name, revision)}\n"
            "  and copy the Hugging Face cache here, or download with --local-dir DIR and set model.id to DIR"
        ) from error


def hub_command(name: str, revision: str | None = None) -> str:
    """The command that fetches exactly what befit reads.

    >>> hub_command("owner/model", "abc")[:40]
    'hf download owner/model --revision abc -'
    """
    parts = ["hf", "download", name, *(["--revision", revision] if revision else [])]
    parts += [f"--include '{pattern}'" for pattern in HUB_PATTERNS]
    parts += [f"--exclude '{pattern}'" for pattern in HUB_IGNORED]
    return " ".join(parts)


@contextmanager
def reading(what: str) -> Iterator[None]:
    """Make a ModelError of whatever transformers raises over a damaged or hostile file: it checks few types, and no
    sizes. `what` is the error's sentence up to its reason."""
    try:
        yield
    except BefitError:
        raise
    except Exception as error:
        raise ModelError(f"{what}: {first_line(error)}") from error


def first_line(error: Exception) -> str:
    """What an error says first: transformers goes on with the names of all classes that it knows."""
    line = brief(error)
    unfit = re.match(r"Unrecognized configuration class .*?(\w+)'> for this kind of AutoModel: (\w+)", line)
    if unfit:
        return f"transformers makes no {unfit[2]} of a {unfit[1]}; take a model for this task, or another task"
    return line


def missing(directory: Path, weights: bool = True) -> str:
    """What keeps `directory` from being a model with safetensors weights, as the end of a sentence; empty if nothing.

    Where `weights` is False a configuration is enough.
    """
    if not (directory / "config.json").is_file():
        return "has no config.json; it must be a directory as save_pretrained writes it"
    if (directory / ADAPTER).exists():
        # transformers would load the adapter too, from wherever its configuration says, and also a pickled one.
        return f"has {ADAPTER}: it is an adapter or a model with one; name a folder with the model alone"
    if not weights or (directory / WEIGHTS).is_file():
        return ""
    if (directory / INDEX).is_file():
        try:
            index = parse_json((directory / INDEX).read_bytes(), INDEX, ModelError, _MOST_BYTES)
            shards = set(index["weight_map"].values())
        except (OSError, ModelError, KeyError, TypeError, AttributeError) as error:
            return f"has a damaged {INDEX} ({error!r}); copy the model again"
        for shard in shards:
            # transformers opens what the index names: a pickle as a pickle, and any folder of this machine.
            if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
                return (
                    f"has an {INDEX} that names {brief(repr(shard))}; weights must be .safetensors files in the same "
                    "folder: convert it with save_pretrained"
                )
        absent = sorted(shard for shard in shards if not (directory / shard).is_file())
        return f"lacks {len(absent)} of {len(shards)} weight files, first {absent[0]}" if absent else ""
    others = sorted(path.name for path in directory.iterdir() if path.suffix in UNSAFE)
    hint = f"; {', '.join(others)} cannot be read safely, convert it with save_pretrained" if others else ""
    return f"has no safetensors weights ({WEIGHTS} or {INDEX}){hint}"
