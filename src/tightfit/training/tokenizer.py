"""Loads a model's tokenizer. Knows where one may lie; does not know data."""

from __future__ import annotations

import re
from pathlib import Path

from huggingface_hub import constants
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from tightfit.errors import ModelNotFoundError

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_LOADING_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer in a model's folder, or of a name on the Hub; it always has a pad token.

    Code that comes with a model is never run. Without a pad token the end-of-text token pads:
    padding carries no label, so what stands there does not matter.

    Raises:
        ModelNotFoundError: there is none, or it cannot be loaded.
    """
    name = str(path)
    folder = Path(name).expanduser()
    if folder.is_dir():
        _check_folder(folder)
    elif folder.exists() or not _HUB_NAME.fullmatch(name):
        raise ModelNotFoundError(
            f"no tokenizer for {name!r}: {folder.absolute()} is not a folder, and it is no name "
            "on the Hub; name a folder that holds " + " or ".join(_FILES)
        )
    local = folder.is_dir()
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(folder) if local else name, trust_remote_code=False
        )
    except _LOADING_ERRORS as error:
        what = f"the tokenizer in {folder} cannot be loaded"
        if not local:
            what = (
                f"no tokenizer for {name!r}: looked for a folder {folder.absolute()}, in the Hub's "
                f"cache {constants.HF_HUB_CACHE} and on the Hub"
            )
        cause = str(error).partition("\n")[0]
        raise ModelNotFoundError(f"{what}: {type(error).__name__}: {cause}") from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = (
            tokenizer.eos_token or tokenizer.unk_token or tokenizer.convert_ids_to_tokens(0)
        )
    return tokenizer


def _check_folder(folder: Path) -> None:
    if not any((folder / file).is_file() for file in _FILES):
        found = ", ".join(sorted(entry.name for entry in folder.iterdir())) or "nothing"
        raise ModelNotFoundError(
            f"no tokenizer in {folder}: looked for {', '.join(_FILES)}, found {found}; "
            "copy the model's tokenizer files there"
        )
