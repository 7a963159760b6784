"""Training steps, evaluation, saving and resuming. accelerate provides the devices and processes."""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from linrope.common.optional import need
from linrope.layer.state import LayerState
from linrope.models.checkpoint_folders import checkpoints, latest_checkpoint
from linrope.models.language_model import LanguageModel, State, States
from linrope.models.training.batch import NO_TARGET, Batch, evenly_spaced_rows, row_starts
from linrope.models.training.checkpoint import (
    checkpoint_name,
    load_training,
    save_training,
    write_checkpoint,
)
from linrope.models.training.config import TrainingConfig
from linrope.models.training.corpus import Corpus
from linrope.models.training.processes import Processes, last_states
from linrope.models.training.progress import OnPiece, piece_counter
from linrope.recurrence.state import NO_KEYS


def _full_state_dicts() -> tuple[Any, Any]:
    """PyTorch's distributed state dicts, and the options that gather them in the main process.

    Imported here because this import takes longer than all others of the commands, PyTorch excepted.
    """
    from torch.distributed.checkpoint import state_dict

    return state_dict, state_dict.StateDictOptions(full_state_dict=True, cpu_offload=True)


class Trainer:
    """Trains a model on a corpus with AdamW, warm-up and a cosine schedule.

    In a step, each group of processes that share tokens and heads reads accumulation * batch_size rows of
    sequence_length tokens. Rows are packed: states and positions restart at each row and each document, and
    the last token of a document predicts nothing. The loss is the mean over all predicted tokens of the
    step. The loss, the gradient and the evaluation do not depend on how the work is split over processes.

    Args:
        model: the model, which is moved to the accelerator's device.
        corpus: the text to train on.
        config: the options of the run.
        accelerator: from accelerate; default: one for the available GPUs and processes.
        sequence_parallel: the number of processes that share the tokens of a batch.
        tensor_parallel: the number of processes that share the heads.

    Raises:
        ModuleNotFoundError: accelerate is not installed.
        ValueError: a part of the corpus is shorter than a row, or the model does not fit the corpus, the
            config or the numbers of processes.
    """

    def __init__(
        self,
        model: LanguageModel,
        corpus: Corpus,
        config: TrainingConfig,
        accelerator: Any = None,
        *,
        sequence_parallel: int = 1,
        tensor_parallel: int = 1,
    ) -> None:
        if corpus.vocab_size > model.config.vocab_size:
            raise ValueError(
                f"vocab_size={model.config.vocab_size}: expected at least the corpus's, {corpus.vocab_size}"
            )
        if config.pieces > 1 and model.config.attention == "softmax":
            raise ValueError(
                f"pieces={config.pieces}: packed softmax attention cannot continue from a state; expected 1"
            )
        if sequence_parallel > 1 and model.config.attention == "softmax":
            raise ValueError(f"sequence_parallel={sequence_parallel}: expected 1 with attention='softmax'")
        if len(corpus.train) <= config.sequence_length:
            raise ValueError(
                f"sequence_length={config.sequence_length}: expected less than the training text, {len(corpus.train)} "
                "tokens"
            )
        if accelerator is None:
            # cpu=True: without it accelerate treats each of several processes without a GPU as a lone one.
            cpu = not torch.cuda.is_available()
            accelerator = need("accelerate", "linrope[train]").Accelerator(cpu=cpu)
        if accelerator.mixed_precision == "fp16":
            raise ValueError(
                "mixed_precision='fp16': its scaled gradients sometimes overflow, and the trainer stops at "
                "infinite gradients; expected 'bf16' or 'no'"
            )
        self.model, self.corpus, self.config, self.accelerator = model, corpus, config, accelerator
        self.step = 0  # steps done
        # Whether an exception raised at this moment leaves all that save() writes as it was before the step
        self.may_stop = False
        # The checkpoints that this run wrote and, after load, all that were in its folder. save() keeps the last two.
        self._checkpoints: list[Path] = []
        self.processes = Processes(accelerator, sequence_parallel, tensor_parallel)
        self.processes.split_heads(model)
        optimizer = torch.optim.AdamW(
            [
                {
                    "params": [p for p in model.parameters() if p.ndim >= 2],
                    "weight_decay": config.weight_decay,
                },
                {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
            ],
            lr=config.learning_rate,
            betas=(0.9, 0.95),
            fused=tensor_parallel == 1,  # neither form can mix DTensors and other tensors
            foreach=False,
        )
        self._names = [
            [name for name, p in model.named_parameters() if (p.ndim >= 2) == matrix]
            for matrix in (True, False)
        ]
        self.parallel, prepared = self.processes.prepare(model, optimizer)
        self.optimizer: torch.optim.Optimizer = prepared

    def __repr__(self) -> str:
        return f"Trainer({type(self.model).__name__}, {self.corpus!r}, {self.config}, step={self.step})"

    def learning_rate(self) -> float:
        """The rate of the next step: linear warm-up times a cosine that falls to a tenth."""
        config = self.config
        warm = min(1.0, (self.step + 1) / max(1, config.warmup_steps))
        progress = min(1.0, self.step / config.steps)
        return config.learning_rate * warm * (0.55 + 0.45 * math.cos(math.pi * progress))

    def train_step(self, on_piece: OnPiece | None = None) -> dict[str, float]:
        """One update; returns step, bits_per_byte (of the loss), learning_rate and gradient_norm.

        on_piece: called with the number of pieces read and the number of all, before the first piece and after each.
            An exception that it raises stops the step, and save() writes what it would have written before the step.

        Raises:
            RuntimeError: the loss or a gradient is not finite. The model is not changed.
        """
        config, processes, rate = self.config, self.processes, self.learning_rate()
        self.model.train()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self._stoppable(config.accumulation * config.pieces, on_piece) as count_piece:
            batches = [self.batch(turn) for turn in range(config.accumulation)]
            targets = torch.stack([(batch.targets != NO_TARGET).sum() for batch in batches]).sum()
            count = max(1, int(processes.sum(targets, "dp")))
            self.optimizer.zero_grad()
            scale = processes.scale() / count
            losses = [self._backward(batch, scale, batch is batches[-1], count_piece) for batch in batches]
            norm = processes.clip_gradients(self.parallel, config.clip)
        loss = float(processes.sum(torch.stack(losses).sum(dtype=torch.float64), "dp", "cp")) / count
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise RuntimeError(
                f"loss {loss}, gradient norm {norm} at step {self.step}, {self._culprit(batches, losses)}: "
                "expected finite numbers"
            )
        self.optimizer.step()
        self.step += 1
        bits = loss / math.log(2) / self.corpus.train.bytes_per_token
        return {"step": self.step, "bits_per_byte": bits, "learning_rate": rate, "gradient_norm": norm}

    def batch(self, turn: int = 0) -> Batch:
        """The batch that this process reads in the next step, in turn ``turn`` of the accumulation."""
        config, processes = self.config, self.processes
        number = self.step * config.accumulation + turn
        first = (number * processes.row_groups + processes.row_group) * config.batch_size
        starts = row_starts(self.corpus.train, first, config.batch_size, config.sequence_length, config.seed)
        return Batch.read(self.corpus.train, starts, config.sequence_length).to(self.accelerator.device)

    @contextmanager
    def _stoppable(self, pieces: int, on_piece: OnPiece | None) -> Iterator[Callable[[], None]]:
        """The part of a step or evaluation in which an exception may stop it; gives what counts the pieces read."""
        random_state, count_piece = torch.get_rng_state(), piece_counter(on_piece, pieces)
        try:
            self.may_stop = True
            count_piece()
            yield count_piece
        except BaseException:
            torch.set_rng_state(random_state)
            raise
        finally:
            self.may_stop = False

    def _backward(self, batch: Batch, scale: float, last: bool, count_piece: Callable[[], None]) -> Tensor:
        """Adds this batch to the gradients; returns losses (b, n) in nats, 0 for others' tokens."""
        through, accelerator = self.config.gradients_through_pieces, self.accelerator
        states: States | None = None
        count, total = self.config.pieces, torch.zeros(())
        losses = torch.empty(batch.targets.shape, device=batch.targets.device)
        for number, (piece, place) in enumerate(
            zip(batch.cut(count), losses.tensor_split(count, 1), strict=True), 1
        ):
            end = number == count
            with nullcontext() if last and (end or through) else accelerator.no_sync(self.parallel):
                part, states = self._losses(piece, states, return_states=not end)
                total = total.to(part) + part.sum() if through else part.sum()
                if end or not through:
                    accelerator.backward(total * scale)
            if not through:
                states = [state.detach() for state in states]
            place.copy_(part.detach())
            count_piece()
        return losses

    def _losses(
        self, batch: Batch, states: States | None = None, *, return_states: bool = False
    ) -> tuple[Tensor, States]:
        """Losses (b, n) in nats, 0 for tokens of other processes, and the final states of the rows."""
        cu_seqlens, sequence = batch.sequences()
        if states is not None:
            rows = (~batch.begins[:, 0]).nonzero()[:, 0]  # the rows that continue a document
            states = [_carry(state, rows, sequence[rows, 0], len(cu_seqlens) - 1) for state in states]
        shard = self.processes.shard(cu_seqlens)
        tokens, targets = batch.tokens.reshape(1, -1), batch.targets.reshape(1, -1)
        packing: dict[str, Any] = {"cu_seqlens": cu_seqlens}
        if shard is not None:
            tokens, targets, packing = shard.take(tokens), shard.take(targets), {"shard": shard}
        logits, new_states = self.parallel(tokens, states, return_states=return_states, **packing)
        losses = F.cross_entropy(logits[0].float(), targets[0], ignore_index=NO_TARGET, reduction="none")
        if shard is not None:
            losses = F.pad(losses, (shard.start, shard.total - shard.stop))
        if return_states:
            through = self.config.gradients_through_pieces
            new_states = last_states(new_states, sequence[:, -1], shard, through)
        return losses.view(batch.targets.shape), new_states

    def _culprit(self, batches: list[Batch], losses: list[Tensor]) -> str:
        """The text behind the first loss that is not finite; all rows of the step if every loss is finite."""
        for batch, part in zip(batches, losses, strict=True):
            bad = ~part.isfinite()
            if bool(bad.any()):
                row, token = bad.nonzero()[0].tolist()
                return f"first at {self.corpus.train.place(int(batch.starts[row]) + token)}"
        starts = torch.cat([batch.starts for batch in batches]).tolist()
        return "in rows from " + "; ".join(self.corpus.train.place(start) for start in starts)

    @torch.no_grad()
    def evaluate(self, rows: int = 64, on_piece: OnPiece | None = None) -> float:
        """Bits per byte on at most that many rows of the held-out text, which are evenly spread and do not overlap.

        The rows are read in pieces, as in training. A text shorter than a row is one row. Every group of processes
        reads all rows.

        on_piece: as in train_step.
        """
        self.model.eval()
        config, text = self.config, self.corpus.held_out
        length = min(config.sequence_length, len(text) - 1)
        parts = evenly_spaced_rows(text, rows, length).split(config.batch_size)
        pieces = min(config.pieces, length)
        total, count = torch.zeros((), dtype=torch.float64, device=self.accelerator.device), 0
        with self._stoppable(len(parts) * pieces, on_piece) as count_piece:
            for part in parts:
                batch = Batch.read(text, part, length).to(self.accelerator.device)
                count += int((batch.targets != NO_TARGET).sum())
                states: States | None = None
                for number, piece in enumerate(batch.cut(pieces), 1):
                    losses, states = self._losses(piece, states, return_states=number < pieces)
                    total += losses.sum(dtype=torch.float64)
                    count_piece()
        bits = float(self.processes.sum(total, "cp")) / math.log(2)
        return bits / max(1, count) / text.bytes_per_token

    def save(self, folder: str | os.PathLike[str], notes: Mapping[str, str] | None = None) -> Path:
        """Writes folder/step-N completely or not at all. Every process must call it. notes: for its metadata.

        Of this run's checkpoints in the folder, the last two are kept; after ``load``, all of its checkpoints count as
        this run's. An existing step-N is replaced, and what killed runs left half-written is removed.

        Raises:
            BlockingIOError: another process writes into the folder.
        """
        state_dict, options = _full_state_dicts()
        weights = state_dict.get_model_state_dict(self.parallel, options=options)
        tensors = {"random_state": torch.get_rng_state()}
        if self.step:  # before the first step the optimizer has no state
            plain = self._plain_optimizer()
            optimizer: Any = state_dict.get_optimizer_state_dict(self.parallel, plain, options=options)
            for name, state in optimizer.get("state", {}).items():  # empty except in the main process
                tensors |= {f"{key}.{name}": value for key, value in state.items()}
        metadata = {
            **(notes or {}),
            "step": str(self.step),
            "config": json.dumps(asdict(self.config)),
            "processes": str(self.processes.row_groups),
            "checksum": str(self.corpus.checksum),
            "mixed_precision": str(self.accelerator.mixed_precision),
        }
        metadata |= self.corpus.source or {}

        def write(path: Path) -> None:
            self.model.save(path, weights)
            save_training(path, tensors, metadata)
            if self.corpus.tokenizer is not None:
                self.corpus.tokenizer.save_pretrained(path / "tokenizer")

        if self.accelerator.is_main_process:
            write_checkpoint(Path(folder), self.step, write, self._checkpoints)
        self.accelerator.wait_for_everyone()
        return Path(folder) / checkpoint_name(self.step)

    @classmethod
    def load(
        cls, folder: str | os.PathLike[str], corpus: Corpus, accelerator: Any = None, **parallel: int
    ) -> "Trainer":
        """Resumes from the last checkpoint of folder, on the same corpus.

        parallel: sequence_parallel and tensor_parallel. Both may differ from the run before, if the number of
        groups that read different rows stays the same.

        Raises:
            FileNotFoundError, ValueError: there is no checkpoint, it is damaged, the corpus is another one,
                or the number of groups that read different rows or the mixed precision has changed.
        """
        latest = latest_checkpoint(folder)
        model = LanguageModel.load(latest)
        config, tensors, metadata = load_training(latest)
        if metadata["checksum"] != str(corpus.checksum):
            raise ValueError(f"{latest}: was trained on another text than {corpus.name}")
        trainer = cls(model, corpus, config, accelerator, **parallel)
        if (expected := metadata["processes"]) != (rows := str(trainer.processes.row_groups)):
            raise ValueError(
                f"processes: got {rows} groups that read different rows, expected {expected}, as in the saved run"
            )
        precision = str(trainer.accelerator.mixed_precision)
        if (expected := metadata.get("mixed_precision", precision)) != precision:
            raise ValueError(f"mixed_precision={precision!r}: expected {expected!r}, as in the saved run")
        try:
            trainer.step = int(metadata["step"])
            trainer._checkpoints = [path.resolve() for path in checkpoints(folder)]
            random_state = tensors.pop("random_state")
            if trainer.step:
                trainer._load_optimizer(tensors)
            if tensors:
                raise ValueError(f"got unexpected tensors {sorted(tensors)}")
            torch.set_rng_state(random_state)  # last: a damaged file must not change the process
        except (KeyError, TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{latest / 'training.safetensors'}: not the state of a run: {error}") from error
        return trainer

    def _load_optimizer(self, tensors: dict[str, Tensor]) -> None:
        states = {}
        for name, parameter in self.model.named_parameters():
            state = {key: tensors.pop(f"{key}.{name}") for key in ("step", "exp_avg", "exp_avg_sq")}
            for key in ("exp_avg", "exp_avg_sq"):
                if (got := tuple(state[key].shape)) != (shape := tuple(parameter.shape)):
                    raise ValueError(f"{key}.{name}: got shape {got}, expected {shape}")
            states[name] = state
        optimizer = self._plain_optimizer()
        groups = [
            {key: value for key, value in group.items() if key != "params"} | {"params": names}
            for group, names in zip(optimizer.param_groups, self._names, strict=True)
        ]
        optimizer_state: Any = {"state": states, "param_groups": groups}
        state_dict, options = _full_state_dicts()
        state_dict.set_optimizer_state_dict(self.parallel, optimizer, optimizer_state, options=options)

    def _plain_optimizer(self) -> torch.optim.Optimizer:
        plain: torch.optim.Optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        return plain


def _carry(state: State, rows: Tensor, new: Tensor, sequences: int) -> State:
    """A state of ``sequences`` sequences: those at ``new`` continue the rows, the others start empty."""
    assert isinstance(state, LayerState)

    def move(x: Tensor, fresh: float) -> Any:
        return x.new_full((sequences, *x.shape[1:]), fresh).index_copy(0, new, x.index_select(0, rows))

    moved = {name: move(x, NO_KEYS if name == "log_scale" else 0.0) for name, x in state.tensors().items()}
    return LayerState.from_tensors(moved, state.identity)
