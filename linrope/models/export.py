"""A language model for exporters and other runtimes: tensors in, tensors out."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

from linrope.backends import onnx
from linrope.common.argument_checks import check_name, check_sizes
from linrope.common.optional import need
from linrope.common.private_names import FakeTensorMode
from linrope.layer.state import LayerState
from linrope.models.language_model import LanguageModel

# The backend that records each form of the attention, and the first onnxruntime that runs the file.
OPERATORS = {"onnxruntime": ("onnx", "1.29"), "opset27": ("onnx", "1.32"), "portable": ("reference", "1.18")}


class TensorStates(nn.Module):
    """A language model whose states are plain tensors in its arguments and results.

        logits, [kv_0', z_0', position_0', kv_1', ..] = module(tokens, [kv_0, z_0, position_0, kv_1, ..])

    The tensors of block i are those of its LayerState: kv_i (b, g, f, e), z_i (b, g, f), position_i
    (b,), and angle_i, log_scale_i and conv_i if the model has them. Sequences begin with ``empty``. A
    prompt, a piece of a prompt and a decoding step are all the same call. The weights are shared with the
    model.

    Args:
        model: a LanguageModel or a LinRopeForCausalLM, with linear layers only.

    Raises:
        TypeError: the model is of another class.
        ValueError: the model has softmax attention, whose cache grows.

    >>> from linrope.models import LanguageModel, LanguageModelConfig
    >>> from linrope.models.export import TensorStates
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))
    >>> module = TensorStates(model)
    >>> logits, tensors = module(torch.tensor([[76, 105]]), module.empty(1))
    >>> dict(zip(module.names, [tuple(tensor.shape) for tensor in tensors]))
    {'kv_0': (1, 2, 16, 32), 'z_0': (1, 2, 16), 'position_0': (1,), 'conv_0': (1, 3, 128),
     'kv_1': (1, 2, 16, 32), 'z_1': (1, 2, 16), 'position_1': (1,), 'conv_1': (1, 3, 128)}
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        if not isinstance(model, LanguageModel) and not hasattr(model, "with_states"):
            raise TypeError(
                f"model: got {type(model).__name__}, expected a LanguageModel or a LinRopeForCausalLM; others export "
                "by torch.export or torch.onnx.export"
            )
        self.model = model if isinstance(model, LanguageModel) else model.with_states()
        states = self._empty()
        if other := next((x for x in states if not isinstance(x, LayerState)), None):
            raise ValueError(f"model: got a layer with a {type(other).__name__}, expected linear layers only")
        self._names = [list(state.tensors()) for state in states]
        self._identities = [state.identity for state in states]
        self.names = [f"{name}_{block}" for block, names in enumerate(self._names) for name in names]

    @property
    def device(self) -> torch.device:
        """The model's."""
        device: torch.device = next(self.parameters()).device
        return device

    @torch.no_grad()
    def _empty(self) -> list[LayerState]:
        """The states of one sequence before its first token."""
        tokens = torch.zeros(1, 0, dtype=torch.int64, device=self.device)
        states: list[LayerState] = self.model(tokens)[1]
        return states

    def empty(self, batch: int) -> list[Tensor]:
        """The states of ``batch`` sequences before their first token, on the model's device."""
        return [x.repeat(batch, *[1] * (x.ndim - 1)) for x in _tensors_of(self._empty())]

    def forward(self, tokens: Tensor, tensors: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """tokens (b, n) -> logits (b, n, vocab_size), and the tensors after the last token."""
        states, rest = [], iter(tensors)
        for names, identity in zip(self._names, self._identities, strict=True):
            states.append(LayerState.from_tensors({name: next(rest) for name in names}, identity))
        logits, states = self.model(tokens, states)
        return logits, _tensors_of(states)


def _tensors_of(states: list[LayerState]) -> list[Tensor]:
    return [x for state in states for x in state.tensors().values()]


def export_onnx(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    operators: str = "onnxruntime",
    tokens_per_call: int | None = None,
    check: bool = True,
    verbose: bool = True,
) -> TensorStates:
    """Writes a language model to an ONNX file, which takes and returns the states as ``TensorStates`` does.

        logits, next_kv_0, next_z_0, next_position_0, .. = file(tokens, kv_0, z_0, position_0, ..)

    Prompts, pieces of prompts and decoding steps are calls of one file, with any batch and any length.

    Args:
        model: as in ``TensorStates``, and in float32 unless operators is "portable".
        path: of the file to write.
        operators: what the attention consists of.
            "onnxruntime": its operator LinearAttention, O(N). From onnxruntime 1.29 on.
            "opset27": ONNX's own LinearAttention, O(N). For runtimes with opset 27; onnxruntime has it from 1.32 on.
            "portable": plain operations, O(N^2) in the tokens of one call. For any runtime.
        tokens_per_call: a fixed length of all calls, which makes the graph smaller; None: any length.
        check: whether to compare the file with the model in the installed onnxruntime.
        verbose: print the exporter's progress.

    Returns:
        The TensorStates of the model. Its ``names`` are those of the file's states, its ``empty`` makes the first ones.

    Raises:
        ImportError: a package of linrope[export] is missing.
        TypeError: the model is of another class.
        ValueError: operators or tokens_per_call has another value, the model has softmax attention, or operators is not
            "portable" and the feature map has a log_scale, whose running maximum is quadratic in ONNX.
        OSError: path cannot be written.
        RuntimeError: the operators cannot express the model; with check, onnxruntime is too old or computes other
            logits than the model.

    >>> from linrope.models import LanguageModel, LanguageModelConfig
    >>> from linrope.models.export import export_onnx
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))
    >>> states = export_onnx(model, "model.onnx").empty(1)  # doctest: +SKIP
    """
    check_name("operators", operators, tuple(OPERATORS))
    check_sizes(tokens_per_call=tokens_per_call)
    _check_writable(Path(path))
    backend, oldest = OPERATORS[operators]
    for package in ("onnx", "onnxscript"):
        need(package, "linrope[export]")
    if check:
        _check_runtime(operators, oldest)
    module = TensorStates(model)
    # The model computes the same in both modes, but the exporter warns about training mode.
    module.training = False
    layers: list[Any] = [block.attention for block in module.model.decoding_parts().blocks]
    scaled = next((x.feature_map for x in layers if x.feature_map.log_scaled), None)
    if backend == "onnx" and scaled is not None:
        raise ValueError(
            f"operators={operators!r}: got feature_map={scaled}, whose running maximum is quadratic in ONNX; expected "
            "operators='portable'"
        )
    states = module.empty(2)
    tokens = torch.zeros(2, tokens_per_call or 9, dtype=torch.int64, device=states[0].device)
    free = {0: Dim.DYNAMIC}
    with _backend(layers, backend), torch.no_grad():
        with FakeTensorMode(
            allow_non_fake_inputs=True
        ) as fake:  # raises the error that the exporter would hide
            module(fake.from_tensor(tokens), [fake.from_tensor(x) for x in states])
        program = torch.onnx.export(
            module,
            (tokens, states),
            dynamo=True,
            verbose=verbose,
            input_names=["tokens", *module.names],
            output_names=["logits", *[f"next_{name}" for name in module.names]],
            dynamic_shapes=(free if tokens_per_call else free | {1: Dim.DYNAMIC}, [free for _ in states]),
        )
    assert program is not None
    if operators == "opset27":
        _use_opset_27(program.model)
    program.save(path)
    if check:
        _compare(module, path, tokens_per_call or 70)
    return module


def _check_writable(path: Path) -> None:
    """Raises OSError for a path that cannot be written, before the export, which takes seconds."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent}: no such folder")
    if path.is_dir():
        raise IsADirectoryError(f"{path}: got a folder, expected the name of a file")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise PermissionError(f"{path}: may not be written")


@contextmanager
def _backend(layers: list[Any], name: str) -> Iterator[None]:
    previous = [layer.backend for layer in layers]
    try:
        for layer in layers:
            layer.backend = name
        yield
    finally:
        for layer, backend in zip(layers, previous, strict=True):
            layer.backend = backend


def _use_opset_27(model: Any) -> None:
    """Turns onnxruntime's operator into ONNX's, which has the same inputs and attributes."""
    for node in model.graph:
        if node.domain == onnx.DOMAIN:
            node.domain = ""
    model.opset_imports.pop(onnx.DOMAIN)
    model.opset_imports[""] = 27


def _check_runtime(operators: str, oldest: str) -> None:
    version = need("onnxruntime", "linrope[export]").__version__
    numbers, needed = ([int(x) for x in re.findall(r"\d+", text)[:3]] for text in (version, oldest))
    if numbers < needed:
        raise RuntimeError(
            f"operators={operators!r}: got onnxruntime {version}, expected {oldest} or later, "
            "or check=False to write the file for another machine"
        )


@torch.no_grad()
def _compare(module: TensorStates, path: str | os.PathLike[str], n: int) -> None:
    """Raises RuntimeError unless the file computes the model's logits of two calls, to 1e-3 of the largest one."""
    session = need("onnxruntime", "linrope[export]").InferenceSession(
        path, providers=["CPUExecutionProvider"]
    )
    tokens = torch.arange(4 * n).view(2, 2 * n) * 7 % module.model.config.vocab_size
    got = expected = [x.cpu() for x in module.empty(2)]
    for piece in tokens.split(n, 1):
        feeds = zip(["tokens", *module.names], [piece, *got], strict=True)
        y, *got = (torch.from_numpy(x) for x in session.run(None, {name: x.numpy() for name, x in feeds}))
        logits, expected = module(piece.to(module.device), [x.to(module.device) for x in expected])
        error = (y - logits.cpu()).abs().max() / logits.abs().max().cpu()
        if not error <= 1e-3:
            raise RuntimeError(
                f"{os.fspath(path)}: its logits differ from the model's by {error:.1e} of the largest"
            )
