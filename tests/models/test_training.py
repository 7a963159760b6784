from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import Corpus, Trainer, TrainingConfig, checkpoints, latest_checkpoint

TINY = LanguageModelConfig(embed_dim=32, num_layers=1, num_heads=2)
SHORT = TrainingConfig(steps=12, batch_size=2, sequence_length=32, warmup_steps=2)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(60):
        (folder / f"{i}.txt").write_text(f"file {i}: the quick brown fox jumps over the lazy dog. " * 4)
    return folder


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


def test_files_lie_in_one_part_only_and_the_split_is_stable(text: Path) -> None:
    corpus = Corpus.load(text)
    parts = [bytes(part.tolist()) for part in (corpus.train, corpus.held_out)]
    names = [{i for i in range(60) if f"file {i}:".encode() in part} for part in parts]
    assert names[0] | names[1] == set(range(60))
    assert not names[0] & names[1]
    assert names[1]
    assert Corpus.load(text).checksum == corpus.checksum


def test_a_single_file_holds_its_end_out(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(bytes(range(100)).replace(b"\0", b"x") * 10)
    corpus = Corpus.load(tmp_path / "a.txt")
    assert (len(corpus.train), len(corpus.held_out)) == (950, 50)


def test_what_is_not_text_is_skipped_in_folders_and_refused_alone(text: Path) -> None:
    checksum = Corpus.load(text).checksum
    (text / "image.bin").write_bytes(b"\xff\xfe\x00\x01")
    (text / ".hidden").write_text("no")
    assert Corpus.load(text).checksum == checksum
    with pytest.raises(ValueError, match=r"image.bin: expected UTF-8 text"):
        Corpus.load(text / "image.bin")


def test_an_absent_or_empty_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        Corpus.load(tmp_path / "absent")
    with pytest.raises(ValueError, match="got 0 bytes of text"):
        Corpus.load(tmp_path)


def test_the_default_corpus_is_the_standard_library() -> None:
    corpus = Corpus.load()
    assert len(corpus.train) > 5_000_000
    assert b"import" in bytes(corpus.train[:100_000].tolist())


def test_other_text_is_refused_on_resume(trainer: Trainer, text: Path, tmp_path: Path) -> None:
    trainer.train_step()
    trainer.save(tmp_path / "run")
    (text / "new.txt").write_text("one more")
    with pytest.raises(ValueError, match="was trained on other text"):
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

    monkeypatch.setattr("linrope.models.training.save_tensors", fail)
    trainer.train_step()
    with pytest.raises(OSError, match="disk full"):
        trainer.save(tmp_path)
    assert latest_checkpoint(tmp_path).name == "step-00000003"
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


@pytest.mark.parametrize(
    ("damage", "cause"),
    [
        (lambda tensors, metadata: tensors.pop("random_state"), "random_state"),
        (lambda tensors, metadata: tensors.pop("exp_avg.norm.weight"), "exp_avg.norm.weight"),
        (lambda tensors, metadata: tensors.update({"exp_avg.norm.weight": torch.zeros(3)}), "got shape"),
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
    with safe_open(path, "pt") as file:
        tensors, metadata = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118
    damage(tensors, metadata)  # type: ignore[operator]
    save_file(tensors, path, metadata)
    random_state = torch.get_rng_state()
    with pytest.raises(ValueError, match=rf"training.safetensors: does not fit the model: .*{cause}"):
        Trainer.load(tmp_path, trainer.corpus)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_checkpoint_of_the_same_step_is_replaced_whole(trainer: Trainer, tmp_path: Path) -> None:
    paths = [trainer.save(tmp_path) for _ in range(2)]
    assert paths[0] == paths[1]
    assert [path.name for path in tmp_path.iterdir() if path.name != "text"] == ["step-00000000"]
    assert Trainer.load(tmp_path, trainer.corpus).step == 0


def test_a_loss_that_is_not_finite_stops_before_the_update(trainer: Trainer) -> None:
    with torch.no_grad():
        trainer.model.norm.weight[0] = torch.inf
    before = [p.clone() for p in trainer.model.parameters()]
    with pytest.raises(RuntimeError, match=r"at step 0, sequences starting at bytes \[\d+, \d+\]"):
        trainer.train_step()
    assert trainer.step == 0
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.model.parameters(), strict=True))


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
