"""``export_onnx``: its files in onnxruntime against the model, and what it refuses."""

import copy
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.export import TensorStates, export_onnx

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime", minversion="1.29")
pytestmark = [
    pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="onnxruntime's CPU kernels"),
    # The exporter itself copies an object of a class that PyTorch calls deprecated.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.xdist_group("onnx"),  # one process makes the file that most tests read
]

BARE = {"forget_gate": False, "write_gate": None, "short_conv": None, "out_norm": False}
GROUPED = {**BARE, "num_kv_heads": 1, "decay": "spread", "rotary": {"xpos": 64}}
OTHERS = [
    {"num_value_heads": 4, "rotary": "selective", "out_norm": False, "qk_norm": True},
    {**BARE, "rotary": "half"},
    {"normalize": False, "decay": "learned", "out_norm": "all", "skip": "before", "feature_map": "hedgehog"},
    {"rotary": None, "out_norm": False, "write_gate": "independent", "feature_map": "relu2"},
]


class Exported(NamedTuple):
    """A model, its file, and the file in onnxruntime: tokens and states -> logits and states."""

    module: TensorStates
    path: Path
    session: object

    def __call__(self, tokens: Tensor, states: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        feeds = zip(["tokens", *self.module.names], [tokens, *states], strict=True)
        logits, *states = self.session.run(None, {name: x.numpy() for name, x in feeds})
        return torch.from_numpy(logits), [torch.from_numpy(x) for x in states]


def make_model(**options) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "num_heads": 2, "num_layers": 1, "feed_forward": False}
    return LanguageModel(LanguageModelConfig(**sizes, **options))


def export(model: LanguageModel, path: Path, **options) -> Exported:
    module = export_onnx(model, path, **options)
    return Exported(module, path, onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(make_model(), tmp_path_factory.mktemp("onnx") / "model.onnx")


def tokens_of(b: int, n: int) -> Tensor:
    return torch.randint(256, (b, n), generator=torch.Generator().manual_seed(b + n))


def assert_near(got: Tensor, expected: Tensor) -> None:
    """Within 1e-5 of the largest entry."""
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= 1e-5 * expected.abs().max()


@torch.no_grad()
def test_4096_tokens_are_the_model_s(exported: Exported) -> None:
    """Those of the model itself, and those of the model in float64."""
    tokens = tokens_of(2, 4096)
    logits, states = exported(tokens, exported.module.empty(2))
    oracle = TensorStates(copy.deepcopy(exported.module.model).double())
    for module in (exported.module, oracle):
        expected, last = module(tokens, module.empty(2))
        assert_near(logits, expected)
        for x, y in zip(states, last, strict=True):
            assert_near(x, y)
    z = exported.module.names.index("z_0")
    assert (states[z] - last[z]).abs().max() <= 1e-6 * last[z].abs().max()


@torch.no_grad()
def test_pieces_and_steps_give_what_one_call_gives(exported: Exported) -> None:
    """Any batch and any length, one token included, with positions near 2^31."""
    module, tokens = exported.module, tokens_of(3, 180)
    begin = module.empty(3)
    begin[module.names.index("position_0")] = torch.tensor([0, 1000, 2**31 - 180])
    whole, last = module(tokens, begin)
    parts, states = [], begin
    for piece in tokens.split([1, 100, 2, 57, *[1] * 20], 1):
        logits, states = exported(piece, states)
        parts.append(logits)
    for x, y in zip([torch.cat(parts, 1), *states], [whole, *last], strict=True):
        assert_near(x, y)
    one, _ = exported(tokens[:1], [x[:1] for x in begin])
    assert_near(one, whole[:1])


@torch.no_grad()
def test_every_first_byte_is_the_model_s(exported: Exported) -> None:
    """The slowest heads' outputs are tiny then, and a norm makes them large."""
    tokens, states = torch.arange(256)[:, None], exported.module.empty(256)
    assert_near(exported(tokens, states)[0], exported.module(tokens, states)[0])


@torch.no_grad()
def test_its_states_continue_in_the_model(exported: Exported) -> None:
    module, tokens = exported.module, tokens_of(2, 60)
    _, states = exported(tokens[:, :50], module.empty(2))
    assert_near(module(tokens[:, 50:], states)[0], module(tokens, module.empty(2))[0][:, 50:])


def test_a_layer_s_attention_is_one_node_and_the_model_stays_as_it_was(exported: Exported) -> None:
    """One, because the norm of the heads replaces the normalizer."""
    nodes = [node for node in onnx.load(exported.path).graph.node if node.op_type == "LinearAttention"]
    assert [node.domain for node in nodes] == ["com.microsoft"]
    assert [block.attention.backend for block in exported.module.model.blocks] == ["auto"]
    assert exported.module.model.training


@pytest.mark.long
@torch.no_grad()
def test_opset_27_has_the_same_operator(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a file with one length, for grouped heads, decay per feature, and the normalizer in a node of its own."""
    monkeypatch.setenv("ALLOW_RELEASED_ONNX_OPSET_ONLY", "0")  # for onnxruntime 1.31, which calls it a draft
    options = {"operators": "opset27", "tokens_per_call": 300, "check": False}
    exported = export(make_model(**GROUPED), tmp_path / "model.onnx", **options)
    model = onnx.load(exported.path)
    onnx.checker.check_model(model, full_check=True)
    assert [(x.domain, x.version) for x in model.opset_import] == [("", 27)]
    assert [x.domain for x in model.graph.node if x.op_type == "LinearAttention"] == ["", ""]
    tokens, states = tokens_of(2, 600), exported.module.empty(2)
    expected, _ = exported.module(tokens, states)
    for piece, y in zip(tokens.split(300, 1), expected.split(300, 1), strict=True):
        logits, states = exported(piece, states)
        assert_near(logits, y)


@pytest.mark.long
@pytest.mark.parametrize("options", [GROUPED, *OTHERS], ids=lambda options: ",".join(options))
@torch.no_grad()
def test_4096_tokens_with_other_options_are_the_model_s(options, tmp_path: Path) -> None:
    exported = export(make_model(**options), tmp_path / "model.onnx")
    tokens, states = tokens_of(2, 4096), exported.module.empty(2)
    expected, _ = exported.module(tokens, states)
    for piece, y in zip(tokens.split([4000, 96], 1), expected.split([4000, 96], 1), strict=True):
        logits, states = exported(piece, states)
        assert_near(logits, y)


@pytest.mark.parametrize(
    ("config", "operators", "error", "expected"),
    [
        ({}, "onnx", ValueError, r"operators='onnx': expected one of onnxruntime, opset27, portable"),
        ({"attention": "softmax"}, "portable", ValueError, r"model: got attention='softmax'"),
        ({"feature_map": "softmax"}, "onnxruntime", ValueError, r"running maximum.* operators='portable'"),
    ],
)
def test_models_that_it_cannot_export_raise_the_reason(config, operators, error, expected, tmp_path) -> None:
    with pytest.raises(error, match=expected):
        export_onnx(make_model(**config), tmp_path / "model.onnx", operators=operators)
    assert not list(tmp_path.iterdir())


def test_a_call_has_tokens(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokens_per_call=0: expected at least 1"):
        export_onnx(make_model(), tmp_path / "model.onnx", tokens_per_call=0)


def test_only_float32_has_the_operator(tmp_path: Path) -> None:
    model = make_model().bfloat16()
    with pytest.raises(
        RuntimeError, match=r"cannot run: torch\.bfloat16: ONNX's operator is for torch\.float32"
    ):
        export_onnx(model, tmp_path / "model.onnx")
    assert model.blocks[0].attention.backend == "auto"


def test_a_missing_package_and_an_old_onnxruntime_are_named(tmp_path, monkeypatch) -> None:
    model, path = make_model(), tmp_path / "model.onnx"
    monkeypatch.setattr(onnxruntime, "__version__", "1.28.0")
    with pytest.raises(
        RuntimeError, match=r"got onnxruntime 1\.28\.0, expected 1\.29 or later, or check=False"
    ):
        export_onnx(model, path)
    for package in ("onnxruntime", "onnxscript"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=rf"{package} is missing; install linrope\[export\]"):
            export_onnx(model, path)
    assert not path.exists()
