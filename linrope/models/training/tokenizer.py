"""Loads tokenizers of transformers."""

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

from linrope.common.optional import need


def load_tokenizer(name: str | os.PathLike[str]) -> Any:
    """Loads a tokenizer of transformers from a folder or by name.

    A name is first looked up in the local cache, so that nothing waits for an absent network. Code that comes
    with a tokenizer is not run.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        OSError, ValueError: there is no such tokenizer.
    """
    load = need("transformers", "linrope[huggingface]").AutoTokenizer.from_pretrained
    options: dict[str, Any] = {"trust_remote_code": False}
    if Path(name).is_dir():
        return load(str(name), **options)
    try:
        return load(str(name), local_files_only=True, **options)
    except (OSError, ValueError) as error:
        if not _hub_answers():
            raise OSError(
                f"tokenizer={str(name)!r}: there is no such folder, it is not in the cache of Hugging Face's "
                "hub, and the hub does not answer; expected a tokenizer's folder (as save_pretrained writes "
                "it), or no tokenizer (then tokens are bytes)"
            ) from error
    return load(str(name), **options)


def _hub_answers() -> bool:
    """True if the hub, or the proxy in front of it, accepts a connection."""
    hub = need("huggingface_hub", "linrope[huggingface]").constants
    if hub.HF_HUB_OFFLINE:
        return False
    end = urlsplit(hub.ENDPOINT)
    end = urlsplit(getproxies().get(end.scheme, hub.ENDPOINT))
    try:
        port = end.port or (80 if end.scheme == "http" else 443)
        socket.create_connection((end.hostname or "", port), timeout=5).close()
    except OSError:
        return False
    return True
