"""Each module that has weights is called: hooks run, and accelerate, FSDP and PEFT can bring or replace weights."""

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from linrope import feature_maps
from linrope.decode import why_not
from linrope.models import LanguageModel, LanguageModelConfig
from tests.layer.cases import ALL, every_module, inputs, make, numbers


def with_weights(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules that hold parameters or buffers themselves."""
    for name, module in model.named_modules():
        if any(True for _ in (*module.parameters(recurse=False), *module.buffers(recurse=False))):
            yield name, module


def uncalled(model: nn.Module, call, *arguments, **options) -> set[str]:
    """The modules with weights that a call of the model reads without calling them."""
    names = {name for name, _ in with_weights(model)}
    assert names
    handles = [
        module.register_forward_hook(lambda *_, name=name: names.discard(name))
        for name, module in with_weights(model)
    ]
    call(*arguments, **options)
    for handle in handles:
        handle.remove()
    return names


def offloaded(module: nn.Module) -> nn.Module:
    """A copy whose weights lie on the meta device except while the module that has them is called."""
    accelerate = pytest.importorskip("accelerate")
    return accelerate.cpu_offload(copy.deepcopy(module), torch.device("cpu"), offload_buffers=True)


@every_module
@torch.no_grad()
def test_a_layer_calls_every_module_that_has_weights(options) -> None:
    layer = make(**options)
    x = inputs(layer)
    state = layer(x[:, :5], return_state=True)[1] if layer.causal else None
    assert not uncalled(layer, layer, x)
    if state is not None:
        assert not uncalled(layer, layer, x[:, 5:6], state=state.donate(), return_state=True)


@every_module
def test_a_layer_with_offloaded_weights_computes_the_same(options) -> None:
    layer = make(**options)
    x, other = inputs(layer), offloaded(layer)
    assert all(parameter.is_meta for parameter in other.parameters())
    assert torch.equal(other(x), layer(x))
    if not layer.causal:
        return
    with torch.no_grad():
        _, state = layer(x[:, :7], return_state=True)
        _, same = other(x[:, :7], return_state=True)
        for i in (7, 8):
            y, state = layer(x[:, i : i + 1], state=state.donate(), return_state=True)
            z, same = other(x[:, i : i + 1], state=same.donate(), return_state=True)
            torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)  # only one layer takes mixer_step


@torch.no_grad()
def test_a_pool_receives_what_an_offloaded_layer_writes() -> None:
    layer = make(torch.float32, **ALL["block"])
    x, slots = inputs(layer), torch.tensor([2, 0])
    pool = layer(torch.cat((x, x)), return_state=True)[1]
    expected = pool.clone()
    layer(x[:, :1], state=expected.at(slots))
    offloaded(layer)(x[:, :1], state=pool.at(slots))
    for name, rows in expected.tensors().items():
        torch.testing.assert_close(pool.tensors()[name], rows, rtol=1e-5, atol=1e-5)


MODELS = {
    "block": {},
    "multi-value": {"num_value_heads": 4, "qk_norm": True},
    "hedgehog": {"feature_map": "hedgehog", "rotary": "selective"},
    "favor+": {"feature_map": "favor+", "decay": "learned", "forget_gate": True, "write_gate": "independent"},
    "softmax": {"attention": "softmax"},
}
every_model = pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)


def language_model(**options) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(**{"embed_dim": 32, "num_layers": 2, "num_heads": 2, **options}))


@every_model
def test_a_language_model_calls_every_module_and_computes_the_same_offloaded(options) -> None:
    model, tokens = language_model(**options), torch.randint(256, (2, 9))
    assert not uncalled(model, model, tokens)
    other = offloaded(model)
    assert torch.equal(other(tokens)[0], model(tokens)[0])
    with torch.no_grad():
        states, same = model(tokens[:, :8])[1], other(tokens[:, :8])[1]
        assert why_not(other, same) is not None
        y, z = other(tokens[:, 8:], same)[0], model(tokens[:, 8:], states)[0]
        torch.testing.assert_close(y, z, rtol=1e-5, atol=1e-5)


class Sees:
    """A hook that counts the calls of its module."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *_) -> None:
        self.calls += 1


@pytest.mark.parametrize("name", feature_maps.ELEMENTWISE)
def test_a_map_that_kernels_could_apply_is_called_if_it_has_hooks(name: str) -> None:
    layer = make(torch.float32, feature_map=name, normalize=feature_maps.make(name, 4).positive)
    x, hook = inputs(layer), Sees()
    y = layer(x)
    layer.feature_map.register_forward_hook(hook)
    assert_close(layer(x), y)
    assert hook.calls == 1


def test_an_operation_calls_a_map_with_weights_once() -> None:
    from linrope import linear_rope_attention, linear_rope_state

    fmap, hook = feature_maps.FavorPlus(4, num_features=8, seed=0), Sees()
    fmap.register_forward_hook(hook)
    q = numbers(1, 5, 2, 4)
    linear_rope_attention(q, q, q, feature_map=fmap)
    assert hook.calls == 1
    linear_rope_state(q, q, feature_map=fmap)
    assert hook.calls == 2


class Wrapper(nn.Module):
    """What tools put in a module's place: it passes on calls and attributes."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, *arguments, **options):
        return self.inner(*arguments, **options)


@every_module
def test_every_module_may_be_wrapped(options) -> None:
    layer = make(**options)
    x, y = inputs(layer), layer(inputs(layer))
    for name, child in list(layer.named_children()):
        setattr(layer, name, Wrapper(child))
    assert_close(layer(x), y)
    assert repr(layer).startswith("LinearRoPEAttention(\n  heads=")


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore:torch.quantize_per_tensor")
@every_module
def test_projections_may_be_quantized(options) -> None:
    layer = make(**{**options, "dtype": torch.float32})
    quantized = torch.ao.quantization.quantize_dynamic(layer, {nn.Linear})
    assert callable(quantized.k_proj.weight)  # a method: quantized projections have no tensor of that name
    for name in ("q_proj", "k_proj", "v_proj", "o_proj", "g_proj"):
        if getattr(layer, name) is not None:  # the same projections inside the layer that was not quantized
            getattr(layer, name).forward = getattr(quantized, name).forward
    x = inputs(layer)
    assert torch.equal(quantized(x), layer(x))
    assert repr(quantized).splitlines()[1] == repr(layer).splitlines()[1]
    if (decay := quantized.decay) is not None:
        assert torch.equal(decay, layer.decay)


@pytest.mark.filterwarnings("ignore:Unsupported layer type")  # what PEFT says of every RMS norm
def test_peft_saves_whole_modules_and_tunes_norms() -> None:
    peft = pytest.importorskip("peft")
    options = {**ALL["block"], "feature_map": "hedgehog", "qk_norm": True}
    layer = make(torch.float32, **options)
    x, y = inputs(layer), layer(inputs(layer)).detach()
    lora = peft.LoraConfig(
        target_modules=["q_proj"], modules_to_save=["feature_map", "short_conv", "forget_gate"]
    )
    norms = peft.LNTuningConfig(target_modules=["out_norm", "q_norm", "k_norm"])
    for config, trained in ((lora, "feature_map"), (norms, "out_norm")):
        model = peft.get_peft_model(nn.ModuleDict({"layer": copy.deepcopy(layer)}), config)
        tuned = model.base_model.model["layer"]
        assert_close(tuned(x), y)
        tuned(x).square().sum().backward()
        gradients = {name for name, p in tuned.named_parameters() if p.requires_grad and p.grad is not None}
        assert any(trained in name for name in gradients)


@pytest.fixture
def one_process(tmp_path) -> Iterator[None]:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
@pytest.mark.filterwarnings(
    "ignore:FSDP2-wrapped module .* returned a view tensor"
)  # as torch.nn.Linear does
@pytest.mark.parametrize("name", ["paired learned map", "all", "kimi delta attention"])
def test_fsdp_may_hold_every_module_as_a_unit(name: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    layer = make(**ALL[name])
    x, sharded = inputs(layer), copy.deepcopy(layer)
    mesh = init_device_mesh("cpu", (1,))
    for _, module in with_weights(sharded):
        if module is not sharded:
            fully_shard(module, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    y, expected = sharded(x), layer(x)
    assert torch.equal(y, expected)
    y.square().sum().backward()
    expected.square().sum().backward()
    for (name, a), b in zip(sharded.named_parameters(), layer.parameters(), strict=True):
        gradient: Tensor = a.grad.full_tensor()
        assert torch.equal(gradient, b.grad), name
