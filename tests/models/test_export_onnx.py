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
# The softmax map has a running maximum over the keys, and its graph must accept any length.
GATED = {"forget_gate": {"longest": 64}, "rotary": "selective", "short_conv": 4, "feature_map": "softmax"}
GROUPED = {**BARE, "num_kv_heads": 1, "decay": "spread", "rotary": {"xpos": 64}}
OTHERS = [
    {"num_value_heads": 4, "rotary": "selective", "out_norm": False, "qk_norm": True},
    {"normalize": False, "decay": "learned", "out_norm": "all", "skip": "before", "feature_map": "hedgehog"},
    {"rotary": None, "out_norm": False, "write_gate": "independent", "feature_map": "relu2"},
    {"erase_gate": {"name": "tied", "largest": 2}},
]
KIMI = {"erase_gate": "tied", "forget_gate": {"per": "feature"}}


class Exported(NamedTuple):
    """A model, its file, and the file in onnxruntime."""

    module: TensorStates
    path: Path
    session: object

    def __call__(self, tokens: Tensor, states: list[Tensor], *pieces: int) -> list[Tensor]:
        """The logits of the tokens, in pieces of these lengths, and the states after them."""
        logits = []
        for piece in tokens.split(pieces or (tokens.shape[1],), 1):
            feeds = zip(["tokens", *self.module.names], [piece, *states], strict=True)
            y, *states = map(torch.from_numpy, self.session.run(None, {name: x.numpy() for name, x in feeds}))
            logits.append(y)
        return [torch.cat(logits, 1), *states]

    def expected(self, tokens: Tensor, states: list[Tensor]) -> list[Tensor]:
        logits, states = self.module(tokens, states)
        return [logits, *states]


def make_model(**options) -> LanguageModel:
    torch.manual_seed(0)
    sizes = {"embed_dim": 32, "num_heads": 2, "num_layers": 1, "feed_forward": False}
    return LanguageModel(LanguageModelConfig(**sizes | options))


def export(model: LanguageModel, path: Path, **options) -> Exported:
    module = export_onnx(model, path, **options)
    return Exported(module, path, onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    return export(make_model(), tmp_path_factory.mktemp("onnx") / "model.onnx")


def tokens_of(b: int, n: int) -> Tensor:
    return torch.randint(256, (b, n), generator=torch.Generator().manual_seed(b + n))


def assert_near(got: list[Tensor], expected: list[Tensor], part: float = 1e-5) -> None:
    """Asserts that errors are at most this part of the largest entry."""
    for x, y in zip(got, expected, strict=True):
        assert x.shape == y.shape
        assert (x - y).abs().max() <= part * y.abs().max()


@torch.no_grad()
def test_4096_tokens_are_the_model_s(exported: Exported) -> None:
    """Those of the model itself, and those of the model in float64."""
    tokens = tokens_of(2, 4096)
    got = exported(tokens, exported.module.empty(2))
    oracle = TensorStates(copy.deepcopy(exported.module.model).double())
    for module in (exported.module, oracle):
        logits, states = module(tokens, module.empty(2))
        assert_near(got, [logits, *states])
    z = exported.module.names.index("z_0")
    assert_near([got[1 + z]], [states[z]], 1e-6)


@torch.no_grad()
def test_pieces_and_steps_give_what_one_call_gives(exported: Exported) -> None:
    """Any batch and any length, one token included, with positions near 2^31."""
    module, tokens = exported.module, tokens_of(3, 180)
    begin = module.empty(3)
    begin[module.names.index("position_0")] = torch.tensor([0, 1000, 2**31 - 180])
    whole = exported.expected(tokens, begin)
    assert_near(exported(tokens, begin, 1, 100, 2, 57, *[1] * 20), whole)
    assert_near(exported(tokens[:1], [x[:1] for x in begin])[:1], [whole[0][:1]])


@pytest.mark.long  # docs/export.md, whose code make test runs, has such an export
@pytest.mark.parametrize("options", [{"decay": "spread", "qk_norm": True}, GATED, KIMI], ids=",".join)
@torch.no_grad()
def test_a_portable_file_computes_a_prompt_in_pieces_and_twenty_steps(options, tmp_path: Path) -> None:
    model = make_model(num_kv_heads=1, **options)
    model.blocks[0].attention.k_proj.weight *= 5  # a new model's logits of the map would all be alike
    exported = export(model, tmp_path / "model.onnx", operators="portable")
    for position in (0, 2**31 - 90):
        begin, tokens = exported.module.empty(3), tokens_of(3, 90)
        begin[exported.module.names.index("position_0")] = torch.full((3,), position)
        expected = exported.expected(tokens, begin)
        assert_near(exported(tokens, begin, 32, 32, 6, *[1] * 20), expected, 2e-6)


@pytest.mark.long
@torch.no_grad()
def test_a_model_in_hugging_face_format_is_exported_with_its_progress(tmp_path: Path, capsys) -> None:
    huggingface = pytest.importorskip("linrope.models.huggingface")
    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1}
    model = huggingface.LinRopeForCausalLM(huggingface.LinRopeConfig(**sizes, num_attention_heads=2))
    exported, tokens = export(model, tmp_path / "model.onnx"), tokens_of(2, 50)
    assert_near(exported(tokens, exported.module.empty(2), 40, 10)[:1], [model(tokens).logits])
    assert "Translate the graph into ONNX" in capsys.readouterr().out


@torch.no_grad()
def test_every_first_byte_is_the_model_s(exported: Exported) -> None:
    """After one byte the slowest heads have tiny outputs, which a norm enlarges."""
    tokens, states = torch.arange(256)[:, None], exported.module.empty(256)
    assert_near(exported(tokens, states)[:1], exported.expected(tokens, states)[:1])


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
    tokens, empty = tokens_of(2, 600), exported.module.empty(2)
    assert_near(exported(tokens, empty, 300, 300), exported.expected(tokens, empty))


@pytest.mark.long
@pytest.mark.parametrize("options", [GROUPED, *OTHERS], ids=lambda options: ",".join(options))
@torch.no_grad()
def test_4096_tokens_with_other_options_are_the_model_s(options, tmp_path: Path) -> None:
    exported = export(make_model(**options), tmp_path / "model.onnx")
    tokens, empty = tokens_of(2, 4096), exported.module.empty(2)
    assert_near(exported(tokens, empty, 4000, 96), exported.expected(tokens, empty))


@pytest.mark.parametrize(
    ("make", "options", "error", "expected"),
    [
        (make_model, {"operators": "onnx"}, ValueError, "'onnx': expected one of onnxruntime, opset27, portable"),
        (make_model, {"tokens_per_call": 0}, ValueError, "tokens_per_call=0: expected at least 1"),
        (lambda: make_model(attention="softmax"), {"operators": "portable"}, ValueError, "with a KeyValueState"),
        (lambda: make_model(feature_map="softmax"), {}, ValueError, "running maximum.* operators='portable'"),
        (lambda: make_model().bfloat16(), {}, RuntimeError, r"cannot run: torch\.bfloat16: ONNX's .* torch\.float32"),
    ],
)  # fmt: skip
def test_what_it_cannot_export_raises_the_reason(make, options, error, expected, tmp_path) -> None:
    model = make()
    with pytest.raises(error, match=expected):
        export_onnx(model, tmp_path / "model.onnx", **options)
    assert not list(tmp_path.iterdir())
    assert getattr(model.blocks[0].attention, "backend", "auto") == "auto"


def test_a_path_that_cannot_be_written_raises_before_the_export(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(torch.onnx, "export", None)
    for path in (tmp_path, tmp_path / "none" / "model.onnx"):
        with pytest.raises(OSError, match=f"{path}: got a folder|{path.parent}: no such folder"):
            export_onnx(make_model(), path)
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with pytest.raises(PermissionError, match="may not be written"):
        export_onnx(make_model(), tmp_path / "model.onnx")


def test_a_missing_package_and_an_old_onnxruntime_are_named(tmp_path, monkeypatch) -> None:
    model, path = make_model(), tmp_path / "model.onnx"
    monkeypatch.setattr(onnxruntime, "__version__", "1.28.0")
    old = r"got onnxruntime 1\.28\.0, expected 1\.29 or later, or check=False"
    with pytest.raises(RuntimeError, match=old):
        export_onnx(model, path)
    for package in ("onnxruntime", "onnxscript"):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ModuleNotFoundError, match=rf"{package} is missing; install linrope\[export\]"):
            export_onnx(model, path)
    assert not path.exists()
