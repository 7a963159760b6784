"""Exported programs, in PyTorch and in onnxruntime, against the module itself."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

from linrope import LinearRoPEAttention
from linrope.backends import native
from linrope.layer.operators import gated_norm
from linrope.layer.selective import ForgetGate, WriteGate
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.export import TensorStates

pytestmark = pytest.mark.skipif(
    torch.get_default_device().type != "cpu", reason="the programs are exported for the CPU"
)
ANY = Dim.DYNAMIC


def make_model(**sizes) -> LanguageModel:
    """With larger weights than a new model's, whose logits would all be alike."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(embed_dim=32, num_heads=2, num_kv_heads=1, **sizes)).eval()
    for name, weight in model.named_parameters():
        if weight.ndim >= 2:  # with keys of size 5
            nn.init.normal_(weight, std=1.0 if "k_proj" in name else 0.2)
    return model


# The map's keys have a running maximum, whose graph has to be of any length, too.
GATED = {"forget_gate": {"longest": 64}, "rotary": "selective", "short_conv": 4, "feature_map": "softmax"}
BARE = {
    "forget_gate": False,
    "write_gate": None,
    "short_conv": None,
    "out_norm": False,
    "feed_forward": False,
}
KINDS = {"plain": {}, "decay": {"decay": "spread", "qk_norm": True}, "gated": GATED, "bare": BARE}


def each_kind(quick: str | None) -> pytest.MarkDecorator:
    """Each kind of model. All but the quick one are left to make test-long: an export takes many seconds."""
    marks = {name: () if name == quick else pytest.mark.long for name in KINDS}
    kinds = [pytest.param(options, id=name, marks=marks[name]) for name, options in KINDS.items()]
    return pytest.mark.parametrize("options", kinds)


def tokens_of(b: int, n: int) -> Tensor:
    return torch.randint(256, (b, n), generator=torch.Generator().manual_seed(b + n))


def assert_near(got: list[Tensor], expected: list[Tensor]) -> None:
    """Within 1e-6 of the largest entry, twice that after sums in another order: what float32 gives."""
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == b.dtype
        assert a.shape == b.shape
        assert (a - b).abs().max() <= 2e-6 * b.abs().max()


@each_kind(quick="gated")
@torch.no_grad()
def test_an_exported_prefill_and_twenty_steps_are_the_module_s(options, tmp_path: Path) -> None:
    """Saved, loaded, and with a batch and a length that differ from those of the export."""
    model = make_model(num_layers=1, **options)
    module = TensorStates(model)
    tensors = module.empty(2)
    shapes = [{0: ANY} for _ in tensors]
    programs = {
        "prefill": torch.export.export(
            module, (tokens_of(2, 9), tensors), dynamic_shapes=({0: ANY, 1: ANY}, shapes)
        ),
        "step": torch.export.export(module, (tokens_of(2, 1), tensors), dynamic_shapes=({0: ANY}, shapes)),
    }
    for name, program in programs.items():
        own = [node for node in program.graph.nodes if "linrope.attend" in str(node.target)]
        assert len(own) == 1  # one operator per block
        torch.export.save(program, tmp_path / f"{name}.pt2")
    prefill, step = (torch.export.load(tmp_path / f"{name}.pt2").module() for name in programs)

    tokens = tokens_of(3, 150)
    logits, tensors = prefill(tokens[:, :130], module.empty(3))
    expected, states = model(tokens[:, :130])
    assert_near([logits, *tensors], [expected, *torch.utils._pytree.tree_leaves(states)])
    for i in range(130, 150):
        logits, tensors = step(tokens[:, i : i + 1], tensors)
        expected, states = model(tokens[:, i : i + 1], states)
        assert_near([logits, *tensors], [expected, *torch.utils._pytree.tree_leaves(states)])
    assert tensors[module.names.index("position_0")].tolist() == [150] * 3


@torch.no_grad()
def test_empty_states_follow_the_model() -> None:
    module = TensorStates(make_model(num_layers=1))
    assert module(tokens_of(2, 3), module.double().empty(2))[0].dtype == torch.float64
    assert {x.device.type for x in module.to("meta").empty(2)} == {"meta"}


@torch.no_grad()
def test_a_saved_program_runs_in_a_process_that_imports_linrope(tmp_path: Path) -> None:
    layer = LinearRoPEAttention(16, 2).eval()
    x = torch.randn(2, 9, 16)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    torch.save(x, tmp_path / "x.pt")
    script = (
        "import sys, torch, linrope\n"
        "from linrope.backends import native\n"
        "if len(sys.argv) > 1:\n"
        "    native.use_instruction_set(sys.argv[1])\n"
        "program = torch.export.load('layer.pt2').module()\n"
        "torch.save(program(torch.load('x.pt')).detach(), 'y.pt')\n"
    )
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


def test_sequences_begin_with_no_tokens() -> None:
    module = TensorStates(make_model(num_layers=1))
    assert module.names == ["kv_0", "z_0", "position_0", "conv_0"]
    assert TensorStates(make_model(num_layers=2)).names[4:] == ["kv_1", "z_1", "position_1", "conv_1"]
    assert TensorStates(make_model(num_layers=1, **GATED)).names[3:] == ["angle_0", "log_scale_0", "conv_0"]
    assert all(tensor.shape[0] == 3 and not tensor.any() for tensor in module.empty(3))


def test_a_cache_that_grows_is_refused() -> None:
    model = LanguageModel(LanguageModelConfig(embed_dim=32, num_heads=2, num_layers=1, attention="softmax"))
    with pytest.raises(ValueError, match=r"model: got attention='softmax', expected 'linear'"):
        TensorStates(model)


def run_onnx(session, *inputs: Tensor) -> list[Tensor]:
    named = zip([entry.name for entry in session.get_inputs()], inputs, strict=True)
    return [torch.from_numpy(y) for y in session.run(None, {name: x.numpy() for name, x in named})]


# The exporter itself copies an object of a class that PyTorch calls deprecated.
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")
@each_kind(quick=None)  # docs/serving.md, whose code make test runs, has such an export
@torch.no_grad()
def test_onnxruntime_computes_prefill_in_chunks_and_twenty_steps(options, tmp_path: Path) -> None:
    """One file with any batch and any length, one token included; positions go up to 2^31."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = make_model(num_layers=1, **options)
    model.blocks[0].attention.backend = "reference"
    module = TensorStates(model).eval()
    tensors = module.empty(2)
    torch.onnx.export(
        module, (tokens_of(2, 9), tensors), tmp_path / "model.onnx", dynamo=True, verbose=False,
        input_names=["tokens", *module.names],
        output_names=["logits", *[f"next_{name}" for name in module.names]],
        dynamic_shapes=({0: ANY, 1: ANY}, [{0: ANY} for _ in tensors]),
    )  # fmt: skip
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    assert [entry.name for entry in session.get_inputs()] == ["tokens", *module.names]

    for position in (0, 2**31 - 90):
        begin = module.empty(3)
        begin[module.names.index("position_0")] = torch.full((3,), position)
        tokens = tokens_of(3, 90)
        whole, last = module(tokens, begin)
        logits, tensors = [], begin
        for chunk in tokens.split([32, 32, 6, *[1] * 20], 1):
            y, *tensors = run_onnx(session, chunk, *tensors)
            logits.append(y)
        assert_near([torch.cat(logits, 1), *tensors], [whole, *last])


class Exact(nn.Module):
    """The parts of a layer that work with numbers near 1 and near 0."""

    def __init__(self) -> None:
        super().__init__()
        self.forget, self.write = ForgetGate(16, 8), WriteGate(16, 8, tied=True)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        a = self.forget(x)
        return a, self.write(x, a), gated_norm(v, self.weight, eps=1e-12)


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")
@torch.no_grad()
def test_onnx_keeps_the_digits_of_gates_and_of_the_norm_of_small_outputs(tmp_path: Path) -> None:
    """ONNX has no expm1 and no logsigmoid, and the exporter drops a sum with 1e-12."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    module = Exact().eval()
    x, v = (
        torch.randn(2, 9, 16),
        torch.randn(2, 9, 8, 4) * torch.tensor([0, 1e-7, 1e-6, 1e-5, 1, 1, 1, 1])[:, None],
    )
    torch.onnx.export(module, (x, v), tmp_path / "parts.onnx", dynamo=True, verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "parts.onnx", providers=["CPUExecutionProvider"])
    expected = Exact().double()
    expected.load_state_dict(module.state_dict())
    for got, y in zip(run_onnx(session, x, v), expected(x.double(), v.double()), strict=True):
        torch.testing.assert_close(got.double(), y, rtol=3e-6, atol=0)


@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning")
@pytest.mark.long
@torch.no_grad()
def test_onnxruntime_computes_bidirectional_attention_on_a_grid(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")
    layer = LinearRoPEAttention(16, 2, causal=False, rotary={"axes": 2}, backend="reference").eval()
    x, places = torch.randn(2, 6, 16), torch.cartesian_prod(torch.arange(2), torch.arange(3))
    torch.onnx.export(
        layer, (x,), tmp_path / "layer.onnx", kwargs={"positions": places}, dynamo=True, verbose=False,
        dynamic_shapes={"x": {0: ANY, 1: ANY}, "positions": {0: ANY}},
    )  # fmt: skip
    session = onnxruntime.InferenceSession(tmp_path / "layer.onnx", providers=["CPUExecutionProvider"])
    x, places = torch.randn(3, 20, 16), torch.cartesian_prod(torch.arange(4), torch.arange(5))
    assert_near(run_onnx(session, x, places), [layer(x, positions=places)])
