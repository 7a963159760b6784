"""Exported programs, in PyTorch and in onnxruntime, against the module itself."""

import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linrope import (
    LinearAttentionState,
    LinearRoPEAttention,
    Rotary,
    linear_rope_attention,
    linear_rope_state,
)
from linrope.backends import native
from linrope.common.private_names import FakeTensorMode
from linrope.layer.selective import ForgetGate
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.export import TensorStates
from linrope.ops import gated_norm
from tests.ops.cases import needs_native

# One process imports the exporter and onnxruntime: that of tests/models/test_export_onnx.py
in_onnx_s_process = pytest.mark.xdist_group("onnx")
pytestmark = [
    pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="programs are exported for the CPU"),
    # The exporter to ONNX itself copies an object of a class that PyTorch calls deprecated.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning"),
]
ANY = Dim.DYNAMIC


def make_model(**options: Any) -> LanguageModel:
    """With larger weights than a new model's, whose logits would all be alike."""
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "num_heads": 2, "num_kv_heads": 1, "num_layers": 1, **options}
    model = LanguageModel(LanguageModelConfig(**sizes)).eval()
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:  # with keys of size 5
            nn.init.normal_(weight, std=1.0 if "k_proj" in name else 0.2)
    return model


# The map's keys have a running maximum, whose graph has to be of any length, too.
GATED = {"forget_gate": {"longest": 64}, "rotary": "selective", "short_conv": 4, "feature_map": "softmax"}
KINDS = {
    "plain": {}, "decay": {"decay": "spread", "qk_norm": True}, "gated": GATED,
    "bare": {"forget_gate": False, "write_gate": None, "short_conv": None, "out_norm": False, "feed_forward": False},
}  # fmt: skip


def tokens_of(b: int, n: int) -> Tensor:
    return torch.randint(256, (b, n), generator=torch.Generator().manual_seed(b + n))


def assert_near(got: list[Tensor], expected: list[Tensor]) -> None:
    """Within 1e-6 of the largest entry, twice that after sums in another order: what float32 gives."""
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


def assert_as_exact(got: list[Tensor], own: list[Tensor], exact: list[Tensor]) -> None:
    """Not more than twice as far from float64 as the module itself, and 1e-6 of the largest entry."""
    for a, b, x in zip(got, own, exact, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        error, allowed = (a - x).abs().max(), 2 * (b - x).abs().max() + 1e-6 * x.abs().max()
        assert error <= allowed


@pytest.mark.parametrize(
    "name", [name if name == "gated" else pytest.param(name, marks=pytest.mark.long) for name in KINDS]
)
@torch.no_grad()
def test_an_exported_prefill_and_twenty_steps_are_the_module_s(name: str, tmp_path: Path) -> None:
    """Saved, loaded, and with a batch and a length that differ from those of the export."""
    model = make_model(**KINDS[name])
    module = TensorStates(model)
    empty, programs = module.empty(2), []
    for n, shape in ((9, {0: ANY, 1: ANY}), (1, {0: ANY})):  # a prompt, a step
        shapes = (shape, [{0: ANY} for _ in empty])
        program = torch.export.export(module, (tokens_of(2, n), empty), dynamic_shapes=shapes)
        own = [node for node in program.graph.nodes if "linrope.attend" in str(node.target)]
        assert len(own) == 1  # one operator per block
        torch.export.save(program, tmp_path / "program.pt2")
        programs.append(torch.export.load(tmp_path / "program.pt2").module())
    prefill, step = programs

    tokens, tensors, states = tokens_of(3, 150), module.empty(3), None
    wide, exact_states = deepcopy(model).double(), None
    for piece in tokens.split([130, *[1] * 20], 1):
        logits, tensors = (prefill if states is None else step)(piece, tensors)
        expected, states = model(piece, states)
        exact, exact_states = wide(piece, exact_states)
        leaves = (
            [y, *torch.utils._pytree.tree_leaves(s)] for y, s in ((expected, states), (exact, exact_states))
        )
        assert_as_exact([logits, *tensors], *leaves)
    assert tensors[module.names.index("position_0")].tolist() == [150] * 3


@torch.no_grad()
def test_a_saved_program_runs_in_a_process_that_imports_linrope(tmp_path: Path) -> None:
    layer = LinearRoPEAttention(16, 2).eval()
    x = torch.randn(2, 9, 16)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    torch.save(x, tmp_path / "x.pt")
    script = """
import sys, torch, linrope
from linrope.backends import native
from linrope.common.private_names import FakeTensorMode
if len(sys.argv) > 1:
    native.use_instruction_set(sys.argv[1])
program = torch.export.load("layer.pt2").module()
torch.save(program(torch.load("x.pt")).detach(), "y.pt")
"""
    chosen = [] if native.why_not() else [str(native.instruction_set())]  # each set rounds in its own way
    subprocess.run([sys.executable, "-c", script, *chosen], cwd=tmp_path, check=True)
    assert torch.equal(torch.load(tmp_path / "y.pt"), layer(x))


@torch.no_grad()
def test_a_masked_layer_is_exported_for_any_batch_and_length() -> None:
    """Two tokens and one sequence too, with what depends on the tokens before each."""
    options = {"feature_map": "softmax", "decay": "retnet", "short_conv": 4}
    layer = LinearRoPEAttention(16, 2, **options).eval()

    def inputs(b: int, n: int) -> tuple[Tensor, dict[str, Tensor]]:
        mask = torch.arange(n).expand(b, n) % 3 != 1
        return torch.randn(b, n, 16), {"key_mask": mask}

    x, more = inputs(2, 9)
    shapes = {"x": {0: ANY, 1: ANY}, "key_mask": {0: ANY, 1: ANY}}
    exported = torch.export.export(layer, (x,), more, dynamic_shapes=shapes).module()
    for b, n in ((1, 2), (3, 70)):
        x, more = inputs(b, n)
        assert_near([exported(x, **more)], [layer(x, **more)])


@torch.no_grad()
def test_sequences_begin_with_no_tokens_where_the_model_is_and_in_its_dtype() -> None:
    module = TensorStates(make_model(**GATED))
    assert module.names == [f"{name}_0" for name in ("kv", "z", "position", "angle", "log_scale", "conv")]
    module = TensorStates(make_model())
    assert all(tensor.shape[0] == 3 and not tensor.any() for tensor in module.empty(3))
    empty = module.double().empty(2)
    assert empty[0].dtype == module(tokens_of(2, 3), empty)[0].dtype == torch.float64
    assert {x.device.type for x in module.to("meta").empty(2)} == {"meta"}


def test_a_model_in_hugging_face_format_has_its_states_in_tensors() -> None:
    huggingface = pytest.importorskip("linrope.models.huggingface")
    sizes = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    model = huggingface.LinRopeForCausalLM(huggingface.LinRopeConfig(**sizes, num_attention_heads=2))
    module, tokens = TensorStates(model), tokens_of(2, 9)
    first, tensors = module(tokens[:, :5], module.empty(2))
    second, _ = module(tokens[:, 5:], tensors)
    torch.testing.assert_close(torch.cat((first, second), 1), model(tokens).logits, rtol=1e-4, atol=1e-5)


def test_another_model_is_refused_by_name() -> None:
    with pytest.raises(
        TypeError,
        match=r"model: got Linear, expected a LanguageModel or a LinRopeForCausalLM; others export by",
    ):
        TensorStates(nn.Linear(2, 2))


def in_onnxruntime(
    module: nn.Module, inputs: tuple[Tensor, ...], path: Path, **options: Any
) -> Callable[..., list[Tensor]]:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime", minversion="1.29")
    torch.onnx.export(module.eval(), inputs, path, dynamo=True, verbose=False, **options)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [entry.name for entry in session.get_inputs()]

    def run(*inputs: Tensor) -> list[Tensor]:
        named = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
        return [torch.from_numpy(y) for y in session.run(None, named)]

    return run


class Exact(nn.Module):
    """The parts of a layer that work with numbers near 1 and near 0."""

    def __init__(self) -> None:
        super().__init__()
        self.forget = ForgetGate(16, 8)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *self.forget(x, writes=True), gated_norm(v, self.weight, eps=1e-12)


@pytest.mark.long  # tests/models/test_export_onnx.py sees lost digits in z and in the logits of a first byte
@torch.no_grad()
def test_onnx_keeps_the_digits_of_gates_and_of_the_norm_of_small_outputs(tmp_path: Path) -> None:
    """ONNX has no expm1 and no logsigmoid, and the exporter drops a sum with 1e-12."""
    module, sizes = Exact().eval(), torch.tensor([0, 1e-7, 1e-6, 1e-5, 1, 1, 1, 1])
    x, v = torch.randn(2, 9, 16), torch.randn(2, 9, 8, 4) * sizes[:, None]
    expected = Exact().double()
    expected.load_state_dict(module.state_dict())
    got = in_onnxruntime(module, (x, v), tmp_path / "parts.onnx")(x, v)
    for a, b in zip(got, expected(x.double(), v.double()), strict=True):
        torch.testing.assert_close(a.double(), b, rtol=3e-6, atol=0)


class DeltaRule(nn.Module):
    def __init__(self, backend: str, gated: bool = True) -> None:
        super().__init__()
        self.backend, self.gated, self.rotary = backend, gated, Rotary(8, layout="half")
        k, v = torch.zeros(1, 1, 2, 8), torch.zeros(1, 1, 2, 6)
        self.identity = linear_rope_state(k, v, feature_map=None, rotary=self.rotary).identity

    def forward(self, q: Tensor, k: Tensor, v: Tensor, erase: Tensor, a: Tensor, kv: Tensor) -> list[Tensor]:
        z, position = kv.new_zeros(kv.shape[:3]), torch.full(kv.shape[:1], 1000)
        out, state = linear_rope_attention(
            q, k, v, feature_map=None, normalize=False, rotary=self.rotary, erase=erase, write=erase.square(),
            log_decay=a if self.gated else None, state=LinearAttentionState(kv, z, position, self.identity),
            return_state=True, backend=self.backend,
        )  # fmt: skip
        return [out, state.kv]


@torch.no_grad()
def test_a_program_of_the_delta_rule_takes_any_batch_and_length() -> None:
    module = DeltaRule("auto")

    def inputs(b: int, n: int) -> tuple[Tensor, ...]:
        q, k, v = torch.randn(b, n, 4, 8), torch.randn(b, n, 2, 8), torch.randn(b, n, 2, 6)
        return q, k, v, torch.rand(b, n, 2) / 20, -torch.rand(b, n, 2), torch.randn(b, 2, 8, 6)

    shapes = (*[{0: ANY, 1: ANY}] * 5, {0: ANY})
    program = torch.export.export(module, inputs(2, 9), dynamic_shapes=shapes).module()
    for b, n in ((1, 1), (3, 150)):
        tensors = inputs(b, n)
        assert_near(program(*tensors), module(*tensors))


@in_onnx_s_process
@pytest.mark.parametrize(
    ("backend", "gated"),
    [("auto", True), ("onnx", True), pytest.param("onnx", False, marks=pytest.mark.long)],
)
@torch.no_grad()
def test_onnxruntime_computes_the_delta_rule(backend: str, gated: bool, tmp_path: Path) -> None:
    """With keys that are nearly equal, erase of 0 and of 2, closed gates, and a state. "auto": plain operations."""

    def problem(b: int, n: int) -> tuple[Tensor, ...]:
        q, k, v = torch.randn(b, n, 4, 8), torch.randn(b, n, 2, 8), torch.randn(b, n, 2, 6)
        k = nn.functional.normalize(k[:, :1] + k * torch.tensor([1, 0.01])[:, None], dim=-1)
        erase, a = 2 * torch.rand(b, n, 2), -torch.rand(b, n, 2) / 3
        erase[:, ::5], erase[:, 1::7], a[:, 3::11] = 0, 2 - erase[:, 1::7] / 100, -30
        return q, k, v, erase, a, torch.randn(b, 2, 8, 6)

    shapes = (*[{0: ANY, 1: ANY}] * 5, {0: ANY})
    module, oracle = DeltaRule(backend, gated), DeltaRule("reference", gated)
    run = in_onnxruntime(module, problem(2, 9), tmp_path / "delta.onnx", dynamic_shapes=shapes)
    for b, n in ((1, 1), (3, 150)):
        inputs = problem(b, n)
        for got, expected in zip(run(*inputs), oracle(*(x.double() for x in inputs)), strict=True):
            assert (got - expected).abs().max() <= 2e-6 * expected.abs().max()


@pytest.mark.long
@torch.no_grad()
def test_onnxruntime_computes_bidirectional_attention_on_a_grid(tmp_path: Path) -> None:
    layer = LinearRoPEAttention(16, 2, causal=False, rotary={"axes": 2}, backend="reference").eval()
    x, places = torch.randn(2, 6, 16), torch.cartesian_prod(torch.arange(2), torch.arange(3))
    shapes = {"x": {0: ANY, 1: ANY}, "positions": {0: ANY}}
    options = {"kwargs": {"positions": places}, "dynamic_shapes": shapes}
    run = in_onnxruntime(layer, (x,), tmp_path / "layer.onnx", **options)
    x, places = torch.randn(3, 20, 16), torch.cartesian_prod(torch.arange(4), torch.arange(5))
    assert_near(run(x, places), [layer(x, positions=places)])


class PerUnit(nn.Module):
    """Attention whose features decay at their own rates."""

    def __init__(self, backend: str, erase: bool) -> None:
        super().__init__()
        self.backend, self.erase, self.rotary = backend, erase, Rotary(8, rotary_dim=4)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        options: dict[str, Any] = {"rotary": self.rotary, "log_decay": log_decay}
        if self.erase:
            k = k / k.norm(dim=-1, keepdim=True)
            options |= {"feature_map": None, "normalize": False, "erase": v[..., 0].sigmoid()}
        out, state = linear_rope_attention(q, k, v, **options, return_state=True, backend=self.backend)
        return out, state.kv, state.z


@in_onnx_s_process
@pytest.mark.parametrize(
    ("backend", "erase"),
    [("onnx", False), pytest.param("reference", True, marks=pytest.mark.long)],
)
@torch.no_grad()
def test_onnxruntime_computes_a_decay_per_feature(backend: str, erase: bool, tmp_path: Path) -> None:
    def inputs(n: int) -> tuple[Tensor, ...]:
        return *torch.randn(3, 2, n, 2, 8).unbind(), -5 * torch.rand(2, n, 2, 6)

    module, given = PerUnit(backend, erase), inputs(90)
    run = in_onnxruntime(module, inputs(6), tmp_path / "x.onnx", dynamic_shapes=({1: ANY},) * 4)
    assert_near(run(*given), [*PerUnit("eager", erase)(*given)])


@in_onnx_s_process
def test_torch_onnx_export_of_another_backend_names_what_can_be_exported(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    layer, x = LinearRoPEAttention(16, 2, backend="eager").eval(), torch.randn(2, 6, 16)
    with pytest.raises(Exception, match=r"backend='eager': ONNX has .* expected 'reference' or 'onnx'"):
        torch.onnx.export(layer, (x,), tmp_path / "layer.onnx", dynamo=True, verbose=False)


@needs_native
def test_torch_onnx_export_of_a_fused_norm_names_what_can_be_exported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    with FakeTensorMode(), pytest.raises(RuntimeError, match=r"'native': ONNX has no .* expected 'eager'"):
        gated_norm(torch.randn(2, 6, 2, 4), backend="native")
