"""Push the trained model to the Hugging Face Hub (`push_to`): checked at the start, uploaded after saving."""

from __future__ import annotations

from pathlib import Path

from configs.schema import RunConfig
from core.errors import RunStopped, UserError, first_line, name_error
from core.hub import find_hub_failure
from driver.checks.output_folder import MARKER


def check_hub_upload(cfg: RunConfig) -> None:
    """Raise UserError if the final upload would fail: no token, no network, or no write access."""
    if cfg.push_to is None:
        return
    from huggingface_hub import HfApi, constants, get_token

    key = f"push_to={cfg.push_to}"
    if constants.is_offline_mode():
        raise UserError(f"{key}: HF_HUB_OFFLINE is set, so nothing can be pushed: unset it, or leave push_to out")
    if not get_token():
        raise UserError(f"{key}: there is no token for the hub: log in with `hf auth login`, or set HF_TOKEN")
    if failure := find_hub_failure():
        raise UserError(f"{key}: {constants.ENDPOINT} does not answer ({failure}): leave push_to out, or try again")
    try:
        known = HfApi().whoami()
    except Exception as error:  # a border: whatever the library raises
        raise UserError(f"{key}: {constants.ENDPOINT} does not know the token: {first_line(error)}") from error
    role = known.get("auth", {}).get("accessToken", {}).get("role")
    # The rights of a fine-grained token show only at the upload; the role read surely cannot write.
    if role == "read":
        raise UserError(f"{key}: the token may only read: make one that may write")
    owners = [known["name"], *(org["name"] for org in known.get("orgs", []))]
    owner, slash, _ = cfg.push_to.partition("/")
    # Without a slash the repository belongs to the token's own account.
    if slash and owner not in owners:
        raise UserError(f"{key}: the token is that of {', '.join(owners)}: name one of them before the slash")


def push_model(name: str, folder: Path) -> str:
    """Upload a saved model and return the address. Raises RunStopped on failure; the model stays in `folder`."""
    from huggingface_hub import HfApi

    hub = HfApi()
    if not folder.is_dir():
        raise RunStopped(f"push_to={name}: nothing is pushed, because {folder} could not be written")
    try:
        # Private: nobody should find out at the end of a run that the model is public.
        made = hub.create_repo(name, private=True, exist_ok=True)
        hub.upload_folder(
            repo_id=made.repo_id,
            folder_path=folder,
            commit_message="Trained with FeynRL",
            ignore_patterns=[MARKER],  # it names a folder of this machine
        )
    except Exception as error:  # a border: whatever the library raises
        raise RunStopped(
            f"push_to={name}: the model could not be pushed ({name_error(error)}); it is saved in {folder}: push it "
            "with `hf upload`"
        ) from error
    return str(made)
