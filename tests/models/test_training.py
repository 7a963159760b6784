import copy
import math
import re
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from linrope.backends import native
from linrope.common.files import load_tensors, save_tensors
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, Trainer, TrainingConfig, checkpoints, latest_checkpoint
from linrope.models.training.checkpoint import checkpoint_name

TINY = LanguageModelConfig(embed_dim=32, num_layers=1, num_heads=2)
SHORT = TrainingConfig(steps=12, batch_size=2, sequence_length=32, warmup_steps=2)


@pytest.fixture
def corpus() -> Corpus:
    """Documents of several lengths."""
    return Corpus.from_texts([f"text {i}: the quick brown fox jumps. " * (1 + i % 9) for i in range(80)])


@pytest.fixture
def trainer(text: Path) -> Trainer:
    torch.manual_seed(0)
    return Trainer(LanguageModel(TINY), Corpus.load(text), SHORT)


def _bits(trainer: Trainer) -> list[torch.Tensor]:
    """Weights, buffers and the optimizer's state."""
    state = trainer.optimizer.state
    optimizer = [state[p][key] for p in trainer.model.parameters() for key in sorted(state[p])]
    return [*trainer.model.state_dict().values(), *optimizer]


def test_training_learns(trainer: Trainer) -> None:
    before = trainer.evaluate()
    trainer.config = TrainingConfig(steps=60, batch_size=8, sequence_length=64, learning_rate=1e-2)
    for _ in range(60):
        trainer.train_step()
    assert trainer.evaluate() < before - 2


@pytest.mark.parametrize("cut", [1, 5, 11])
def test_a_resumed_run_ends_with_the_same_bits(trainer: Trainer, cut: int, tmp_path: Path) -> None:
    losses = []
    for _ in range(12):
        if trainer.step == cut:
            trainer.save(tmp_path / "run")
        losses.append(trainer.train_step())
    torch.manual_seed(123)  # whatever happened in between
    resumed = Trainer.load(tmp_path / "run", trainer.corpus)
    assert resumed.step == cut
    assert resumed.config == trainer.config
    assert [resumed.train_step() for _ in range(12 - cut)] == losses[cut:]
    assert all(torch.equal(a, b) for a, b in zip(_bits(trainer), _bits(resumed), strict=True))


@pytest.mark.parametrize(("attention", "positions"), [("softmax", "transformer-xl"), ("linear", "learned")])
def test_other_models_resume_with_the_same_bits_too(
    attention: str, positions: str, text: Path, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model = LanguageModel(replace(TINY, attention=attention, positions=positions))
    trainer = Trainer(model, Corpus.load(text), SHORT)
    trainer.train_step()
    trainer.save(tmp_path / "run")
    resumed = Trainer.load(tmp_path / "run", trainer.corpus)
    for each in (trainer, resumed):
        each.train_step()
    assert all(torch.equal(a, b) for a, b in zip(_bits(trainer), _bits(resumed), strict=True))


def test_other_text_is_refused_on_resume(trainer: Trainer, text: Path, tmp_path: Path) -> None:
    trainer.train_step()
    trainer.save(tmp_path / "run")
    (text / "new.txt").write_text("one more")
    with pytest.raises(ValueError, match="was trained on another text"):
        Trainer.load(tmp_path / "run", Corpus.load(text))


def test_the_last_two_checkpoints_are_kept_and_a_half_written_one_is_never_seen(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(3):
        trainer.train_step()
        trainer.save(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("linrope.models.training.trainer.save_training", fail)
    trainer.train_step()
    with pytest.raises(OSError, match="disk full"):
        trainer.save(tmp_path)
    assert latest_checkpoint(tmp_path).name == "step-00000003"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_only_what_a_run_wrote_is_removed_or_counts_as_its_checkpoint(
    trainer: Trainer, tmp_path: Path
) -> None:
    """step-00000099 has the name of a checkpoint, but this run did not write it."""
    run = tmp_path / "run"
    for name in ("step-00000001-best", "step-notes", ".step-x", "step-00000099", ".step-00000001.tmp"):
        (run / name).mkdir(parents=True)
    (run / ".step-00000001.replaced").symlink_to(tmp_path)
    before = {path.name for path in run.iterdir()}
    unfinished = [run / f".step-00000001.0123abcd{end}" for end in ("", ".replaced")]
    for path in unfinished:
        path.mkdir()
    for _ in range(3):
        trainer.train_step()
        assert trainer.save(run).is_dir()
    assert latest_checkpoint(run).stat().st_mode == (run / "step-notes").stat().st_mode  # the umask's
    assert {path.name for path in run.iterdir()} == before | {"step-00000002", "step-00000003"}
    (run / "step-00000099").rmdir()
    assert latest_checkpoint(run).name == "step-00000003"
    resumed = Trainer.load(run, trainer.corpus)
    resumed.train_step()
    resumed.save(run)
    assert [path.name for path in checkpoints(run)] == ["step-00000003", "step-00000004"]


def test_checkpoints_are_in_the_order_of_steps(tmp_path: Path) -> None:
    for step in (99_999_999, 100_000_000, 7):
        (tmp_path / checkpoint_name(step)).mkdir()
    for name in ("step-000000100", "step-0000007", "step-0000000a"):
        (tmp_path / name).mkdir()
    assert [int(path.name[5:]) for path in checkpoints(tmp_path)] == [7, 99_999_999, 100_000_000]


def test_two_processes_do_not_save_into_one_folder(trainer: Trainer, tmp_path: Path) -> None:
    fcntl = pytest.importorskip("fcntl")
    with open(tmp_path / ".lock", "w") as other:  # a lock is of the file that was opened, also in one process
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError, match="another process writes into this folder"):
            trainer.save(tmp_path)
    assert trainer.save(tmp_path).is_dir()


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda tensors, metadata: tensors.pop("random_state"), "random_state"),
        (lambda tensors, metadata: tensors.pop("exp_avg.norm.weight"), "exp_avg.norm.weight"),
        (
            lambda tensors, metadata: tensors.update({"exp_avg.norm.weight": torch.zeros(3)}),
            r"got shape \(3,\), expected \(",
        ),
        (lambda tensors, metadata: tensors.update(extra=torch.zeros(1)), "extra"),
        (lambda tensors, metadata: tensors.update(random_state=torch.zeros(3)), "ByteTensor"),
        (lambda tensors, metadata: metadata.pop("step"), "step"),
        (lambda tensors, metadata: metadata.update(config='{"stepz": 1}'), "stepz"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_changes_nothing(
    damage: object, cause: str, trainer: Trainer, tmp_path: Path
) -> None:
    trainer.train_step()
    path = trainer.save(tmp_path) / "training.safetensors"
    tensors, metadata = load_tensors(path, "linrope.Training", 1)
    damage(tensors, metadata)  # type: ignore[operator]
    save_tensors(path, tensors, metadata)
    random_state = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"training.safetensors: not the state of a run: .*{cause}"):
        Trainer.load(tmp_path, trainer.corpus)
    assert torch.equal(torch.get_rng_state(), random_state)


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        ({"processes": "2"}, r"processes: got 1 groups .*, expected 2, as in the saved run"),
        ({"mixed_precision": "bf16"}, r"mixed_precision='no': expected 'bf16', as in the saved run"),
    ],
    ids=str,
)
def test_a_run_on_other_processes_or_in_another_precision_is_refused(
    change: dict[str, str], cause: str, trainer: Trainer, tmp_path: Path
) -> None:
    path = trainer.save(tmp_path) / "training.safetensors"
    tensors, metadata = load_tensors(path, "linrope.Training", 1)
    save_tensors(path, tensors, metadata | change)
    with pytest.raises(ValueError, match=f"^{cause}"):
        Trainer.load(tmp_path, trainer.corpus)


def test_a_checkpoint_of_the_same_step_is_replaced_whole(trainer: Trainer, tmp_path: Path) -> None:
    paths = [trainer.save(tmp_path) for _ in range(2)]
    assert paths[0] == paths[1]
    assert [path.name for path in tmp_path.iterdir() if path.name != "text"] == ["step-00000000"]
    assert Trainer.load(tmp_path, trainer.corpus).step == 0


def test_a_checkpoint_whose_replacement_fails_or_is_killed_half_way_comes_back(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, rename = tmp_path / "run", Path.rename
    saved = trainer.save(run)

    def fail(path: Path, target: Path) -> Path:
        if target == saved and not path.name.endswith(".replaced"):
            raise OSError("disk full")
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", fail)
        with pytest.raises(OSError, match="disk full"):
            trainer.save(run)
    assert [path.name for path in run.iterdir()] == ["step-00000000"]
    assert Trainer.load(run, trainer.corpus).step == 0

    saved.rename(run / ".step-00000000.0123abcd.replaced")  # what a kill between the two renames leaves
    trainer.train_step()
    trainer.save(run)
    assert [path.name for path in checkpoints(run)] == ["step-00000000", "step-00000001"]


def test_a_loss_that_is_not_finite_stops_before_the_update(trainer: Trainer) -> None:
    text = trainer.corpus.train
    trainer.train_step()
    row, column = 1, 20
    bad = int(trainer.batch().starts[row]) + column
    text.tokens[bad] = 7  # a byte that occurs nowhere else
    trainer.model.embed.register_forward_hook(
        lambda _, tokens, x: x.masked_fill((tokens[0] == 7)[..., None], torch.inf)
    )
    before = [x.clone() for x in _bits(trainer)]
    # "native" keeps it to that token and later ones, "eager" to its chunk, which is this whole row.
    found = text.place(bad if native.why_not() is None else bad - column)
    with pytest.raises(RuntimeError, match=rf"loss nan, .* at step 1, first at {re.escape(found)}: "):
        trainer.train_step()
    assert trainer.step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, _bits(trainer), strict=True))


def test_a_gradient_that_is_not_finite_names_the_rows(trainer: Trainer) -> None:
    trainer.model.norm.weight.register_hook(lambda grad: grad * torch.nan)
    rows = "; ".join(trainer.corpus.train.place(start) for start in trainer.batch().starts.tolist())
    with pytest.raises(RuntimeError, match=rf"gradient norm nan at step 0, in rows from {re.escape(rows)}: "):
        trainer.train_step()
    assert all(bool(p.isfinite().all()) for p in trainer.model.parameters())


@pytest.mark.parametrize(
    ("attention", "positions"), [("linear", "rope"), ("softmax", "rope"), ("linear", "sinusoidal")]
)
def test_the_loss_is_that_of_each_part_of_a_document_alone(
    attention: str, positions: str, corpus: Corpus
) -> None:
    torch.manual_seed(0)
    model = LanguageModel(replace(TINY, attention=attention, positions=positions))
    trainer = Trainer(model, corpus, replace(SHORT, batch_size=3, sequence_length=300))
    part, starts, losses = trainer.corpus.train, trainer.batch().starts.tolist(), []
    begins = set(part.starts.tolist())
    for start in starts:
        cuts = [start, *(i for i in range(start + 1, start + 300) if i in begins), start + 300]
        assert len(cuts) > 2
        for a, b in pairwise(cuts):
            tokens = part.tokens[a : b + (b not in begins)].long().to(model.embed.weight.device)
            with torch.no_grad():
                logits = model(tokens[None, :-1])[0][0].double()
            losses.append(-logits.log_softmax(-1).gather(1, tokens[1:, None])[:, 0])
    expected = float(torch.cat(losses).mean()) / math.log(2)
    assert trainer.train_step()["bits_per_byte"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 2, "accumulation": 2},
        {"pieces": 3, "gradients_through_pieces": True},
        {"pieces": 7, "gradients_through_pieces": True},
        {"pieces": 3, "gradients_through_pieces": True, "batch_size": 2, "accumulation": 2},
    ],
    ids=str,
)
def test_the_same_rows_cut_otherwise_give_the_same_gradients(change: dict[str, Any], corpus: Corpus) -> None:
    _compare_gradients(replace(TINY, decay="retnet"), change, corpus)


@pytest.mark.parametrize("feature_map", ["elu+1", "exp"])
def test_gates_steps_convolution_and_log_scale_pass_from_piece_to_piece(
    feature_map: str, corpus: Corpus
) -> None:
    more = {"forget_gate": {"longest": 64}, "short_conv": 4, "qk_norm": True, "rotary": "selective"}
    model = replace(TINY, feature_map=feature_map, **more)
    _compare_gradients(model, {"pieces": 7, "gradients_through_pieces": True}, corpus)


def _compare_gradients(model: LanguageModelConfig, change: dict[str, Any], corpus: Corpus) -> None:
    gradients = []
    for options in ({}, change):
        torch.manual_seed(0)
        config = replace(SHORT, **({"batch_size": 4, "sequence_length": 300} | options), clip=1e9)
        trainer = Trainer(LanguageModel(model), corpus, config)
        trainer.train_step()
        gradients.append([p.grad for p in trainer.model.parameters()])
    for whole, cut in zip(*gradients, strict=True):
        torch.testing.assert_close(cut, whole, rtol=1e-4, atol=1e-6)


def test_detached_pieces_have_the_same_loss_and_other_gradients(tmp_path: Path) -> None:
    """As a loop over the pieces of one row has it, which carries and detaches the states itself."""
    (tmp_path / "text").write_text("a rose is a rose is a rose. " * 200)
    corpus = Corpus.load(tmp_path / "text")
    config = replace(SHORT, batch_size=1, sequence_length=200, clip=1e9)
    torch.manual_seed(0)
    model = LanguageModel(TINY)
    own, states = copy.deepcopy(model), None
    trainer = Trainer(model, corpus, replace(config, pieces=4))
    batch = trainer.batch()
    for piece in range(0, 200, 50):
        logits, states = own(batch.tokens[:, piece : piece + 50], states)
        loss = F.cross_entropy(logits[0], batch.targets[0, piece : piece + 50], reduction="sum") / 200
        loss.backward()
        states = [state.detach() for state in states]
    whole = Trainer(copy.deepcopy(model), corpus, config)
    values, uncut = trainer.train_step(), whole.train_step()
    assert values["bits_per_byte"] == pytest.approx(uncut["bits_per_byte"], rel=1e-6)
    assert values["gradient_norm"] != pytest.approx(uncut["gradient_norm"], rel=1e-3)
    for mine, expected in zip(model.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, expected.grad, rtol=1e-4, atol=1e-6)


def test_what_the_trainer_cannot_do_is_refused(text: Path) -> None:
    corpus = Corpus.load(text)
    softmax = LanguageModel(replace(TINY, attention="softmax"))
    with pytest.raises(ValueError, match="pieces=2: packed softmax attention"):
        Trainer(softmax, corpus, replace(SHORT, pieces=2))
    with pytest.raises(ValueError, match="vocab_size=100: expected at least the corpus's, 256"):
        Trainer(LanguageModel(replace(TINY, vocab_size=100)), corpus, SHORT)
    with pytest.raises(ValueError, match="mixed_precision='fp16'"):
        Trainer(LanguageModel(TINY), corpus, SHORT, SimpleNamespace(mixed_precision="fp16"))


def test_without_accelerate_its_extra_is_named(text: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModuleNotFoundError, match=r"accelerate is missing; install linrope\[train\]"):
        Trainer(LanguageModel(TINY), Corpus.load(text), SHORT)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"learning_rate": float("nan")}, "learning_rate=nan"),
        ({"seed": -1}, "seed=-1"),
    ],
)
def test_impossible_values_are_refused(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TrainingConfig(**values)  # type: ignore[arg-type]


def test_a_sequence_longer_than_the_text_is_refused(text: Path) -> None:
    with pytest.raises(ValueError, match="sequence_length=1000000: expected less than the training text"):
        Trainer(LanguageModel(TINY), Corpus.load(text), TrainingConfig(sequence_length=1_000_000))
