"""The options of a training run."""

from dataclasses import dataclass, fields

from linrope.common.argument_checks import check_sizes, plain

LARGEST = 2**40  # integer; seeds are multiplied by a million
LARGEST_FLOAT = 3.4e38  # of float32


@dataclass(frozen=True)
class TrainingConfig:
    """The options of a training run, saved in its checkpoints."""

    steps: int = 1000
    batch_size: int = 8  # rows in one forward and backward pass of each group of processes that share rows
    sequence_length: int = 512
    learning_rate: float = 3e-3
    warmup_steps: int = 20
    weight_decay: float = 0.1
    clip: float = 1.0
    seed: int = 0
    accumulation: int = 1  # batches per update
    pieces: int = 1  # per row; each continues from the state of the piece before
    gradients_through_pieces: bool = False  # whether gradients pass through these states

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = plain(getattr(self, field.name)), type(field.default)
            object.__setattr__(self, field.name, value)
            if not isinstance(value, (int, float) if kind is float else kind) or (
                isinstance(value, bool) and kind is not bool
            ):
                raise TypeError(f"{field.name}: got {value!r}, expected {kind.__name__}")
            if kind is int and isinstance(value, int) and value > LARGEST:
                raise ValueError(f"{field.name}={value}: expected at most {LARGEST}")
        sizes = ("steps", "batch_size", "sequence_length", "accumulation", "pieces")
        check_sizes(**{name: getattr(self, name) for name in sizes})
        for name in ("learning_rate", "clip"):
            if not (0 < getattr(self, name) <= LARGEST_FLOAT):
                raise ValueError(
                    f"{name}={getattr(self, name)}: expected a positive number, at most {LARGEST_FLOAT:g}"
                )
        for name in ("warmup_steps", "weight_decay", "seed"):
            if not (0 <= getattr(self, name) <= LARGEST_FLOAT):
                raise ValueError(f"{name}={getattr(self, name)}: expected 0 to {LARGEST_FLOAT:g}")
        if self.pieces > self.sequence_length:
            raise ValueError(f"pieces={self.pieces}: expected at most sequence_length={self.sequence_length}")
