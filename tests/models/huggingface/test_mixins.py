"""transformers' own common tests of models and of generate(), against ours.

They are in its repository and not in its package. To run them (with ``pip install parameterized``):

    git clone --depth 1 --branch v5.23.0 https://github.com/huggingface/transformers ../transformers
    TRANSFORMERS_CHECKOUT=../transformers pytest tests/models/huggingface/test_mixins.py
"""

import importlib.util
import os
import sys
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.auto import modeling_auto

from linrope.models import huggingface
from linrope.models.huggingface import LinRopeCache, LinRopeConfig, LinRopeForCausalLM, LinRopeForMaskedLM

CHECKOUT = os.environ.get("TRANSFORMERS_CHECKOUT")
if not CHECKOUT:
    pytest.skip("TRANSFORMERS_CHECKOUT names no checkout of transformers", allow_module_level=True)


def _package(folder: Path) -> str:
    """Makes folder importable, under a name that is not that of our own tests."""
    name = "transformers_tests"
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
    return name


PACKAGE = _package(Path(CHECKOUT) / "tests")
COMMON = importlib.import_module(f"{PACKAGE}.test_modeling_common")
GENERATION = importlib.import_module(f"{PACKAGE}.generation.test_utils")
CONFIGURATION = importlib.import_module(f"{PACKAGE}.test_configuration_common")

PARTS = {  # by these names the mixins know what labels a model takes
    "": "Model", "_FOR_CAUSAL_LM": "ForCausalLM", "_FOR_MASKED_LM": "ForMaskedLM",
    "_FOR_SEQUENCE_CLASSIFICATION": "ForSequenceClassification",
    "_FOR_TOKEN_CLASSIFICATION": "ForTokenClassification", "_FOR_QUESTION_ANSWERING": "ForQuestionAnswering",
}  # fmt: skip
for names, part in PARTS.items():
    getattr(modeling_auto, f"MODEL{names}_MAPPING_NAMES")["linrope"] = f"LinRope{part}"

pytestmark = pytest.mark.filterwarnings("default")


class Sizes:
    """What the mixins want to know of a tiny model, and inputs for it."""

    batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads = 13, 7, 32, 2, 4
    is_training = True

    def __init__(self, parent: unittest.TestCase, **options: Any) -> None:
        self.parent, self.options = parent, options

    def get_config(self) -> LinRopeConfig:
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
        return LinRopeConfig(
            vocab_size=99, intermediate_size=37, num_key_value_heads=2, max_position_embeddings=512,
            pad_token_id=0, bos_token_id=1, eos_token_id=2, **{x: getattr(self, x) for x in names}, **self.options,
        )  # fmt: skip

    def prepare_config_and_inputs_for_common(self) -> tuple[LinRopeConfig, dict[str, Any]]:
        ids = torch.randint(3, 99, (self.batch_size, self.seq_length))
        return self.get_config(), {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


class ModelTest(COMMON.ModelTesterMixin, GENERATION.GenerationTesterMixin, unittest.TestCase):  # type: ignore[misc,name-defined]
    all_model_classes = tuple(
        getattr(huggingface, f"LinRope{part}") for part in PARTS.values() if part != "ForMaskedLM"
    )
    all_generative_model_classes = (LinRopeForCausalLM,)
    has_attentions = False
    options: dict[str, Any] = {}  # noqa: RUF012

    def setUp(self) -> None:
        self.model_tester = Sizes(self, **self.options)
        self.config_tester = CONFIGURATION.ConfigTester(self, config_class=LinRopeConfig, hidden_size=32)

    # The mixin reads keys and values; the two methods are there to be overridden.
    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: LinRopeCache, seq_length: int, config: LinRopeConfig
    ) -> None:
        assert past_key_values.get_seq_length() == seq_length
        assert past_key_values.batch_size == batch_size
        assert len(past_key_values) == config.num_hidden_layers

    def _check_caches_are_equal(self, one: LinRopeCache, other: LinRopeCache) -> None:
        assert one.get_seq_length() == other.get_seq_length()
        for a, b in zip(one.layers, other.layers):
            assert a.state.identity == b.state.identity
            for name, tensor in a.state.tensors().items():
                torch.testing.assert_close(tensor, getattr(b.state, name))

    def test_left_padding_compatibility(self) -> None:
        self.has_attentions = True  # else it takes it that a model knows no padding
        super().test_left_padding_compatibility()

    def test_model_rope_scaling_from_config_1_dynamic(self) -> None:
        raise unittest.SkipTest("theta stays for the stream: a state holds keys that are rotated already")

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


class MaskedModelTest(COMMON.ModelTesterMixin, unittest.TestCase):  # type: ignore[misc,name-defined]
    all_model_classes = (LinRopeForMaskedLM,)
    has_attentions = False

    def setUp(self) -> None:
        self.model_tester = Sizes(self)


class HybridTest(ModelTest):
    options = {"full_attention_interval": 2}  # noqa: RUF012


class HedgehogDecayTest(ModelTest):
    options = {"feature_map": "hedgehog", "decay": "retnet"}  # noqa: RUF012
