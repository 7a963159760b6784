"""What is read, how it is cut into rows, and that rows are a function of (seed, number)."""

import io
import json
import sys
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from linrope.models.training import Corpus, Text
from linrope.models.training.batch import NO_TARGET, Batch, evenly_spaced_rows, row_starts
from linrope.models.training.tokenizer import load_tokenizer


def documents(part: Text) -> list[bytes]:
    ends = [*part.starts[1:].tolist(), len(part)]
    return [bytes(part.tokens[a:b].tolist()) for a, b in zip(part.starts.tolist(), ends, strict=True)]


def test_files_lie_in_one_part_only_and_the_split_is_stable(text: Path) -> None:
    corpus = Corpus.load(text)
    parts = [documents(part) for part in (corpus.train, corpus.held_out)]
    files = {path.name: path.read_bytes() + b"\n" for path in text.iterdir()}
    assert [files[name] for name in corpus.train.names] == parts[0]
    assert sorted(parts[0] + parts[1]) == sorted(files.values())
    assert len(parts[1]) > 0
    assert Corpus.load(text).checksum == corpus.checksum
    assert documents(corpus.all()) == parts[0] + parts[1]


def test_the_path_of_a_corpus_holds_in_every_working_directory(text: Path, monkeypatch) -> None:
    monkeypatch.chdir(text.parent)
    corpus = Corpus.load(text.name)
    assert (corpus.name, corpus.source) == (text.name, {"corpus": str(text)})
    assert Corpus.from_texts(["ab", "cd"]).source is None


def test_a_single_file_holds_its_end_out_and_cuts_no_character(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("ä" * 510)
    corpus = Corpus.load(tmp_path / "a.txt")
    assert documents(corpus.train) == ["ä".encode() * 485]
    assert documents(corpus.held_out) == ["ä".encode() * 25]


def test_json_lines_are_documents(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {i}\nand more", "id": i}) for i in range(50)]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n\n")
    corpus = Corpus.load(tmp_path / "a.jsonl")
    assert sorted(documents(corpus.all())) == sorted(f"line {i}\nand more\n".encode() for i in range(50))
    assert corpus.all().names[0] == "a.jsonl, line 1"
    assert sorted(documents(Corpus.load(tmp_path).all())) == sorted(documents(corpus.all()))  # in a folder


@pytest.mark.parametrize(
    ("line", "cause"),
    [
        ("{", "a.jsonl, line 2: not readable as JSON"),
        ("[]", "a.jsonl, line 2: expected an object"),
        ('{"text": 3}', "under 'text'"),
    ],
)
def test_a_bad_line_is_named(line: str, cause: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(ValueError, match=cause):
        Corpus.load(tmp_path / "a.jsonl")


def test_a_saved_dataset_is_read(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = [f"row {i}" for i in range(50)]
    dataset = datasets.Dataset.from_dict({"text": texts})
    dataset.save_to_disk(tmp_path / "one")
    datasets.DatasetDict(train=dataset).save_to_disk(tmp_path / "several")
    for name in ("one", "several"):
        found = documents(Corpus.load(tmp_path / name).all())
        assert sorted(found) == sorted(f"{text}\n".encode() for text in texts)
    datasets.DatasetDict(test=dataset).save_to_disk(tmp_path / "test")
    with pytest.raises(ValueError, match="a split 'train'"):
        Corpus.load(tmp_path / "test")


def test_absent_packages_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "dataset_info.json").write_text("{}")
    for name in ("datasets", "transformers"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ModuleNotFoundError, match="datasets is missing; install datasets"):
        Corpus.load(tmp_path)
    with pytest.raises(ModuleNotFoundError, match=r"transformers is missing; install linrope\[huggingface\]"):
        load_tokenizer("gpt2")


def make_tokenizer(folder: Path) -> Any:
    """Words of a closed list, with an end token, as transformers loads it."""
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<end>", "<?>", "to", "be", "or", "not"]
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<?>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder)
    return load_tokenizer(folder)


def test_a_tokenizer_ends_documents_with_its_own_token(tmp_path: Path) -> None:
    corpus = Corpus.from_texts(["to be", "or not to be"] * 20, tokenizer=make_tokenizer(tmp_path))
    assert corpus.vocab_size == 6
    both = corpus.all()
    found = [part.tolist() for part in both.tokens.tensor_split(both.starts[1:])]
    assert sorted(found) == [[2, 3, 0]] * 20 + [[4, 5, 2, 3, 0]] * 20
    assert both.size == 20 * (len("to be\n") + len("or not to be\n"))  # the end counts as one byte
    assert both.bytes_per_token == both.size / len(both)


def test_what_is_not_text_is_skipped_in_folders_and_refused_alone(text: Path) -> None:
    checksum = Corpus.load(text).checksum
    (text / "image.bin").write_bytes(b"\xff\xfe\x00\x01")
    (text / ".hidden").write_text("no")
    assert Corpus.load(text).checksum == checksum
    with pytest.raises(ValueError, match=r"image.bin: expected UTF-8 text"):
        Corpus.load(text / "image.bin")


def test_other_boundaries_are_another_corpus() -> None:
    tokens = torch.zeros(9, dtype=torch.uint8, device="cpu")
    parts = [Text(tokens, torch.tensor([0, cut], device="cpu"), ("a", "b"), 9) for cut in (3, 4)]
    assert len({Corpus(part, part, "c").checksum for part in parts}) == 2


def test_an_absent_or_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        Corpus.load(tmp_path / "absent")
    for empty in (lambda: Corpus.load(tmp_path), lambda: Corpus.from_texts([])):
        with pytest.raises(ValueError, match="got no text, expected some to train on and some to hold out"):
            empty()


def test_a_text_that_is_too_short_to_train_on_says_what_its_parts_hold(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("tiny text")
    parts = "a.txt: got 9 bytes to train on and 0 held out; expected at least 2 of each"
    with pytest.raises(ValueError, match=parts):
        Corpus.load(tmp_path / "a.txt")
    assert documents(Corpus.load(tmp_path / "a.txt", for_training=False).all()) == [b"tiny text"]
    with pytest.raises(ValueError, match="texts: got 3 tokens to train on and 1 held out"):
        Corpus.from_texts(["to be"], tokenizer=make_tokenizer(tmp_path))


def test_a_document_that_was_cut_in_two_is_whole_in_all_of_the_text(tmp_path: Path) -> None:
    text, tokenizer = "to be or not " * 20, make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    for name, end in (("a.txt", b""), ("a.jsonl", b"\n")):
        both = Corpus.load(tmp_path / name).all()
        assert documents(both) == [text.encode() + end]
        assert both.size == len(both)
        both = Corpus.load(tmp_path / name, tokenizer).all()
        assert both.tokens.tolist() == [2, 3, 4, 5] * 20 + [0]
        assert both.size == len(text) + len(end)


def test_the_default_corpus_is_the_standard_library() -> None:
    corpus = Corpus.load()
    assert len(corpus.train) > 5_000_000
    assert len(corpus.train.names) > 500
    assert b"import" in bytes(corpus.train.tokens[:100_000].tolist())


def test_a_batch_is_the_text_and_no_target_crosses_a_document(text: Path) -> None:
    part = Corpus.load(text).train
    tokens, starts = part.tokens.tolist(), set(part.starts.tolist())
    at = torch.tensor([0, 150, 400], device="cpu")
    batch = Batch.read(part, at, 300)
    for row, start in enumerate(at.tolist()):
        places = range(start, start + 300)
        assert batch.tokens[row].tolist() == [tokens[i] for i in places]
        expected = [NO_TARGET if i + 1 in starts else tokens[i + 1] for i in places]
        assert batch.targets[row].tolist() == expected
        assert batch.begins[row].tolist() == [i in starts for i in places]
    for piece, start in zip(batch.cut(3), (0, 100, 200), strict=True):
        alone = Batch.read(part, at + start, 100)
        for name in ("tokens", "targets", "begins", "starts"):
            assert torch.equal(getattr(piece, name), getattr(alone, name))
    cu_seqlens, sequence = batch.sequences()
    begins = sorted({0, 300, 600} | {300 * r + c for r, c in batch.begins.nonzero().tolist()})
    assert cu_seqlens.tolist() == [*begins, 900]
    assert sequence.flatten().tolist() == [sum(b <= i for b in begins) - 1 for i in range(900)]


@pytest.mark.parametrize(("size", "length"), [(1000, 30), (61, 30), (60, 30), (31, 30), (59, 30), (2, 1)])
def test_an_epoch_visits_every_row_once(size: int, length: int) -> None:
    tokens = torch.zeros(size, dtype=torch.uint8, device="cpu")
    text = Text(tokens, torch.zeros(1, dtype=torch.int64, device="cpu"), ("a",), size)
    rows = (size - min(length, size - length)) // length
    epochs = row_starts(text, 0, 3 * rows, length, seed=5).view(3, rows).sort(1).values
    assert bool((epochs.diff(dim=1) == length).all())
    assert int(epochs.min()) >= 0
    assert int(epochs.max()) + length < size
    if size == 1000:
        assert len(set(epochs[:, 0].tolist())) > 1  # cut at other places
    both = torch.cat((row_starts(text, 0, 2, length, 5), row_starts(text, 2, 3, length, 5)))
    assert torch.equal(both, row_starts(text, 0, 5, length, 5))


def test_a_place_is_named(text: Path) -> None:
    part = Corpus.load(text).train
    assert part.place(int(part.starts[2]) + 7) == f"{part.names[2]}, token 7"
    assert part.place(len(part) - 1).startswith(part.names[-1])


@pytest.mark.parametrize(
    "sizes", [[100] * 200, [10] * 500 + [20_000], list(range(1, 400))], ids=["equal", "one large", "all"]
)
def test_a_twentieth_of_the_bytes_is_held_out(sizes: list[int]) -> None:
    corpus = Corpus.from_texts("x" * size for size in sizes)
    part = corpus.held_out.size / (corpus.train.size + corpus.held_out.size)
    assert 0.045 <= part <= 0.1
    again = Corpus.from_texts("x" * size for size in sizes)
    assert again.held_out.names == corpus.held_out.names


def test_of_a_few_large_documents_the_smallest_is_held_out_and_of_two_one() -> None:
    corpus = Corpus.from_texts(["x" * 300, "y" * 200, "z" * 400])
    assert documents(corpus.held_out) == [b"y" * 200 + b"\n"]
    assert corpus.describe() == "texts: 702 bytes to train on, 201 bytes held out"
    assert len(Corpus.from_texts(["ab", "cd"]).held_out.names) == 1


def test_a_tokenizer_s_name_without_a_network_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("create_connection", "getaddrinfo"):
        monkeypatch.setattr(f"socket.{name}", Mock(side_effect=OSError("no network")))
    start = time.monotonic()
    with pytest.raises(OSError, match=r"the hub does not answer; expected a tokenizer's folder"):
        load_tokenizer("some-owner/some-tokenizer")
    assert time.monotonic() - start < 20  # transformers by itself tries five times, for most of a minute


@pytest.mark.parametrize(
    ("size", "rows", "length"), [(1000, 5, 16), (1000, 64, 300), (33, 9, 16), (34, 2, 16)]
)
def test_spread_rows_begin_with_the_text_end_with_it_and_do_not_overlap(
    size: int, rows: int, length: int
) -> None:
    tokens = torch.zeros(size, dtype=torch.uint8, device="cpu")
    starts = evenly_spaced_rows(Text(tokens, tokens[:1].long(), ("a",), size), rows, length)
    assert len(starts) == min(rows, (size - 1) // length)
    assert (starts[0], starts[-1]) == (0, size - 1 - length)
    assert starts.diff().min() >= length
    assert starts.diff().max() - starts.diff().min() <= 1


DOCUMENTS = [bytes(range(256)) * 2, b"\xff\x00", b"", b"\n" * 40]


@pytest.mark.parametrize(
    "make",
    [
        bytearray,
        memoryview,
        lambda x: torch.tensor([*x], dtype=torch.uint8, device="cpu"),
        lambda x: np.frombuffer(x, np.uint8),
    ],
)
def test_bytes_in_memory_or_in_files_are_the_tokens(make, tmp_path: Path) -> None:
    expected = Corpus.from_bytes(DOCUMENTS)
    assert sorted(documents(expected.all())) == sorted(DOCUMENTS)
    assert expected.all().size == sum(map(len, DOCUMENTS))
    assert Corpus.from_bytes(make(x) for x in DOCUMENTS).checksum == expected.checksum
    for index, document in enumerate(DOCUMENTS):
        (tmp_path / f"{index}.jsonl").write_bytes(document)
    corpus = Corpus.load(tmp_path, binary=True)
    assert sorted(documents(corpus.all())) == sorted(filter(None, DOCUMENTS))
    assert Corpus.load_source(corpus.source).checksum == corpus.checksum
    with pytest.raises(ValueError, match="binary=True: got a tokenizer"):
        Corpus.load(tmp_path, object(), binary=True)


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (
            lambda: Corpus.from_texts("ACGT" * 1000),
            r"texts: got a str, expected one string per document: \[text\]",
        ),
        (
            lambda: Corpus.from_texts([b"ab"]),
            "texts: document 0 is of type bytes, expected str; Corpus.from_bytes",
        ),
        (lambda: Corpus.from_bytes(b"ab"), r"documents: got one of type bytes, .*: \[document\]"),
        (lambda: Corpus.from_bytes(np.zeros(9, np.uint8)), "documents: got one of type ndarray"),
        (
            lambda: Corpus.from_bytes(io.BytesIO(b"ab")),
            r"documents: got one of type BytesIO, .*: \[document\]",
        ),
        (lambda: Corpus.from_texts({"text": ["ab"]}), "texts: got a dict, expected one string per document"),
        (
            lambda: Corpus.from_bytes(["ab", "cd"]),
            "document 0 is a str of .* Corpus.from_texts takes strings",
        ),
        (
            lambda: Corpus.from_bytes([torch.zeros(3, device="cpu")]),
            r"document 0 is a Tensor of float32 and shape \(3,\)",
        ),
    ],
)
def test_a_lone_document_or_another_type_is_refused(call, cause: str) -> None:
    with pytest.raises(TypeError, match=cause):
        call()


def test_a_text_of_its_own_can_be_held_out(tmp_path: Path) -> None:
    for name in ("train", "test"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"all of {name}")
    corpus = Corpus.load(tmp_path / "train/a.txt", held_out=tmp_path / "test/a.txt")
    parts = [[b"all of train"], [b"all of test"]]
    assert [documents(corpus.train), documents(corpus.held_out)] == parts
    assert documents(corpus.all()) == [*parts[0], *parts[1]]  # of the same name, and not one document
    assert Corpus.load_source(corpus.source).checksum == corpus.checksum
    with pytest.raises(FileNotFoundError, match="absent: no such file"):
        Corpus.load(tmp_path / "train", held_out=tmp_path / "absent")
