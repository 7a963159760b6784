import copy
import json
import math
import re
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.backends import native
from linrope.common.files import load_tensors, save_tensors
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, Trainer, TrainingConfig, checkpoints, latest_checkpoint
from linrope.models.training.checkpoint import checkpoint_name


def tiny(**options: Any) -> LanguageModelConfig:
    return LanguageModelConfig(**({"embed_dim": 32, "num_layers": 1, "num_heads": 2} | options))


TINY = tiny()
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


@pytest.mark.parametrize(
    ("cut", "options"),
    [(5, {}), (11, {"attention": "softmax"})],
    ids=str,
)
def test_a_resumed_run_ends_with_the_same_bits(cut: int, options: dict, text: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    trainer = Trainer(LanguageModel(tiny(**options)), Corpus.load(text), SHORT)
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


@pytest.mark.parametrize("place", [0, 5, "evaluation"])
def test_a_run_that_is_stopped_in_a_step_or_an_evaluation_ends_with_the_same_bits(
    place, corpus, tmp_path
) -> None:
    def trainer() -> Trainer:
        torch.manual_seed(0)
        return Trainer(LanguageModel(TINY), corpus, replace(SHORT, steps=4, pieces=3, accumulation=2))

    def stop(done: int, pieces: int) -> None:
        if place in ("evaluation", done):
            torch.rand(1)  # whatever the step draws before it is stopped
            raise KeyboardInterrupt

    run, undisturbed = trainer(), trainer()
    for _ in range(2):
        run.train_step()
    with pytest.raises(KeyboardInterrupt):
        run.evaluate(8, stop) if place == "evaluation" else run.train_step(stop)
    run.save(tmp_path)
    resumed, calls = Trainer.load(tmp_path, corpus), []
    assert (resumed.step, run.may_stop) == (2, False)
    for _ in range(2):
        resumed.train_step(lambda *call: calls.append(call))
    assert calls == [(done, 6) for done in range(7)] * 2
    for _ in range(4):
        undisturbed.train_step()
    assert all(torch.equal(a, b) for a, b in zip(_bits(resumed), _bits(undisturbed), strict=True))


@pytest.mark.parametrize(("length", "rows"), [(50, 3), (10**4, 64)])
def test_an_evaluation_is_the_mean_over_rows_of_the_held_out_text(length, rows, corpus, monkeypatch) -> None:
    """In pieces it is the same, and each piece is read alone."""
    corpus = replace(corpus, train=corpus.all())
    found = []
    for pieces in (1, 3):
        torch.manual_seed(0)
        config = replace(SHORT, sequence_length=min(length, len(corpus.train) - 1), pieces=pieces)
        trainer, sizes = Trainer(LanguageModel(TINY), corpus, config), []
        losses = trainer._losses
        monkeypatch.setattr(
            trainer,
            "_losses",
            lambda x, *y, f=losses, s=sizes, **z: s.append(x.tokens.shape) or f(x, *y, **z),
        )
        found.append(trainer.evaluate(rows))
        own = min(length, len(corpus.held_out) - 1)
        assert max(columns for _, columns in sizes) == -(-own // pieces)
        assert sum(b * n for b, n in sizes) == own * min(rows, (len(corpus.held_out) - 1) // own)
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    assert found[0] == pytest.approx(8, abs=1)


def test_other_text_is_refused_on_resume(trainer: Trainer, text: Path, tmp_path: Path) -> None:
    trainer.train_step()
    trainer.save(tmp_path / "run")
    (text / "new.txt").write_text("one more")
    with pytest.raises(ValueError, match="was trained on another text"):
        Trainer.load(tmp_path / "run", Corpus.load(text))


def test_two_checkpoints_are_kept_and_no_half_written_one_is_seen(trainer, tmp_path, monkeypatch) -> None:
    for _ in range(3):
        trainer.train_step()
        trainer.save(tmp_path)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-00000002", "step-00000003"]
    full = Mock(side_effect=OSError("disk full"))
    monkeypatch.setattr("linrope.models.training.trainer.save_training", full)
    trainer.train_step()
    with pytest.raises(OSError, match="disk full"):
        trainer.save(tmp_path)
    assert latest_checkpoint(tmp_path).name == "step-00000003"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_only_what_a_run_wrote_is_removed_or_counts_as_its_checkpoint(trainer, tmp_path) -> None:
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


DAMAGED, ZEROS = "training.safetensors: not the state of a run: .*", torch.zeros(3, device="cpu")


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda x, _: x.pop("random_state"), f"{DAMAGED}random_state"),
        (lambda x, _: x.pop("exp_avg.norm.weight"), f"{DAMAGED}exp_avg.norm.weight"),
        (lambda x, _: x.update({"exp_avg.norm.weight": ZEROS}), rf"{DAMAGED}got shape \(3,\), expected \("),
        (lambda x, _: x.update(extra=ZEROS), f"{DAMAGED}extra"),
        (lambda x, _: x.update(random_state=ZEROS), f"{DAMAGED}ByteTensor"),
        (lambda _, x: x.pop("step"), f"{DAMAGED}step"),
        (lambda _, x: x.update(config='{"stepz": 1}'), f"{DAMAGED}stepz"),
        (
            lambda _, x: x.update(processes="2"),
            "^processes: got 1 groups .*, expected 2, as in the saved run",
        ),
        (
            lambda _, x: x.update(mixed_precision="x"),
            "^mixed_precision='no': expected 'x', as in the saved run",
        ),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_refused_and_no_change(damage, cause, trainer, tmp_path) -> None:
    trainer.train_step()
    path = trainer.save(tmp_path) / "training.safetensors"
    tensors, metadata = load_tensors(path, "linrope.Training", 1)
    damage(tensors, metadata)
    save_tensors(path, tensors, metadata)
    random_state = torch.get_rng_state()
    with pytest.raises(ValueError, match=cause):
        Trainer.load(tmp_path, trainer.corpus)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_checkpoint_is_replaced_whole_or_comes_back_if_that_fails(trainer, tmp_path, monkeypatch) -> None:
    run, rename = tmp_path / "run", Path.rename
    saved = trainer.save(run)
    assert trainer.save(run) == saved
    assert [path.name for path in run.iterdir()] == ["step-00000000"]
    assert Trainer.load(run, trainer.corpus).step == 0

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
    (run / ".step-00000002.0123abcd.replaced").mkdir()  # of another run: it would count as the latest
    trainer.train_step()
    trainer.save(run)
    assert [path.name for path in checkpoints(run)] == ["step-00000000", "step-00000001"]
    assert len(list(run.iterdir())) == 2


def test_a_loss_that_is_not_finite_stops_before_the_update(trainer: Trainer) -> None:
    text = trainer.corpus.train
    trainer.train_step()
    row, column = 1, 20
    bad = int(trainer.batch().starts[row]) + column
    text.tokens[bad] = 7  # a byte that occurs nowhere else

    def poison(_: object, given: tuple[Tensor], out: Tensor) -> Tensor:
        if given[0].is_floating_point():  # the tied embedding as the last matrix
            return out
        return out.masked_fill((given[0] == 7)[..., None], torch.inf)

    trainer.model.embed.register_forward_hook(poison)
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


@pytest.mark.parametrize("options", [{}, {"attention": "softmax"}], ids=str)
def test_the_loss_is_that_of_each_part_of_a_document_alone(options: dict[str, str], corpus: Corpus) -> None:
    torch.manual_seed(0)
    model = LanguageModel(tiny(**options))
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


PIECES = {"pieces": 7, "gradients_through_pieces": True}
GATES = {"forget_gate": {"longest": 64}, "short_conv": 4, "qk_norm": True, "rotary": "selective"}


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"decay": "retnet"}, PIECES | {"pieces": 3, "batch_size": 2, "accumulation": 2}),
        # Gates, steps, the convolution and log_scale pass from piece to piece
        (GATES | {"feature_map": "exp"}, PIECES),
    ],
    ids=str,
)
def test_the_same_rows_cut_otherwise_give_the_same_gradients(options, change, corpus) -> None:
    gradients = []
    for changed in ({}, change):
        torch.manual_seed(0)
        config = replace(SHORT, **({"batch_size": 4, "sequence_length": 300} | changed), clip=1e9)
        trainer = Trainer(LanguageModel(tiny(**options)), corpus, config)
        trainer.train_step()
        gradients.append([p.grad for p in trainer.model.parameters()])
    torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-6)


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
    mine, expected = ([p.grad for p in each.parameters()] for each in (model, own))
    torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("options", "config", "precision", "message"),
    [
        ({"attention": "softmax"}, {"pieces": 2}, "no", "pieces=2: packed softmax attention"),
        ({"vocab_size": 100}, {}, "no", "vocab_size=100: expected at least the corpus's, 256"),
        ({}, {}, "fp16", "mixed_precision='fp16'"),
        ({}, {"sequence_length": 10**5}, "no", "sequence_length=100000: expected less than the training"),
        ({}, {"steps": 0}, "no", "steps=0"),
        ({}, {"learning_rate": float("nan")}, "no", "learning_rate=nan"),
        ({}, {"seed": -1}, "no", "seed=-1"),
    ],
)
def test_what_the_trainer_cannot_do_is_refused(options, config, precision, message, corpus: Corpus) -> None:
    accelerator = None if precision == "no" else SimpleNamespace(mixed_precision=precision)
    with pytest.raises(ValueError, match=message):
        Trainer(LanguageModel(tiny(**options)), corpus, replace(SHORT, **config), accelerator)


def test_configs_keep_numbers_of_numpy_as_python_s_own() -> None:
    config = TrainingConfig(learning_rate=np.float32(0.5), steps=np.int64(3), weight_decay=np.int64(0))
    assert json.loads(json.dumps(asdict(config))) == asdict(
        TrainingConfig(learning_rate=0.5, steps=3, weight_decay=0)
    )
    model = tiny(vocab_size=np.int64(300), num_heads=np.int64(2))
    assert LanguageModelConfig.from_dict(json.loads(json.dumps(model.to_dict()))) == model


def test_without_accelerate_its_extra_is_named(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(ModuleNotFoundError, match=r"accelerate is missing; install linrope\[train\]"):
        Trainer(LanguageModel(TINY), corpus, SHORT)
