"""Reads texts as tokens and splits them into a training part and a held-out part."""

import io
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from linrope.common.files import parse_json
from linrope.common.optional import need

_HELD_OUT = 20  # holds out one byte in 20
_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True)
class Text:
    """Documents, one after another."""

    tokens: Tensor  # (n,) uint8 for bytes, int32 from a tokenizer
    starts: Tensor  # (documents,) int64: the first token of each document
    names: tuple[str, ...]
    size: int  # in bytes

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def bytes_per_token(self) -> float:
        return self.size / max(1, len(self))

    @property
    def longest(self) -> int:
        """The number of tokens in the longest document; 0 if there is none."""
        return int(self.sizes().max()) if len(self.starts) else 0

    def sizes(self) -> Tensor:
        """(documents,): the number of tokens in each document."""
        return torch.cat((self.starts, self.starts.new_tensor([len(self)]))).diff()

    def place(self, token: int) -> str:
        """Names the document of a token and the token's place in it."""
        document = int(torch.searchsorted(self.starts, token, right=True)) - 1
        return f"{self.names[document]}, token {token - int(self.starts[document])}"


@dataclass(frozen=True)
class Corpus:
    """Documents as tokens, with a twentieth of their bytes held out.

    Whole documents are held out, in the order of a digest of their names, until they have a twentieth of all
    bytes. Documents that would exceed a tenth are passed over; if all do, the smallest one is held out. A
    corpus of one document is cut in two.

    Without a tokenizer the tokens are bytes, and each document ends with a newline, unless the corpus is a single text
    file or was read as bytes. With a tokenizer, each document ends with the end-of-sequence token if the tokenizer has
    it.

    >>> from linrope.models.training import Corpus
    >>> corpus = Corpus.from_texts(["to be", "or not", "to be"])
    >>> len(corpus.train.names), len(corpus.held_out.names), len(corpus.train)
    (2, 1, 13)
    """

    train: Text
    held_out: Text
    name: str
    # The arguments of load, for the metadata of checkpoints: "corpus" (empty: Python's standard library), "held_out"
    # and "binary"; None: documents in memory
    source: dict[str, str] | None = None
    tokenizer: Any = None
    skipped: tuple[str, ...] = ()  # files that are not text
    end: bytes = b""  # stands after each document, but in no file
    checksum: int = field(init=False)

    def __post_init__(self) -> None:
        checksum = 0
        for part in (self.train, self.held_out):
            for tensor in (part.tokens, part.starts):
                checksum = zlib.crc32(tensor.numpy().data, checksum)
        object.__setattr__(self, "checksum", checksum)

    def __repr__(self) -> str:
        return f"Corpus({self.describe()})"

    @property
    def vocab_size(self) -> int:
        return 256 if self.tokenizer is None else len(self.tokenizer)

    def all(self) -> Text:
        """Both parts as one text, in which a document that was cut in two is whole again."""
        first, second = self.train, self.held_out
        was_cut = "held_out" not in (self.source or {})
        if was_cut and len(first.names) == 1 and first.names == second.names:
            end = len(self.end) if self.tokenizer is None else int(self.tokenizer.eos_token_id is not None)
            tokens = torch.cat((first.tokens[: len(first) - end], second.tokens))
            return Text(tokens, first.starts, first.names, first.size - len(self.end) + second.size)
        starts = torch.cat((first.starts, second.starts + len(first)))
        tokens, names = torch.cat((first.tokens, second.tokens)), first.names + second.names
        return Text(tokens, starts, names, first.size + second.size)

    def count(self, tokens: int) -> str:
        """A number of tokens with its unit, which is bytes if there is no tokenizer.

        >>> from linrope.models.training import Corpus
        >>> Corpus.from_texts(["to be", "or not"]).count(1)
        '1 byte'
        """
        return f"{tokens:,} {'byte' if self.tokenizer is None else 'token'}{'' if tokens == 1 else 's'}"

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str] | None = None,
        tokenizer: Any = None,
        *,
        held_out: str | os.PathLike[str] | None = None,
        binary: bool = False,
        for_training: bool = True,
    ) -> "Corpus":
        """Reads documents; default: the files of Python's standard library.

        Args:
            path: a UTF-8 text file; a .jsonl file (one document per line, under the key "text"); a folder, in
                which each text file is a document; or a dataset that ``datasets`` saved to disk (column
                "text").
            tokenizer: a tokenizer of transformers; default: bytes.
            held_out: another such path, all of which is held out; default: a twentieth of ``path``.
            binary: whether a file is a document whatever it holds, and its bytes the tokens.
            for_training: whether a text whose parts are too short to train on is an error. False: they may be empty.

        Raises:
            FileNotFoundError: there is no such path.
            ValueError: the text is not UTF-8, not JSON, or too short, or binary is combined with a tokenizer.
            ModuleNotFoundError: the path is a saved dataset, and datasets is not installed.
        """
        if binary and tokenizer is not None:
            raise ValueError("binary=True: got a tokenizer, expected None: the tokens are the bytes")
        standard_library = path is None
        name = "Python's standard library" if standard_library else str(path)
        roots = [Path(sysconfig.get_paths()["stdlib"] if path is None else path)]
        source = {"corpus": "" if standard_library else str(roots[0].absolute())}
        if held_out is not None:
            roots.append(Path(held_out))
            source["held_out"] = str(roots[1].absolute())
        if binary:
            source["binary"] = "true"
        skipped: list[str] = []
        pattern = "*.py" if standard_library else "*"
        parts = [list(_documents(root, pattern, skipped, binary)) for root in roots]
        if not parts[0] and skipped:
            raise ValueError(
                f"{name}: got no text; skipped, as not UTF-8: {_first_five(skipped)}; expected text, or binary=True"
            )
        # A text file alone is one document: none follows it.
        single = all(root.is_file() and root.suffix not in _JSON_LINES for root in roots)
        end = b"" if single or binary else b"\n"
        corpus = _corpus(parts, end, name, source, tokenizer)
        if for_training:
            _check_parts(corpus)
        return replace(corpus, skipped=tuple(skipped))

    @classmethod
    def load_source(
        cls, source: Mapping[str, str], tokenizer: Any = None, *, for_training: bool = True
    ) -> "Corpus":
        """Reads again what ``load`` read: ``source``, or the metadata of a checkpoint, which has the same keys."""
        return cls.load(
            source["corpus"] or None,
            tokenizer,
            held_out=source.get("held_out"),
            binary="binary" in source,
            for_training=for_training,
        )

    def describe(self) -> str:
        """One line: the sizes of both parts, and the files that are not text."""
        text = f"{self.name}: {_bytes(self.train.size)} to train on, {_bytes(self.held_out.size)} held out"
        return text + (f"; skipped, as not UTF-8 text: {_first_five(self.skipped)}" if self.skipped else "")

    @classmethod
    def from_texts(cls, texts: Iterable[str], name: str = "texts", tokenizer: Any = None) -> "Corpus":
        """Takes one string per document, such as a column of a dataset.

        Raises:
            TypeError: texts is a single string, or one of them is not a string.
            ValueError: there is too little text.
        """
        if isinstance(texts, str | Mapping):
            raise TypeError(
                f"texts: got a {type(texts).__name__}, expected one string per document: [text] for a single document"
            )
        documents = []
        for index, text in enumerate(texts):
            if not isinstance(text, str):
                raise TypeError(
                    f"texts: document {index} is of type {type(text).__name__}, expected str; Corpus.from_bytes takes "
                    "bytes and tensors"
                )
            documents.append((f"{name} {index}", text.encode()))
        return _in_memory(documents, b"\n", name, tokenizer)

    @classmethod
    def from_bytes(cls, documents: Iterable[Any], name: str = "documents") -> "Corpus":
        """Takes one document after another as bytes, or as one-dimensional tensors or arrays of uint8.

        Raises:
            TypeError: documents is a single one, or one of them is neither.
            ValueError: there are too few bytes.

        >>> from linrope.models.training import Corpus
        >>> Corpus.from_bytes(torch.randint(256, (3, 100), dtype=torch.uint8))
        Corpus(documents: 200 bytes to train on, 100 bytes held out)
        """
        one = isinstance(documents, str | bytes | bytearray | memoryview | io.IOBase)
        if one or getattr(documents, "ndim", 2) < 2:
            raise TypeError(
                f"documents: got one of type {type(documents).__name__}, expected one per document: [document] for a "
                "single document"
            )
        named = [(f"{name} {index}", _as_bytes(index, document)) for index, document in enumerate(documents)]
        return _in_memory(named, b"", name, None)


def _documents(root: Path, pattern: str, skipped: list[str], binary: bool) -> Iterator[tuple[str, bytes]]:
    """The name and text of each document that is not empty; appends files that are not text to skipped."""
    if not root.exists():
        raise FileNotFoundError(f"{root}: no such file or folder")
    endings = () if binary else _JSON_LINES
    if root.is_file():
        text = _read(root, binary)
        if text is None:
            raise ValueError(f"{root}: expected UTF-8 text, or binary=True to train on its bytes")
        yield from _lines(root.name, text) if root.suffix in endings else [(root.name, text)]
    elif (root / "dataset_info.json").is_file() or (root / "dataset_dict.json").is_file():
        dataset = need("datasets", "datasets").load_from_disk(str(root))
        dataset = dataset.get("train") if isinstance(dataset, dict) else dataset
        if dataset is None or "text" not in dataset.column_names:
            raise ValueError(f"{root}: expected a dataset, or a split 'train', with a column 'text'")
        yield from ((f"row {index}", row.encode()) for index, row in enumerate(dataset["text"]) if row)
    else:
        for file in sorted(root.rglob(pattern)):
            path = file.relative_to(root)
            installed = {"site-packages", "dist-packages", "__pycache__"} & set(path.parts)
            if installed or any(part.startswith(".") for part in path.parts) or not file.is_file():
                continue
            name, text = path.as_posix(), _read(file, binary)
            if text is None:
                skipped.append(name)
            elif text:
                yield from _lines(name, text) if file.suffix in endings else [(name, text)]


def _read(file: Path, binary: bool) -> bytes | None:
    """The bytes of the file if they are UTF-8 text or may be anything, else None."""
    text = file.read_bytes()
    if binary:
        return text
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


def _as_bytes(index: int, document: Any) -> bytes:
    if isinstance(document, bytes | bytearray | memoryview):
        return bytes(document)
    array = np.asarray(document)
    if array.dtype != np.uint8 or array.ndim != 1:
        raise TypeError(
            f"documents: document {index} is a {type(document).__name__} of {array.dtype} and shape {array.shape}, "
            "expected bytes, or one dimension of uint8; Corpus.from_texts takes strings"
        )
    return array.tobytes()


def _in_memory(documents: list[tuple[str, bytes]], end: bytes, name: str, tokenizer: Any) -> Corpus:
    corpus = _corpus([documents], end, name, None, tokenizer)
    _check_parts(corpus)
    return corpus


def _corpus(
    parts: list[list[tuple[str, bytes]]], end: bytes, name: str, source: dict[str, str] | None, tokenizer: Any
) -> Corpus:
    """The documents to train on and those held out; of a single part a twentieth is held out."""
    parts = _split(parts[0]) if len(parts) == 1 else parts
    train, held_out = (_tokenize([(x, text + end) for x, text in part], end, tokenizer) for part in parts)
    return Corpus(train, held_out, name, source, tokenizer, end=end)


def _split(documents: list[tuple[str, bytes]]) -> list[list[tuple[str, bytes]]]:
    if len(documents) == 1:
        ((only, text),) = documents
        cut = len(text) - len(text) // _HELD_OUT
        while cut < len(text) and text[cut] & 0xC0 == 0x80:  # moves out of a multi-byte character
            cut += 1
        return [[(only, text[:cut])], [(only, text[cut:])]]
    indices = _held_out(documents)
    return [
        [document for index, document in enumerate(documents) if (index in indices) == held_out]
        for held_out in (False, True)
    ]


def _check_parts(corpus: Corpus) -> None:
    """Raises ValueError if the text is too short to train on one part and to measure the loss on the other."""
    train, held_out = corpus.train, corpus.held_out
    if not train.size + held_out.size:
        raise ValueError(f"{corpus.name}: got no text, expected some to train on and some to hold out")
    if len(train) < 2 or len(held_out) < 2:
        raise ValueError(
            f"{corpus.name}: got {corpus.count(len(train))} to train on and {len(held_out)} held out; expected at "
            "least 2 of each: a longer text"
        )


def _held_out(documents: list[tuple[str, bytes]]) -> set[int]:
    """The indices of the documents to hold out; see Corpus."""
    sizes = [len(text) for _, text in documents]
    wanted, held, indices = sum(sizes) / _HELD_OUT, 0, set()
    for index in sorted(range(len(documents)), key=lambda i: zlib.crc32(documents[i][0].encode())):
        if held >= wanted:
            break
        if held + sizes[index] <= 2 * wanted:
            indices.add(index)
            held += sizes[index]
    return indices or {min(range(len(sizes)), key=sizes.__getitem__, default=0)}


def _first_five(names: Sequence[str]) -> str:
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
