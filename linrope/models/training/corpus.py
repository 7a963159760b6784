"""Texts as tokens: what to train on, and what is held out."""

import os
import socket
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import numpy as np
import torch
from torch import Tensor

from linrope.common.files import parse_json
from linrope.models.training.optional import need

_HELD_OUT = 20  # one byte in so many is for validation
_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Text:
    """Documents back to back."""

    tokens: Tensor  # (n,) uint8 bytes, or int32 of a tokenizer
    starts: Tensor  # (documents,) int64: the first token of each
    names: tuple[str, ...]
    size: int  # in bytes

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bytes_per_token(self) -> float:
        return self.size / max(1, len(self))

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.sizes().max())

    def sizes(self) -> Tensor:
        """(documents,) tokens of each."""
        return torch.cat((self.starts, self.starts.new_tensor([len(self)]))).diff()

    def place(self, token: int) -> str:
        """Where that token stands: the document, and how far in."""
        document = int(torch.searchsorted(self.starts, token, right=True)) - 1
        return f"{self.names[document]}, token {token - int(self.starts[document])}"


@dataclass(frozen=True)
class Corpus:
    """Documents as tokens, a twentieth of their bytes held out. Only a single one lies in both parts.

    Held out are whole documents, in the order of a digest of their names, until they have a twentieth of all
    bytes; none that has more than a tenth, unless all have: then the smallest.

    Without a tokenizer tokens are bytes. A document ends with a newline, with a tokenizer with its
    end-of-sequence token, where it has one.

    >>> from linrope.models.training import Corpus
    >>> corpus = Corpus.from_texts(["to be", "or not", "to be"])
    >>> len(corpus.train.names), len(corpus.held_out.names), len(corpus.train)
    (2, 1, 13)
    """

    train: Text
    held_out: Text
    name: str
    path: str = ""  # what was loaded; empty: Python's standard library
    tokenizer: Any = None
    skipped: tuple[str, ...] = ()  # files that are no text
    checksum: int = field(init=False)

    def __post_init__(self) -> None:
        checksum = 0
        for part in (self.train, self.held_out):
            for tensor in (part.tokens, part.starts):
                checksum = zlib.crc32(tensor.numpy().data, checksum)
        object.__setattr__(self, "checksum", checksum)

    @property
    def vocab_size(self) -> int:
        return 256 if self.tokenizer is None else len(self.tokenizer)

    def all(self) -> Text:
        """Both parts as one text."""
        first, second = self.train, self.held_out
        starts = torch.cat((first.starts, second.starts + len(first)))
        tokens, names = torch.cat((first.tokens, second.tokens)), first.names + second.names
        return Text(tokens, starts, names, first.size + second.size)

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None, tokenizer: Any = None) -> "Corpus":
        """Reads documents; default: the files of Python's standard library.

        Args:
            path: a UTF-8 text file; a .jsonl file (a document per line, under the key "text"); a folder,
                each text file of which is a document; a dataset that ``datasets`` saved to disk (column
                "text").
            tokenizer: of transformers.

        Raises:
            FileNotFoundError: no such path.
            ValueError: not UTF-8 text, not JSON, or too little of it.
            ModuleNotFoundError: the path is a saved dataset, and datasets is not installed.
        """
        standard_library = path is None
        root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
        if not root.exists():
            raise FileNotFoundError(f"{root}: no such file or folder")
        whole = root.is_file() and root.suffix not in _JSON_LINES  # one document, which no other follows
        skipped: list[str] = []
        documents = list(_documents(root, "*.py" if standard_library else "*", skipped))
        name = "Python's standard library" if standard_library else str(root)
        if not documents and skipped:
            raise ValueError(f"{name}: got no text; skipped, as not UTF-8: {_some(skipped)}")
        end, where = b"" if whole else b"\n", "" if path is None else str(path)
        return replace(_split(documents, end, name, where, tokenizer), skipped=tuple(skipped))

    def describe(self) -> str:
        """What there is, in a line: sizes, and the files that are no text."""
        text = f"{self.name}: {_bytes(self.train.size)} to train on, {_bytes(self.held_out.size)} held out"
        return text + (f"; skipped, as not UTF-8 text: {_some(self.skipped)}" if self.skipped else "")

    @classmethod
    def from_texts(cls, texts: Iterable[str], name: str = "texts", tokenizer: Any = None) -> "Corpus":
        """Takes strings, a document each, as a column of a dataset has them.

        Raises:
            ValueError: too little text.
        """
        documents = [(f"{name} {index}", text.encode()) for index, text in enumerate(texts)]
        return _split(documents, b"\n", name, name, tokenizer)


def load_tokenizer(name: str | os.PathLike[str]) -> Any:
    """A tokenizer of transformers, from a folder or by name.

    A name is looked for in the local cache first, so that without a network nothing is waited for. Code
    that comes with a tokenizer is not run.

    Raises:
        ModuleNotFoundError: transformers is not installed.
        OSError, ValueError: no such tokenizer.
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
                f"tokenizer={str(name)!r}: no such folder, not in the cache of Hugging Face's hub, which "
                "does not answer; expected a tokenizer's folder (save_pretrained writes one), or none: bytes"
            ) from error
    return load(str(name), **options)


def _hub_answers() -> bool:
    """Whether a connection to the hub, or to the proxy before it, opens."""
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


def _documents(root: Path, pattern: str, skipped: list[str]) -> Iterator[tuple[str, bytes]]:
    """Name and text of each document that is not empty; adds the files that are no text to skipped."""
    if root.is_file():
        text = _read(root)
        if text is None:
            raise ValueError(f"{root}: expected UTF-8 text")
        yield from _lines(root.name, text) if root.suffix in _JSON_LINES else [(root.name, text)]
    elif (root / "dataset_info.json").is_file() or (root / "dataset_dict.json").is_file():
        dataset = need("datasets", "datasets").load_from_disk(str(root))
        dataset = dataset.get("train") if isinstance(dataset, dict) else dataset
        if dataset is None or "text" not in dataset.column_names:
            raise ValueError(f"{root}: expected a dataset, or a split 'train', with a column 'text'")
        yield from ((f"row {index}", row.encode()) for index, row in enumerate(dataset["text"]) if row)
    else:
        for file in sorted(root.rglob(pattern)):
            inside = file.relative_to(root)
            foreign = {"site-packages", "dist-packages", "__pycache__"} & set(inside.parts)
            if foreign or any(part.startswith(".") for part in inside.parts) or not file.is_file():
                continue
            name, text = inside.as_posix(), _read(file)
            if text is None:
                skipped.append(name)
            elif text:
                yield from _lines(name, text) if file.suffix in _JSON_LINES else [(name, text)]


def _read(file: Path) -> bytes | None:
    """The file's bytes if they are UTF-8 text."""
    text = file.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    return None if b"\0" in text else text


def _lines(name: str, lines: bytes) -> Iterator[tuple[str, bytes]]:
    for number, line in enumerate(lines.split(b"\n"), 1):
        if not line.strip():
            continue
        value = parse_json(line, f"{name}, line {number}")
        text = value.get("text") if isinstance(value, dict) else None
        if not isinstance(text, str):
            raise ValueError(f"{name}, line {number}: expected an object with a string under 'text'")
        if text:
            yield f"{name}, line {number}", text.encode()


def _split(documents: list[tuple[str, bytes]], end: bytes, name: str, path: str, tokenizer: Any) -> Corpus:
    parts: tuple[list[tuple[str, bytes]], list[tuple[str, bytes]]] = [], []
    if len(documents) == 1:
        ((only, text),) = documents
        cut = len(text) - len(text) // _HELD_OUT
        while cut < len(text) and text[cut] & 0xC0 == 0x80:  # not inside a character
            cut += 1
        parts[0].append((only, text[:cut] + end))
        parts[1].append((only, text[cut:] + end))
    else:
        chosen = _held_out(documents)
        for index, (document, text) in enumerate(documents):
            parts[index in chosen].append((document, text + end))
    train, held_out = (_tokenize(part, end, tokenizer) for part in parts)
    if len(train) < 2 or len(held_out) < 2:
        size = sum(len(text) for _, text in documents)
        raise ValueError(f"{name}: got {size} bytes of text, expected enough to train on")
    return Corpus(train, held_out, name, path, tokenizer)


def _held_out(documents: list[tuple[str, bytes]]) -> set[int]:
    """Which documents are held out: in the order of a digest of their names, a twentieth of all bytes."""
    sizes = [len(text) for _, text in documents]
    wanted, held, found = sum(sizes) / _HELD_OUT, 0, set()
    for index in sorted(range(len(documents)), key=lambda i: zlib.crc32(documents[i][0].encode())):
        if held >= wanted:
            break
        if held + sizes[index] <= 2 * wanted:
            found.add(index)
            held += sizes[index]
    return found or {min(range(len(sizes)), key=sizes.__getitem__, default=0)}


def _some(names: Sequence[str]) -> str:
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return f"{', '.join(names[:5])}{rest}"


def _bytes(size: int) -> str:
    return (
        f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.1f} kB" if size >= 1e3 else f"{size} bytes"
    )


def _tokenize(documents: list[tuple[str, bytes]], end: bytes, tokenizer: Any) -> Text:
    rows: list[Any] = []
    for _, text in documents:
        if tokenizer is None:
            rows.append(np.frombuffer(text, dtype=np.uint8))
        else:
            ids = tokenizer.encode(text.removesuffix(end).decode(), add_special_tokens=False)
            last = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
            rows.append(np.array(ids + last, dtype=np.int32))
    kind = np.uint8 if tokenizer is None else np.int32
    tokens = np.concatenate([np.empty(0, kind), *rows])
    starts = np.cumsum([0, *(len(row) for row in rows)])[:-1].astype(np.int64)
    names = tuple(name for name, _ in documents)
    size = sum(len(text) for _, text in documents)
    return Text(torch.from_numpy(tokens), torch.from_numpy(starts), names, size)
