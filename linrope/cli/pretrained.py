"""Folders with a model in Hugging Face format, as ``linrope convert`` reads and writes them."""

from pathlib import Path
from typing import Any

import torch
from torch import nn

from linrope import backends
from linrope.backends import native
from linrope.common.files import parse_json
from linrope.common.optional import need
from linrope.integrations.transformers import Enabled, enable
from linrope.integrations.transformers.families import families_of, say_once
from linrope.models.training.tokenizer import load_tokenizer

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "vocab.txt")


def is_pretrained(folder: Path) -> bool:
    """True if config.json names a type of transformers' models; linrope's own language models have none."""
    path = folder / "config.json"
    values = parse_json(path.read_bytes(), str(path)) if path.is_file() else None
    return isinstance(values, dict) and "model_type" in values


def load_pretrained(folder: Path) -> Any:
    """Loads a causal language model in float32. Nothing is downloaded, and no code in the folder is run.

    Raises:
        FileNotFoundError, ValueError: a file is missing or damaged, weights are missing, or transformers and
            linrope do not have such a model.
        ModuleNotFoundError: transformers is not installed.
    """
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(f"{folder / 'config.json'}: no such file")
    transformers = need("transformers", "linrope[huggingface]")
    import linrope.models.huggingface  # noqa: F401 - registers linrope's models

    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # its warnings are errors below
    try:
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            dtype=torch.float32,
            output_loading_info=True,
        )
    except (OSError, ImportError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # transformers has many kinds of errors for files that do not fit
        cause = str(error)
        if "trust_remote_code" in cause:
            cause = (
                "the model brings code of its own, which linrope does not run; expected a model type that "
                "transformers or linrope has"
            )
        raise ValueError(f"{folder}: {cause}") from error
    if info["missing_keys"]:
        raise ValueError(f"{folder}: the weights {sorted(info['missing_keys'])[:3]} are missing")
    return model


def tokenizer_beside(folder: Path, vocab_size: int) -> Any:
    """The tokenizer in the folder, or in its folder tokenizer; None: tokens are bytes.

    Raises:
        ValueError: there is none and the model's tokens are not bytes, or it has more tokens than the model.
    """
    folders = (folder, folder / "tokenizer")
    tokenizer_folder = next((x for x in folders if any((x / name).is_file() for name in _TOKENIZERS)), None)
    if tokenizer_folder is not None:
        tokenizer = load_tokenizer(tokenizer_folder)
        if len(tokenizer) > vocab_size:
            raise ValueError(f"{folder}: the tokenizer has {len(tokenizer)} tokens, the model {vocab_size}")
        return tokenizer
    if vocab_size != 256:
        raise ValueError(f"{folder}: has no tokenizer; expected one, or vocab_size=256 for bytes")
    return None


def on_linrope(model: nn.Module, device: torch.device) -> Enabled:
    """Has transformers' layers of this model compute with linrope inside a with block, on a CPU with the C++ kernels.

    Not on a GPU, where transformers' models have never run on linrope's kernels. If this version of transformers has
    functions that linrope does not know, its own code runs, and the log says so.
    """
    families = families_of(model) if device.type == "cpu" else []
    if families and (reason := native.why_not()) is not None:
        backends.warn_of_missing("native", reason)
        families = []
    try:
        return enable(*families) if families else Enabled(())
    except RuntimeError as error:
        say_once(type(model).__name__, str(error))
        return Enabled(())
