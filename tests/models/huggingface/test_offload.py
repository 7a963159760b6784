"""Models whose weights lie in memory or on disk until a module is called, as with accelerate and device_map."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM
from linrope.models.huggingface.conversion import convert
from tests.models.huggingface.test_conversion import llama

accelerate = pytest.importorskip("accelerate")
# transformers 5.17 takes "meta" for the device of a model that is offloaded as a whole.
pytestmark = pytest.mark.filterwarnings(
    "ignore:You are calling .generate.. with the `input_ids` being on a device"
)

OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no convolution": {"short_conv": None, "forget_gate": False, "decay": "spread"},
    "learned decay": {"decay": "learned", "skip": "before", "gate": "before"},
    "selective": {"selective_rope": True, "qk_norm": True},
    "hedgehog": {"feature_map": "hedgehog"},
    "t2r": {"feature_map": "t2r", "out_norm": "all"},
    "rebased": {"feature_map": "rebased", "head_dim": 4},
    "paired t2r": {
        "feature_map": {"name": "paired", "inner": "t2r", "layout": "half"},
        "rope_parameters": {"rope_theta": 1e4},
    },
    "favor+": {"feature_map": "favor+"},
    "hybrid": {"full_attention_interval": 2, "feature_map": "hedgehog"},
    "converted": {},
}
CPU = torch.device("cpu")


def make(name: str) -> LinRopeForCausalLM:
    torch.manual_seed(0)
    if name == "converted":
        return convert(llama(), keep_softmax=[1]).eval()
    sizes = {"vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = LinRopeConfig(**sizes, num_attention_heads=2, initializer_range=0.3, **OPTIONS[name])
    return LinRopeForCausalLM(config).eval()


def tokens() -> Tensor:
    return torch.randint(32, (2, 9), generator=torch.Generator().manual_seed(1))


def assert_computes_the_same(other: LinRopeForCausalLM, model: LinRopeForCausalLM) -> None:
    """Asserts equal logits of a prefill and a step on its cache, and equal tokens of generate()."""
    ids = tokens()
    with torch.no_grad():
        assert torch.equal(other(ids).logits, model(ids).logits)
        cache, same = (x(ids[:, :8], use_cache=True).past_key_values for x in (model, other))
        step = model(ids[:, 8:], past_key_values=cache).logits
        # Only layers in memory take mixer_step
        torch.testing.assert_close(other(ids[:, 8:], past_key_values=same).logits, step, rtol=1e-4, atol=1e-5)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    assert torch.equal(other.generate(ids, **options), model.generate(ids, **options))


@pytest.mark.parametrize("name", OPTIONS)
def test_a_model_with_weights_in_memory_computes_the_same(name: str) -> None:
    model = make(name)
    other = accelerate.cpu_offload(copy.deepcopy(model), CPU, offload_buffers=True)
    assert all(x.is_meta for x in other.parameters())
    assert_computes_the_same(other, model)


@pytest.mark.parametrize("name", ["hybrid", "converted"])
def test_a_model_with_weights_on_disk_computes_the_same(name: str, tmp_path) -> None:
    model = make(name)
    assert_computes_the_same(accelerate.disk_offload(copy.deepcopy(model), tmp_path, CPU), model)


@pytest.mark.parametrize(
    ("name", "layer"),
    [("default", "model.layers.1"), ("hybrid", "model.layers.0"), ("converted", "model.layers.1")],
)
def test_a_model_loaded_with_a_layer_on_disk_computes_the_same(name: str, layer: str, tmp_path) -> None:
    model = make(name)
    model.save_pretrained(tmp_path / "model")
    places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    places |= {f"model.layers.{i}": "cpu" for i in range(2)} | {layer: "disk"}
    other = LinRopeForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "offload"
    )
    assert any(x.is_meta for x in other.parameters())
    assert_computes_the_same(other, model)


@pytest.mark.parametrize("name", ["learned decay", "t2r", "favor+", "hybrid"])
def test_a_model_trains_beside_offloaded_weights(name: str) -> None:
    model = make(name).requires_grad_(False)
    other = accelerate.cpu_offload(copy.deepcopy(model), CPU)
    gradients = []
    for x in (model, other):
        embeddings = nn.Parameter(torch.ones(2, 9, 32))
        logits = x(inputs_embeds=embeddings, use_cache=False).logits
        (gradient,) = torch.autograd.grad(logits.square().sum(), embeddings)
        gradients.append(gradient)
    assert torch.equal(*gradients)
