from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from linrope import LinearRoPEAttention
from linrope.models import LanguageModel, LanguageModelConfig, generate


def tiny(**options: Any) -> LanguageModelConfig:
    return LanguageModelConfig(**({"embed_dim": 32, "num_layers": 2, "num_heads": 2} | options))


TINY = tiny()
SOFTMAX = {"attention": "softmax"}
PAIRS = [{}, {"rotary": None}, SOFTMAX, SOFTMAX | {"rotary": None}]
every_pair = pytest.mark.parametrize("options", PAIRS, ids=str)


@every_pair
def test_every_attention_goes_with_and_without_rotation(options, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = tiny(**options, num_kv_heads=1)
    model, tokens = LanguageModel(config), torch.randint(256, (2, 12))
    whole, _ = model(tokens)
    whole.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())

    first, states = model(tokens[:, :7])
    second, states = model(tokens[:, 7:11], states)
    third, _ = model(tokens[:, 11:], [state.detach().reorder(torch.arange(2)) for state in states])
    torch.testing.assert_close(torch.cat((first, second, third), 1), whole, rtol=1e-4, atol=1e-5)

    model.save(tmp_path)
    loaded = LanguageModel.load(tmp_path)
    assert loaded.config == config
    for token in generate(loaded, tokens, 6, temperature=0):
        logits, _ = model(tokens)  # without states: recomputed from the start
        assert torch.equal(token, logits[:, -1].argmax(-1))
        tokens = torch.cat((tokens, token[:, None]), 1)


@every_pair
def test_packed_sequences_give_what_each_gives_alone(options) -> None:
    torch.manual_seed(0)
    model = LanguageModel(tiny(**options))
    tokens, cuts = torch.randint(256, (1, 30)), [0, 9, 9, 20, 30]
    packed, states = model(tokens, cu_seqlens=torch.tensor(cuts))
    for a, b in pairwise(cuts):
        torch.testing.assert_close(packed[:, a:b], model(tokens[:, a:b])[0], rtol=1e-4, atol=1e-5)
    if "attention" in options:
        assert states == []
        return
    more = torch.randint(256, (1, 8))
    after, _ = model(more, states, cu_seqlens=torch.tensor([0, 2, 4, 6, 8]))
    for i, (a, b) in enumerate(pairwise(cuts)):
        whole = torch.cat((tokens[:, a:b], more[:, 2 * i : 2 * i + 2]), 1)
        part = after[:, 2 * i : 2 * i + 2]
        torch.testing.assert_close(part, model(whole)[0][:, b - a :], rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_rows_of_a_pool_continue_from_their_own_positions() -> None:
    torch.manual_seed(0)
    model = LanguageModel(TINY)
    texts = [torch.randint(256, (1, n)) for n in (5, 12, 3, 9)]
    each = [model(text)[1] for text in texts]
    pool = [type(rows[0]).cat(rows) for rows in zip(*each, strict=True)]
    tokens = torch.randint(256, (2, 4))
    for slots in ([3, 1], [1, 0]):
        expected = torch.cat([model(tokens[i, None], each[slot])[0] for i, slot in enumerate(slots)])
        states = [state.clone().at(torch.tensor(slots)) for state in pool]
        torch.testing.assert_close(model(tokens, states)[0], expected, rtol=1e-4, atol=1e-5)
        states = [state.clone().at(torch.tensor(slots)) for state in pool]
        packed, _ = model(tokens.view(1, 8), states, cu_seqlens=torch.tensor([0, 4, 8]))
        torch.testing.assert_close(packed.view(2, 4, -1), expected, rtol=1e-4, atol=1e-5)


@every_pair
def test_positions_may_be_given(options) -> None:
    model, tokens = LanguageModel(tiny(**options)), torch.arange(6)
    plain, _ = model(tokens[None])
    given, _ = model(tokens[None], positions=torch.arange(6))
    spread, _ = model(tokens[None], positions=torch.arange(6) * 3)
    packed, _ = model(tokens[None], positions=torch.arange(6) * 3, cu_seqlens=torch.tensor([0, 6]))
    torch.testing.assert_close(given, plain)
    torch.testing.assert_close(packed, spread, rtol=1e-4, atol=1e-5)
    assert torch.allclose(spread, plain, atol=1e-6) == ("rotary" in options)


@pytest.mark.parametrize(
    ("options", "layout", "turned"),
    [
        ({}, "interleaved", 4),
        ({"feature_map": "hedgehog"}, "interleaved", 8),
        ({"rotary": "interleaved"}, "interleaved", 16),
        ({"rotary": "selective"}, "interleaved", 16),
        ({"rotary": "half"}, "half", 16),
        ({"rotary": None}, None, 0),
        (SOFTMAX, "interleaved", 16),
        (SOFTMAX | {"rotary": {"partial_rotary_factor": 0.25}}, "interleaved", 4),
        (SOFTMAX | {"rotary": "half"}, "half", 16),
        (SOFTMAX | {"rotary": None}, None, 0),
    ],
    ids=str,
)
def test_a_quarter_of_the_features_turns_and_all_in_softmax_attention(options, layout, turned) -> None:
    layer = LanguageModel(tiny(head_dim=16, **options)).blocks[0].attention
    rotary = layer.rotary
    assert (getattr(rotary, "layout", None), getattr(rotary, "rotary_dim", 0)) == (layout, turned)


GATES = {"forget_gate": {"longest": 64}, "rotary": "selective", "short_conv": 4, "decay": "learned"}


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({"feature_map": "rebased"}, "feature_map"),
        ({"feature_map": {"name": "hedgehog", "bias": True}}, "feature_map"),
        (GATES, "angle_steps decay_logit forget_gate short_conv"),
    ],
    ids=["rebased", "hedgehog", "gates"],
)
def test_what_is_not_random_in_a_new_layer_starts_alike_in_a_model(options, parts) -> None:
    layer = LanguageModel(tiny(**options)).blocks[0].attention.state_dict()
    one, other = (LinearRoPEAttention(32, 2, value_head_dim=32, **options).state_dict() for _ in range(2))
    fixed = [name for name, x in one.items() if torch.equal(x, other[name])]
    assert {name.partition(".")[0] for name in fixed} == set(parts.split())
    assert all(torch.equal(layer[name], one[name]) for name in fixed)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"attention": "softmix"}, "attention='softmix': expected one of linear, softmax; did you mean 'softmax'"),
        ({"rotary": "both"},
         "rotary='both': expected one of interleaved, half, selective, a dict, a Rotary, a module or None"),
        ({"value_head_dim": 0}, "value_head_dim=0: expected at least 1"),
        ({"hidden_dim": -8}, "hidden_dim=-8: expected at least 1"),
        ({"decay": "fast"}, "decay='fast'"),
        ({"short_conv": "silu"}, "short_conv='silu': expected the number of taps"),
        ({"init": "xavier"}, "init='xavier': expected one of fan-in, gpt-2"),
        ({"rotary": {"name": "selected"}}, "rotary='selected': expected one of selective"),
        *((SOFTMAX | options, message) for options, message in [
            ({"decay": "retnet"}, "decay={'name': 'retnet'}: expected None"),
            ({"forget_gate": True}, "forget_gate={'longest': 4096.0, 'per': 'head'}: expected None"),
            ({"write_gate": "tied"}, "write_gate='tied': expected a forget_gate with it, or None"),
            ({"feature_map": "relu"}, r"feature_map={'name': 'relu'}: expected {'name': 'elu\+1'} with"),
            ({"normalize": False}, "normalize=False: expected True with attention"),
            ({"rotary": "selective"},
             "rotary={'name': 'selective'}: expected interleaved, half, a dict without a name, or None"),
            ({"rotary": {"name": "selective"}}, "rotary={'name': 'selective'}: expected interleaved"),
        ]),
    ],
)  # fmt: skip
def test_choices_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LanguageModel(tiny(**options))


def test_without_a_forget_gate_a_decay_is_the_default_beside_a_rotation() -> None:
    def decay(**options: Any) -> torch.Tensor | None:
        return LanguageModel(tiny(**options)).blocks[0].attention.decay

    assert decay(forget_gate=False).tolist() == [2**-1, 2 ** (-1 / 4096)]
    assert decay(forget_gate=False, rotary=None) is None
    assert decay() is decay(forget_gate={}) is decay(decay=None) is None


def test_state_memory_does_not_grow(model: LanguageModel) -> None:
    runs = [model(torch.randint(256, (1, n)))[1] for n in (1, 300)]
    short, long = ([(state.sums.kv.shape, state.sums.z.shape) for state in states] for states in runs)
    assert short == long


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 4, "num_kv_heads": 2, "feature_map": "favor+"},
        {"decay": "retnet"},
        {**GATES, "decay": {"name": "learned", "longest": 100}, "qk_norm": True,
         "rotary": {"name": "selective", "bound": "add"}},
        {"feature_map": {"name": "paired", "inner": "relu"}},
        {"rotary": None, "gate": False, "out_norm": False},
        {"num_value_heads": 4, "qk_norm": True},
        {"feature_map": "silu", "normalize": False},
        {"erase_gate": {"name": "tied", "largest": 2}, "feature_map": {"name": "unit", "query_factor": 0.25}},
        {"forget_gate": {"per": "feature", "bound": 5, "rank": 3}, "erase_gate": "independent"},
        {"feed_forward": False},
    ],
    ids=",".join,
)  # fmt: skip
def test_save_and_load_round_trip(options: dict[str, Any], tmp_path: Path) -> None:
    model, tokens = LanguageModel(tiny(num_layers=1, **options)), torch.randint(256, (1, 20))
    model.save(tmp_path / "model")
    loaded = LanguageModel.load(tmp_path / "model")
    assert loaded.config == model.config
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])


def test_a_loaded_model_has_the_dtypes_that_were_saved(tmp_path: Path) -> None:
    model = LanguageModel(tiny(feature_map="favor+")).bfloat16()
    model.norm.double()
    model.save(tmp_path)
    loaded = LanguageModel.load(tmp_path)
    torch.testing.assert_close(dict(loaded.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", b'{"embed_dim": 64}', "differs from the one"),
        ("config.json", b'{"width": 64}', "unknown keys .'width'."),
        ("config.json", b'{"gate": 1}', "gate=1: expected"),
        ("config.json", b'{"forget_gate": 1}', "forget_gate=1: expected"),
        ("config.json", b'{"short_conv": true}', "short_conv=True: expected"),
        ("config.json", b"{", "config.json: "),
        ("config.json", b"[]", "got list, expected an object"),
        ("model.safetensors", b"\x80\x04.", "not a readable safetensors"),
    ],
)
def test_an_absent_or_damaged_model_is_refused(name, content, message, model, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="expected a folder with checkpoints"):
        LanguageModel.load(tmp_path)
    model.save(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        LanguageModel.load(tmp_path)


def test_logits_of_some_tokens_are_those_of_all(model: LanguageModel) -> None:
    tokens = torch.randint(256, (2, 9))
    whole, states = model(tokens)
    for kept, rows in (
        (1, [-1]),
        (3, [-3, -2, -1]),
        (20, [*range(9)]),
        (torch.tensor([2, 5]), [2, 5]),
        (0, [*range(9)]),
    ):
        logits, after = model(tokens, logits_to_keep=kept)
        torch.testing.assert_close(logits, whole[:, rows])
        assert torch.equal(after[1].sums.kv, states[1].sums.kv)
    with pytest.raises(ValueError, match="logits_to_keep=-1: expected at least 0"):
        model(tokens, logits_to_keep=-1)


@pytest.mark.parametrize("dim", [96, 192, 384])
def test_the_initial_weights_keep_the_size_of_what_passes_through_them(dim: int) -> None:
    """Each branch adds a vector of about the size of its input, whatever the width, and the logits are about 1."""
    torch.manual_seed(0)
    model = LanguageModel(LanguageModelConfig(embed_dim=dim, num_heads=6, num_layers=2))
    with torch.no_grad():
        logits, _ = model(torch.randint(256, (2, 64)))
        x = torch.randn(2, 64, dim)
        branches = [part for block in model.blocks for part in (block.attention, block.feed_forward)]
        sizes = [float(branch(x).std()) for branch in branches]
        gpt2 = LanguageModel(replace(model.config, init="gpt-2"))
        weights = [block.attention.q_proj.weight for block in gpt2.blocks]
        ends = [block.attention.o_proj.weight for block in gpt2.blocks]
        deviations = [float(weight.std()) for weight in (*weights, *ends)]
    assert 0.5 < float(logits.std()) < 2
    assert all(0.1 < size < 2 for size in sizes), sizes
    torch.testing.assert_close(deviations, [0.02, 0.02, 0.01, 0.01], rtol=0.05, atol=0)


def test_logits_share_the_embedding_and_models_of_mixers_alone_have_no_feed_forward_networks() -> None:
    whole, mixers = (LanguageModel(tiny(feed_forward=x)).state_dict() for x in (True, False))
    assert {name.split(".")[0] for name in whole} == {"embed", "blocks", "norm"}
    assert mixers.keys() == {name for name in whole if "feed_forward" not in name}


def test_bytes_are_tokens(model: LanguageModel) -> None:
    tokens = torch.tensor([list(b"for want")], dtype=torch.uint8)
    assert torch.equal(model(tokens)[0], model(tokens.long())[0])


def test_states_that_are_not_asked_for_are_not_made(model: LanguageModel) -> None:
    tokens = torch.randint(256, (1, 9))
    logits, states = model(tokens, return_states=False)
    assert states == []
    assert torch.equal(logits, model(tokens)[0])


@pytest.mark.parametrize(
    ("options", "tokens", "bounds", "message"),
    [
        ({}, [[-1]], None, r"tokens: got ids .* expected 0 .. 255"),
        ({}, [[256]], None, r"tokens: got ids .* expected 0 .. 255"),
        ({}, [[1.0, 1.0]], None, "tokens: got torch.float32, expected integers"),
        ({}, [[True]], None, "tokens: got torch.bool, expected integers"),
        ({}, [1, 2], None, r"tokens: got shape \(2,\), expected \(b, n\)"),
        *((options, tokens, bounds, f"cu_seqlens: {message}")
          for options in ({}, SOFTMAX | {"rotary": None})
          for tokens, bounds, message in [
            ([[0] * 6], [0, 3, 99], r"got \[0, 3, 99\], expected numbers that rise from 0 to the length, 6"),
            ([[0] * 6], [1, 3, 6], r"got \[1, 3, 6\]"),
            ([[0] * 3] * 2, [0, 3], "got batch 2, expected 1"),
            ([[0] * 6], [0.0, 6.0], "got torch.float32, expected int32 or int64"),
          ]),
    ],
    ids=str,
)  # fmt: skip
def test_other_tokens_and_bounds_are_refused(options, tokens, bounds, message: str) -> None:
    packing = bounds if bounds is None else torch.tensor(bounds)
    with pytest.raises(TypeError if "got torch." in message else ValueError, match=message):
        LanguageModel(tiny(**options))(torch.tensor(tokens), cu_seqlens=packing)


@pytest.mark.parametrize(
    ("options", "bounds", "message"),
    [
        ({}, None, "got 2 sequences, expected 1"),
        ({}, [0, 4], "got 2 sequences, expected 1"),
        (SOFTMAX, [0, 4], "got a list with cu_seqlens"),
    ],
    ids=str,
)
def test_other_states_are_refused(options, bounds, message: str) -> None:
    model, tokens = LanguageModel(tiny(**options)), torch.zeros(2, 4).long()
    _, states = model(tokens)
    with pytest.raises(ValueError, match=f"state.*{message}"):
        model(tokens[:1], states, cu_seqlens=bounds if bounds is None else torch.tensor(bounds))


def test_a_run_s_folder_gives_its_last_model(model: LanguageModel, tmp_path: Path) -> None:
    model.save(tmp_path / "step-00000002")
    with torch.no_grad():
        model.embed.weight += 1
    model.save(tmp_path / "step-00000010")
    assert torch.equal(LanguageModel.load(tmp_path).embed.weight, model.embed.weight)
    assert '"embed_dim": 32' in (tmp_path / "step-00000010" / "config.json").read_text()


def test_a_block_with_softmax_attention_refuses_what_softmax_models_refuse() -> None:
    model = LanguageModel(TINY)
    model.blocks[1].attention = LanguageModel(tiny(**SOFTMAX)).blocks[1].attention
    _, states = model(torch.zeros(1, 5, dtype=torch.long))
    with pytest.raises(ValueError, match=r"^states: got a list with cu_seqlens"):
        model(torch.zeros(1, 4, dtype=torch.long), states, cu_seqlens=torch.tensor([0, 4], dtype=torch.int32))
