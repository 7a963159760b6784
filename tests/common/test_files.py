"""What is saved, damaged, and loaded: states and models, by files of their own and by torch.save."""

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from linrope import LinearAttentionState, Rotary, linear_rope_state
from linrope.common.files import load_tensors, parse_json, save_tensors
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.language_model import config_digest
from linrope.models.training import TrainingConfig
from linrope.position_encodings import SoftmaxAttention

NEST = "[" * 100_000


def some_state() -> LinearAttentionState:
    k = v = torch.randn(1, 3, 1, 2, generator=torch.Generator().manual_seed(0))
    return linear_rope_state(k, v, rotary=Rotary(2))


def assert_same(a: Any, b: Any) -> None:
    for name, value in vars(a).items():
        if name.startswith("_"):
            continue
        other = getattr(b, name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else value == other


def flips(path: Path, every: int = 1) -> list[tuple[int, bytes]]:
    """The file with one bit of one byte changed."""
    content = path.read_bytes()
    changed = []
    for index in range(0, len(content), every):
        flipped = bytearray(content)
        flipped[index] ^= 1 << index % 8
        changed.append((index, bytes(flipped)))
    return changed


def test_a_flipped_bit_of_a_saved_state_is_seen(tmp_path: Path) -> None:
    path, state = tmp_path / "state", some_state()
    state.save(path)
    seen = 0
    for _, content in flips(path):
        path.write_bytes(content)
        try:
            loaded = LinearAttentionState.load(path)
        except ValueError:
            seen += 1
        else:
            assert_same(loaded, state)  # blanks of the header: all else is whole
    assert seen > 0.9 * len(flips(path))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_flipped_bit_of_a_saved_model_is_seen(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    sizes = {"vocab_size": 4, "embed_dim": 4, "num_layers": 1, "num_heads": 1, "hidden_dim": 4}
    model = LanguageModel(LanguageModelConfig(**sizes))
    model.save(tmp_path)
    for _, content in flips(tmp_path / name, every=1 if name == "config.json" else 7):
        (tmp_path / name).write_bytes(content)
        try:
            loaded = LanguageModel.load(tmp_path)
        except ValueError:
            continue
        assert loaded.config == model.config
        for key, value in model.state_dict().items():
            assert torch.equal(loaded.state_dict()[key], value)


def test_a_digest_whose_name_is_damaged_is_missed(tmp_path: Path) -> None:
    path = tmp_path / "state"
    some_state().save(path)
    path.write_bytes(path.read_bytes().replace(b'"digest"', b'"digesu"'))
    with pytest.raises(ValueError, match="damaged"):
        LinearAttentionState.load(path)


def test_a_path_that_safetensors_would_not_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected a path in UTF-8"):
        some_state().save(tmp_path / "\udcff")
    assert not list(tmp_path.iterdir())


def test_a_file_has_the_permissions_that_the_umask_leaves(tmp_path: Path) -> None:
    path, before = tmp_path / "state", os.umask(0o077)
    try:
        for umask, mode in ((0o077, 0o600), (0o022, 0o644)):
            os.umask(umask)
            some_state().save(path)
            assert path.stat().st_mode & 0o777 == mode
    finally:
        os.umask(before)
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_is_an_oserror_and_leaves_nothing(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))  # bytes per file: as a disk that is full
    try:
        with pytest.raises(OSError, match="a: cannot be written"):
            save_tensors(tmp_path / "a", {"x": torch.zeros(1000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", [NEST, '{"a":' * 100_000, "{", "\x00"])
def test_json_that_cannot_be_read_is_a_valueerror(text: str) -> None:
    with pytest.raises(ValueError, match="config: not readable as JSON"):
        parse_json(text, "config")


WRONG: list[dict[str, Any]] = [
    {"feature_map": {"name": 3}},
    {"feature_map": {"name": ["relu"]}},
    {"feature_map": {"name": "favor+", "num_features": "many"}},
    {"feature_map": {"name": "favor+", "surprise": 1}},
    {"feature_map": {}},
    {"rotary": {"base": "x"}},
    {"rotary": {"name": "selective", "rank": []}},
    {"rotary": {"axes": 3}},
    {"decay": {"name": "spread", "longest": {}}},
    {"decay": {"name": {}}},
    {"forget_gate": {"longest": "far"}},
    {"num_layers": 10**12},
    {"embed_dim": 2**62},
    {"vocab_size": 2**40},
    {"num_heads": 0},
    {"num_kv_heads": -1},
    {"hidden_dim": -5},
]


@pytest.mark.parametrize("values", WRONG, ids=str)
def test_a_config_of_wrong_inner_types_or_sizes_is_refused(values: dict[str, Any], tmp_path: Path) -> None:
    sizes = {"vocab_size": 8, "embed_dim": 8, "num_layers": 1, "num_heads": 2}
    LanguageModel(LanguageModelConfig(**sizes)).save(tmp_path)
    weights = tmp_path / "model.safetensors"
    tensors, metadata = load_tensors(weights, "linrope.LanguageModel", 2)
    metadata["config"] = config_digest(sizes | values)  # the weights vouch for the wrong values
    save_tensors(weights, tensors, metadata)
    (tmp_path / "config.json").write_text(json.dumps(sizes | values))
    with pytest.raises(ValueError, match=str(tmp_path)):
        LanguageModel.load(tmp_path)


def test_a_config_nested_too_deep_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(NEST)
    with pytest.raises(ValueError, match=r"config\.json"):
        LanguageModel.load(tmp_path)


@pytest.mark.parametrize(
    "values", [{"steps": 2.5}, {"batch_size": True}, {"clip": "1"}, {"gradients_through_pieces": 1}]
)
def test_training_takes_numbers_of_the_right_type(values: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=f"{next(iter(values))}: got"):
        TrainingConfig(**values)


def test_torch_load_takes_states_without_trusting_the_file(tmp_path: Path) -> None:
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
