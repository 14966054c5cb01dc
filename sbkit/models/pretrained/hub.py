"""A pretrained encoder of Hugging Face's hub: found in the cache, or downloaded.

Its configuration, model card and safetensors are downloaded, never a pickle or code. A model that
is complete in the cache is used without any connection, even if the hub has a newer one.
"""

import logging
import re
from contextlib import suppress
from functools import partial
from pathlib import Path

from sbkit.base.errors import CODE_FAULTS, BundleError, ConfigError, translate
from sbkit.models.pretrained.folder import (
    CARD,
    CONFIG,
    GENERATION,
    INDEX,
    PREPROCESSOR,
    PROCESSOR,
    TOKENIZER,
    WEIGHTS,
    commit_of,
    read_settings,
    weight_files,
    weight_names,
)

logger = logging.getLogger(__name__)

SMALL_FILES = (
    *(CONFIG, PREPROCESSOR, PROCESSOR, CARD, GENERATION, TOKENIZER),
    *("tokenizer_config.json", "vocab.json", "merges.txt"),  # files of a recognizer of transformers
)
LOG_IN = "log in (hf auth login, or HF_TOKEN)"
MODEL_ID = re.compile(r"(?!.*(--|\.\.|\.git$))\b[\w.-]+\b/\b[\w.-]+\b", re.ASCII)  # the hub's rule


def find_folder(path_or_id: str, revision: str | None = None) -> Path:
    """Return the folder that `pretrained` names: a path, or a model of the hub.

    revision: a branch, a tag or a commit of the model; None: its branch `main`.
    """
    if (folder := find_local_folder(path_or_id, revision)) is not None:
        return folder
    if not MODEL_ID.fullmatch(path_or_id):
        raise ConfigError(
            "`pretrained` must name a folder, or a model of the hub as OWNER/NAME, but "
            f"{path_or_id} is neither."
        )
    logger.info(f"Downloading {path_or_id}, unless another process does so already.")
    return _download(path_or_id, revision or "main")


def find_local_folder(path_or_id: str, revision: str | None) -> Path | None:
    """Return the folder that `pretrained` names if it is on this machine, as `find_folder` does."""
    if (folder := Path(path_or_id).expanduser()).is_dir():
        if revision not in (None, commit_of(folder)):
            raise ConfigError(
                f"`pretrained_revision` is of a model of the hub, but {path_or_id} is a folder."
            )
        return folder
    from huggingface_hub import try_to_load_from_cache  # reads the disk only

    with suppress(ValueError, BundleError):  # the text is not an id; an incomplete download
        file = try_to_load_from_cache(path_or_id, CONFIG, revision=revision or "main")
        if isinstance(file, str):
            folder = Path(file).parent
            weight_files(folder)
            read_settings(folder)
            return folder
    return None


def _download(model: str, revision: str) -> Path:
    """Download the missing files of a model; the weights last, if the rest is supported."""
    from huggingface_hub import HfApi, constants, snapshot_download

    timeout = constants.HF_HUB_ETAG_TIMEOUT  # seconds
    explain = partial(_explain, model, revision)
    with translate(Exception, ConfigError, explain, unchanged=CODE_FAULTS):
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=timeout)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        names = [*SMALL_FILES] if WEIGHTS in sizes else [*SMALL_FILES, INDEX]
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=names))
        read_settings(folder)
        weights = [name for name in weight_names(folder) if name.endswith(".safetensors")]
        size = sum(sizes.get(name, 0) for name in weights) / 1e6
        logger.info(f"{model}, commit {folder.name}: {size:,.1f} MB, less what the cache has.")
        snapshot_download(model, revision=folder.name, allow_patterns=weights)
        weight_files(folder)
    return folder


def _explain(model: str, revision: str, error: Exception) -> str | None:
    """Explain why a model cannot be downloaded; None for an error that a full disk may raise."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return f"{model} is gated. Accept its terms at {hub}/{model}, and {LOG_IN}."
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{model} is neither a folder here nor a public model of {hub}; if private, {LOG_IN}."
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"`pretrained_revision` is {revision}, which {model} on {hub} does not have."
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"HF_HUB_OFFLINE forbids downloading {model} (revision {revision}), which is not "
            f"complete in {constants.HF_HUB_CACHE}."
        )
    if isinstance(error, OSError) and error.errno is not None:
        return None
    # Its HTTP client may raise anything.
    reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
    return (
        f"{model} cannot be downloaded from {hub} ({reason}). Check the connection, HTTPS_PROXY, "
        "HF_ENDPOINT and HF_TOKEN."
    )
