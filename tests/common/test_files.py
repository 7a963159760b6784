"""What is saved, damaged, and loaded: states and models, by files of their own and by torch.save."""

import json
import os
import pickle
from typing import Any

import pytest
import torch

from linrope import LinearAttentionState, Rotary, linear_rope_state
from linrope.common.files import load_tensors, save_tensors
from linrope.layer.softmax_attention import SoftmaxAttention
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.language_model import config_digest
from linrope.models.training import TrainingConfig
from tests.common.full_disk import full_disk


def some_state() -> LinearAttentionState:
    k = v = torch.randn(1, 3, 1, 2, generator=torch.Generator().manual_seed(0))
    return linear_rope_state(k, v, rotary=Rotary(2))


def assert_same(a: Any, b: Any) -> None:
    for name in (name for name in vars(a) if not name.startswith("_")):
        x, y = getattr(a, name), getattr(b, name)
        assert torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y


@pytest.mark.parametrize(("name", "every"), [("state", 1), ("config.json", 1), ("model.safetensors", 7)])
def test_a_flipped_bit_of_a_saved_state_or_model_is_seen(name: str, every: int, tmp_path) -> None:
    """One bit of one byte after another; no flip makes a blank of another blank."""
    sizes = {"vocab_size": 4, "embed_dim": 4, "num_layers": 1, "num_heads": 1, "hidden_dim": 4}
    some_state().save(tmp_path / "state")
    LanguageModel(LanguageModelConfig(**sizes)).save(tmp_path)
    path = tmp_path / name
    kind, where = (LinearAttentionState, path) if name == "state" else (LanguageModel, tmp_path)
    kind.load(where)
    content, damaged = path.read_bytes(), 0
    for index in range(0, len(content), every):
        flipped = bytearray(content)
        flipped[index] ^= 1 << index % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match=str(tmp_path)) as error:
            kind.load(where)
        damaged += "its digest does not match" in str(error.value)
    assert damaged > 0 or name == "config.json"


def test_a_path_that_safetensors_would_not_read_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="expected a path in UTF-8"):
        some_state().save(tmp_path / "\udcff")
    assert not list(tmp_path.iterdir())


def test_a_file_has_the_permissions_that_the_umask_leaves(tmp_path) -> None:
    path, before = tmp_path / "state", os.umask(0o077)
    try:
        for umask, mode in ((0o077, 0o600), (0o022, 0o644)):
            os.umask(umask)
            some_state().save(path)
            assert path.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_an_oserror_and_leaves_nothing(tmp_path) -> None:
    with full_disk(1000), pytest.raises(OSError, match="a: cannot be written"):
        save_tensors(tmp_path / "a", {"x": torch.zeros(1000)}, {})
    assert list(tmp_path.iterdir()) == []


UNREADABLE = {"deep list": "[" * 100_000, "deep object": '{"a":' * 100_000, "cut off": "{", "zero": "\x00"}


@pytest.mark.parametrize("text", UNREADABLE.values(), ids=UNREADABLE)
def test_json_that_cannot_be_read_is_a_valueerror(text: str, tmp_path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json: not readable as JSON"):
        LanguageModel.load(tmp_path)


WRONG: dict[str, list[Any]] = {
    "feature_map": [
        {"name": 3}, {"name": ["relu"]}, {}, {"name": "favor+", "num_features": "many"},
        {"name": "favor+", "surprise": 1},
    ],
    "rotary": [{"base": "x"}, {"name": "selective", "rank": []}, {"axes": 3}],
    "decay": [{"name": "spread", "longest": {}}, {"name": {}}],
    "forget_gate": [{"longest": "far"}],
    "num_layers": [10**12], "embed_dim": [2**62], "vocab_size": [2**40],
    "num_heads": [0], "num_kv_heads": [-1], "hidden_dim": [-5],
}  # fmt: skip


@pytest.mark.parametrize("values", [{name: x} for name, wrong in WRONG.items() for x in wrong], ids=str)
def test_a_config_of_wrong_inner_types_or_sizes_is_refused(values: dict[str, Any], tmp_path) -> None:
    sizes = {"vocab_size": 8, "embed_dim": 8, "num_layers": 1, "num_heads": 2}
    LanguageModel(LanguageModelConfig(**sizes)).save(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors, metadata = load_tensors(weights, "linrope.LanguageModel", 2)
    metadata["config"] = config_digest(sizes | values)  # the weights vouch for the wrong values
    save_tensors(weights, tensors, metadata)
    (tmp_path / "config.json").write_text(json.dumps(sizes | values))
    with pytest.raises(ValueError, match=str(tmp_path)):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize(
    "values", [{"steps": 2.5}, {"batch_size": True}, {"clip": "1"}, {"gradients_through_pieces": 1}]
)
def test_training_takes_numbers_of_the_right_type(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(values))}: got"):
        TrainingConfig(**values)


def test_torch_load_takes_states_without_trusting_the_file(tmp_path) -> None:
    softmax = SoftmaxAttention(8, 2)(torch.randn(1, 3, 8), return_state=True)[1]
    for state in (some_state(), softmax):
        torch.save({"state": state}, tmp_path / "a.pt")
        assert_same(torch.load(tmp_path / "a.pt", weights_only=True)["state"], state)


def test_a_pickled_state_is_checked() -> None:
    state = some_state()
    assert_same(pickle.loads(pickle.dumps(state)), state)
    values = state.__dict__
    for wrong in (values | {"kv": torch.zeros(2)}, values | {"more": 1}, {"kv": values["kv"]}):
        with pytest.raises(ValueError, match="state: got"):
            object.__new__(LinearAttentionState).__setstate__(wrong)
