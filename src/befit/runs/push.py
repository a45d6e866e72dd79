"""A client's model on the Hugging Face hub: only where somebody asks for it, of one client at a time."""

from __future__ import annotations

import tempfile
from pathlib import Path

from befit.core.errors import RunError
from befit.runs.exporting import ExportForm, export_to

# What an earlier push may have left there: transformers would add an adapter to a merged model beside it.
_MODELS = ["*.safetensors", "*.safetensors.index.json", "adapter_config.json", "config.json"]


def push(run_dir: Path | str, client: str, repo: str, form: ExportForm, private: bool = True) -> tuple[str, list[str]]:
    """Export one client's model and send it to `repo`, OWNER/NAME, which is made where it does not exist. It takes the
    place of a model that is there.

    The token and the address are huggingface_hub's own: `hf auth login`, or HF_TOKEN and HF_ENDPOINT.

    ->  the address, and the files that were sent
    Raises RunError where the hub refuses or is not reached, and where `repo` is there and public though `private`,
    or the other way round.
    """
    from huggingface_hub import HfApi

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        export_to(Path(run_dir), {client: folder}, form)
        files = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
        try:
            api = HfApi()
            address = api.create_repo(repo, private=private, exist_ok=True)
            if (there := bool(api.repo_info(repo).private)) != private:  # its history would be published, or this model
                is_, cure = ("private", "leave out") if there else ("public", "say")
                raise RunError(f"{repo} is there and {is_}: name another one, or {cure} --public")
            api.upload_folder(repo_id=repo, folder_path=folder, commit_message="befit push", delete_patterns=_MODELS)
        except RunError:
            raise
        except Exception as error:  # a missing network has another class in each version of the hub's library
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            unreached = ConnectionError(reason).with_traceback(error.__traceback__)
            cause = error if isinstance(error, (OSError, ValueError)) else unreached
            raise RunError(f"the hub did not take {repo}: {reason}") from cause
    return str(address), files
