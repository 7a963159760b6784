"""Training a LanguageModel on text files: data, steps, validation, checkpoints.

Everything that a step does is a function of (config, corpus, step), so that a run resumed from a
checkpoint ends with the same bits as one that was never interrupted.
"""

import json
import math
import os
import shutil
import sysconfig
import tempfile
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.files import load_tensors, save_tensors
from linrope.models.language_model import LanguageModel

_FORMAT, _VERSION = "linrope.Training", 1
_HELD_OUT = 20  # one file in so many, or that part of a single file, is for validation
_KEPT = 2  # checkpoints


@dataclass(frozen=True)
class Corpus:
    """Text as bytes: what to train on, and what is held out. Files never lie in both."""

    train: Tensor  # (bytes,) uint8
    held_out: Tensor
    name: str
    checksum: int

    @classmethod
    def load(cls, path: str | os.PathLike[str] | None = None) -> "Corpus":
        """Reads a file, or all UTF-8 text files of a folder; default: Python's standard library.

        Raises:
            FileNotFoundError: no such path.
            ValueError: not UTF-8 text, or too little of it.
        """
        standard_library = path is None
        root = Path(sysconfig.get_paths()["stdlib"] if path is None else path)
        if root.is_file():
            text = _read(root)
            if text is None:
                raise ValueError(f"{root}: expected UTF-8 text")
            cut = len(text) - len(text) // _HELD_OUT
            parts = [text[:cut]], [text[cut:]]
        elif root.is_dir():
            parts = [], []
            for file in sorted(root.rglob("*.py" if standard_library else "*")):
                inside = file.relative_to(root)
                skipped = {"site-packages", "dist-packages", "__pycache__"} & set(inside.parts)
                if skipped or any(part.startswith(".") for part in inside.parts) or not file.is_file():
                    continue
                text = _read(file)
                if text:
                    parts[zlib.crc32(inside.as_posix().encode()) % _HELD_OUT == 0].append(text + b"\n")
            if parts[0] and not parts[1] and len(parts[0]) > 1:
                parts[1].append(parts[0].pop())
        else:
            raise FileNotFoundError(f"{root}: no such file or folder")
        train, held_out = (b"".join(part) for part in parts)
        if len(train) < 2 or len(held_out) < 2:
            raise ValueError(
                f"{root}: got {len(train) + len(held_out)} bytes of text, expected enough to train on"
            )
        checksum = zlib.crc32(held_out, zlib.crc32(train))
        name = "Python's standard library" if standard_library else str(root)
        return cls(_tensor(train), _tensor(held_out), name, checksum)


def _read(file: Path) -> bytes | None:
    """The file's bytes if they are UTF-8 text."""
    text = file.read_bytes()
    try:
        text.decode()
    except UnicodeDecodeError:
        return None
    return None if b"\0" in text else text


def _tensor(text: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())


@dataclass(frozen=True)
class TrainingConfig:
    """How to train; a checkpoint remembers it."""

    steps: int = 1000
    batch_size: int = 8
    sequence_length: int = 512
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "sequence_length"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: expected at least 1")
        for name in ("learning_rate", "clip"):
            if not (getattr(self, name) > 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name}={getattr(self, name)}: expected a positive finite number")
        for name in ("warmup_steps", "weight_decay", "seed"):
            if not (getattr(self, name) >= 0 and math.isfinite(getattr(self, name))):
                raise ValueError(f"{name}={getattr(self, name)}: expected a finite number, at least 0")


class Trainer:
    """Trains model on corpus with AdamW, warm-up and a cosine schedule.

    Raises:
        ValueError: a part of the corpus is shorter than a sequence.
    """

    def __init__(self, model: LanguageModel, corpus: Corpus, config: TrainingConfig) -> None:
        for name, part in (("training", corpus.train), ("held-out", corpus.held_out)):
            if len(part) <= config.sequence_length:
                raise ValueError(
                    f"sequence_length={config.sequence_length}: expected less than the {name} text, "
                    f"{len(part)} bytes"
                )
        self.model, self.corpus, self.config = model, corpus, config
        self.step = 0  # steps done
        decayed = [p for p in model.parameters() if p.ndim >= 2]
        others = [p for p in model.parameters() if p.ndim < 2]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": decayed, "weight_decay": config.weight_decay},
                {"params": others, "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
        )

    def learning_rate(self) -> float:
        """Linear warm-up, then a cosine down to a tenth."""
        config = self.config
        warm = min(1.0, (self.step + 1) / max(1, config.warmup_steps))
        progress = min(1.0, self.step / config.steps)
        return config.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * progress))

    def train_step(self) -> float:
        """One update; returns the loss in bits per byte.

        Raises:
            RuntimeError: the loss or a gradient is not finite; the model is left as it was.
        """
        config = self.config
        generator = torch.Generator().manual_seed(config.seed * 1_000_003 + self.step)
        starts = torch.randint(
            len(self.corpus.train) - config.sequence_length, (config.batch_size,), generator=generator
        )
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate()
        loss = _loss(self.model, _windows(self.corpus.train, starts, config.sequence_length))
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.clip)
        if not (math.isfinite(loss.item()) and math.isfinite(norm.item())):
            raise RuntimeError(
                f"loss {loss.item()}, gradient norm {norm.item()} at step {self.step}, "
                f"sequences starting at bytes {starts.tolist()}: expected finite numbers"
            )
        self.optimizer.step()
        self.step += 1
        return loss.item() / math.log(2)

    @torch.no_grad()
    def evaluate(self, batches: int = 8) -> float:
        """Bits per byte on evenly spread sequences of the held-out text."""
        self.model.eval()
        config, text = self.config, self.corpus.held_out
        count = min(batches * config.batch_size, len(text) - config.sequence_length)
        starts = torch.linspace(0, len(text) - config.sequence_length - 1, count, dtype=torch.float64).long()
        total = 0.0
        for part in starts.split(config.batch_size):
            total += _loss(self.model, _windows(text, part, config.sequence_length)).item() * len(part)
        return total / count / math.log(2)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes folder/step-N whole or not at all; keeps the last two."""
        folder = Path(folder)
        target = folder / f"step-{self.step:08d}"
        folder.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix=f".{target.name}."))
        temporary.chmod(0o755)
        replaced = temporary.with_suffix(".replaced")
        try:
            self.model.save(temporary)
            names: dict[Tensor, str] = {p: name for name, p in self.model.named_parameters()}
            tensors = {"random_state": torch.get_rng_state()}
            for parameter, state in self.optimizer.state.items():
                for key, value in state.items():
                    tensors[f"{key}.{names[parameter]}"] = value
            metadata = {
                "format": _FORMAT,
                "version": str(_VERSION),
                "step": str(self.step),
                "config": json.dumps(asdict(self.config)),
                "checksum": str(self.corpus.checksum),
            }
            save_tensors(temporary / "training.safetensors", tensors, metadata)
            if target.exists():  # moved away whole: half removed, it would count as the latest
                target.rename(replaced)
            temporary.rename(target)
        finally:
            for leftover in (temporary, replaced):
                shutil.rmtree(leftover, ignore_errors=True)
        for old in checkpoints(folder)[:-_KEPT]:
            shutil.rmtree(old)
        return target

    @classmethod
    def load(cls, folder: str | os.PathLike[str], corpus: Corpus) -> "Trainer":
        """Goes on from the last checkpoint of folder, on the same corpus.

        Raises:
            FileNotFoundError, ValueError: no checkpoint; a damaged one; another corpus.
        """
        latest = latest_checkpoint(folder)
        model = LanguageModel.load(latest)
        tensors, metadata = load_tensors(latest / "training.safetensors", _FORMAT, _VERSION)
        if metadata.get("checksum") != str(corpus.checksum):
            raise ValueError(f"{latest}: was trained on other text than {corpus.name}")
        try:
            trainer = cls(model, corpus, TrainingConfig(**json.loads(metadata["config"])))
            trainer.step = int(metadata["step"])
            random_state = tensors.pop("random_state")
            if trainer.step:  # before the first step the optimizer has no state
                for name, parameter in model.named_parameters():
                    state = {key: tensors.pop(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
                    for key in ("exp_avg", "exp_avg_sq"):
                        if state[key].shape != parameter.shape:
                            raise ValueError(f"{key}.{name}: got shape {tuple(state[key].shape)}")
                    trainer.optimizer.state[parameter] = state
            if tensors:
                raise ValueError(f"got tensors {sorted(tensors)} too many")
            torch.set_rng_state(random_state)  # last: a damaged file leaves the process as it was
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{latest / 'training.safetensors'}: does not fit the model: {error}") from error
        return trainer


def checkpoints(folder: str | os.PathLike[str]) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    return sorted(path for path in Path(folder).glob("step-*") if path.is_dir())


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path:
    """folder itself if it is a checkpoint, else the last one in it.

    Raises:
        FileNotFoundError: there is none.
    """
    if (Path(folder) / "model.safetensors").is_file():
        return Path(folder)
    found = checkpoints(folder)
    if not found:
        raise FileNotFoundError(f"{folder}: expected a folder with checkpoints (step-*)")
    return found[-1]


def _windows(text: Tensor, starts: Tensor, length: int) -> Tensor:
    """(b, length + 1) int64: each sequence and the byte after it."""
    return text[starts[:, None] + torch.arange(length + 1)].long()


def _loss(model: LanguageModel, windows: Tensor) -> Tensor:
    logits, _ = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())
