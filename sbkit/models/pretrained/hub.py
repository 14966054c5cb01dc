"""A pretrained encoder of Hugging Face's hub: found in the cache, or downloaded.

Its configuration, model card and safetensors are downloaded, never a pickle or code. A model that
is complete in the cache is used without any connection, whatever the hub has by now.
`huggingface_hub` keeps the cache below HF_HOME, and reads HF_ENDPOINT (a mirror), HF_HUB_OFFLINE,
HF_TOKEN and HTTPS_PROXY.
"""

import logging
import re
import sys
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sbkit.base.errors import BundleError, ConfigError, SbkitError
from sbkit.base.files import task_lock
from sbkit.models.pretrained.folder import (
    CARD,
    CONFIG,
    INDEX,
    PICKLES,
    PREPROCESSOR,
    PROCESSOR,
    WEIGHTS,
    commit_of,
    read_settings,
    weight_files,
    weight_names,
)

logger = logging.getLogger(__name__)

SMALL_FILES = (CONFIG, PREPROCESSOR, PROCESSOR, CARD)
MODEL_ID = re.compile(r"(?!.*(--|\.\.|\.git$))\b[\w.-]+\b/\b[\w.-]+\b", re.ASCII)  # the hub's rule
MAIN = "main"  # the branch that a model has if no revision is named
LOCKS = ".locks"  # the folder in the hub's cache


def find_folder(path_or_id: str, revision: str | None = None) -> Path:
    """Return the folder that `pretrained` names: a path, or a model of the hub.

    What the cache lacks of a model is downloaded by one process at a time, so that the others of a
    run find it there.

    revision: a branch, a tag or a commit of the model; None: its branch `main`.

    Raises SbkitError if there is no such folder or model, or if it cannot be downloaded.
    """
    if (folder := Path(path_or_id).expanduser()).is_dir():
        if revision not in (None, commit_of(folder)):
            raise ConfigError(
                f"`pretrained_revision` selects a revision of a model of the hub, but {path_or_id} "
                "is a folder. Leave it out."
            )
        return folder
    if (cached := _find_in_cache(path_or_id, revision or MAIN)) is not None:
        return cached
    from huggingface_hub import constants  # not needed for a folder

    if not MODEL_ID.fullmatch(path_or_id):
        raise ConfigError(
            "`pretrained` must name a folder, or a model of the hub as OWNER/NAME, but "
            f"{path_or_id} is neither. Correct it."
        )
    logger.info(f"Downloading {path_or_id}, unless another process does so already.")
    locks = Path(constants.HF_HUB_CACHE) / LOCKS
    locks.mkdir(parents=True, exist_ok=True)
    with task_lock(locks, path_or_id, wait=True):
        cached = _find_in_cache(path_or_id, revision or MAIN)
        return cached or _download(path_or_id, revision or MAIN)


def _find_in_cache(model: str, revision: str) -> Path | None:
    """Return the folder of a model in the hub's cache, None if a file is missing."""
    from huggingface_hub import try_to_load_from_cache  # reads the disk only

    with suppress(ValueError, BundleError):  # the text is not an id; an incomplete download
        if isinstance(file := try_to_load_from_cache(model, CONFIG, revision=revision), str):
            folder = Path(file).parent
            weight_files(folder)
            read_settings(folder)
            return folder
    return None


def _download(model: str, revision: str) -> Path:
    """Download what the cache lacks of a model; the weights last, if the rest is supported."""
    from huggingface_hub import HfApi, constants, snapshot_download

    with _errors_as_sbkit_errors(model, revision), _bars_on_terminals():
        seconds = constants.HF_HUB_ETAG_TIMEOUT
        info = HfApi().model_info(model, revision=revision, files_metadata=True, timeout=seconds)
        sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
        _check_files(model, sizes)
        names = [*SMALL_FILES] if WEIGHTS in sizes else [*SMALL_FILES, INDEX]
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=names))
        read_settings(folder)
        weights = [name for name in weight_names(folder) if name.endswith(".safetensors")]
        size = sum(sizes.get(name, 0) for name in weights) / 1e6
        logger.info(
            f"{model}, commit {folder.name}: {size:,.1f} MB of weights, less what is already in "
            f"{folder.parents[2]}."
        )
        snapshot_download(model, revision=folder.name, allow_patterns=weights)
    return folder


def _check_files(model: str, names: Container[str]) -> None:
    """Raise BundleError if a model of the hub lacks its configuration or safetensors."""
    missing = CONFIG if CONFIG not in names else WEIGHTS
    if missing == CONFIG or (WEIGHTS not in names and INDEX not in names):
        pickles = [name for name in PICKLES if name in names]
        reason = (
            f", only {pickles[0]}, which is not downloaded because loading a pickle runs code"
            if pickles and missing == WEIGHTS
            else ""
        )
        raise BundleError(
            f"{model} has no {missing} on the hub{reason}. Use another model, or convert this one "
            "(docs/guide/fine-tuning.md) and name its folder."
        )


@contextmanager
def _bars_on_terminals() -> Iterator[None]:
    """Hide the bars of `huggingface_hub` in a log, unless its own variable decides."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import disable_progress_bars, enable_progress_bars

    if sys.stderr.isatty() or constants.HF_HUB_DISABLE_PROGRESS_BARS is not None:
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _errors_as_sbkit_errors(model: str, revision: str) -> Iterator[None]:
    """Explain why a model cannot be downloaded."""
    from huggingface_hub import constants, errors

    hub = constants.ENDPOINT
    try:
        yield
    except SbkitError:
        raise
    except errors.GatedRepoError:
        problem = f"{hub} gives {model} only to those who have accepted its terms"
        fix = f"Accept them at {hub}/{model}, and log in (hf auth login, or HF_TOKEN)."
    except errors.RepositoryNotFoundError:
        problem = f"`pretrained` is {model}, which is neither a folder here nor a model of {hub}"
        fix = "Correct it. If the model is private, log in (hf auth login, or HF_TOKEN)."
    except errors.RevisionNotFoundError:
        problem = f"`pretrained_revision` is {revision}, which {model} does not have on {hub}"
        fix = "Give one of its branches, tags or commits."
    except errors.OfflineModeIsEnabled:
        problem = (
            f"`pretrained` is {model}, which is not a folder here nor complete at revision "
            f"{revision} in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE forbids to download it"
        )
        fix = "Unset that variable, or copy the model there from another machine."
    except Exception as error:  # whatever its HTTP client raises
        if isinstance(error, OSError) and error.errno is not None:  # a full disk, for example
            raise
        reason = str(error.__cause__ or error).partition("\n")[0].rstrip(".")
        problem = f"{model} cannot be downloaded from {hub} ({reason})"
        fix = (
            "Check the connection (HTTPS_PROXY, HF_TOKEN, or HF_ENDPOINT for a mirror), and rerun "
            "the same command: files that have arrived are kept."
        )
    else:
        return
    raise ConfigError(f"{problem}. {fix}")
