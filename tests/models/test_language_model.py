import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from linrope import LinearRoPEAttention
from linrope.models import LanguageModel, LanguageModelConfig, generate
from linrope.models.language_model import POSITIONS
from linrope.position_encodings import RELATIVE

TINY = LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2)
PAIRS = [("linear", name) for name in POSITIONS if name not in RELATIVE]
PAIRS += [("softmax", name) for name in POSITIONS]
every_pair = pytest.mark.parametrize(("attention", "positions"), PAIRS)


@pytest.fixture
def model() -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(TINY)


def test_prefill_and_decode_give_what_one_call_gives(model: LanguageModel) -> None:
    tokens = torch.randint(256, (2, 70))
    whole, _ = model(tokens)
    part, states = model(tokens[:, :66])
    pieces = [part]
    for i in range(66, 70):
        part, states = model(tokens[:, i : i + 1], states)
        pieces.append(part)
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-4, atol=1e-5)


@every_pair
def test_every_attention_goes_with_its_positions(attention: str, positions: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = replace(TINY, attention=attention, positions=positions, num_kv_heads=1, max_length=20)
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
def test_packed_sequences_give_what_each_gives_alone(attention: str, positions: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(replace(TINY, attention=attention, positions=positions, max_length=20))
    tokens, cuts = torch.randint(256, (1, 30)), [0, 9, 9, 20, 30]
    packed, states = model(tokens, cu_seqlens=torch.tensor(cuts))
    for a, b in pairwise(cuts):
        torch.testing.assert_close(packed[:, a:b], model(tokens[:, a:b])[0], rtol=1e-4, atol=1e-5)
    if attention == "softmax":
        assert states == []
        return
    more = torch.randint(256, (1, 8))
    after, _ = model(more, states, cu_seqlens=torch.tensor([0, 2, 4, 6, 8]))
    for i, (a, b) in enumerate(pairwise(cuts)):
        whole = torch.cat((tokens[:, a:b], more[:, 2 * i : 2 * i + 2]), 1)
        part = after[:, 2 * i : 2 * i + 2]
        torch.testing.assert_close(part, model(whole)[0][:, b - a :], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", ["rope", "sinusoidal", "learned"])
@torch.no_grad()
def test_rows_of_a_pool_continue_from_their_own_positions(positions: str) -> None:
    torch.manual_seed(0)
    model = LanguageModel(replace(TINY, positions=positions, max_length=40))
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


@pytest.mark.parametrize("positions", ["rope", "learned"])
def test_states_of_another_number_of_sequences_are_refused(positions: str) -> None:
    model = LanguageModel(replace(TINY, positions=positions))
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    _, states = model(tokens.expand(2, 4))
    for packing in (None, torch.tensor([0, 4])):
        with pytest.raises(ValueError, match=r"state.*got 2 sequences, expected 1"):
            model(tokens, states, cu_seqlens=packing)


@pytest.mark.parametrize(("attention", "positions"), [("linear", "rope"), ("softmax", "none")])
@pytest.mark.parametrize(
    ("shape", "bounds", "cause"),
    [
        ((1, 6), [0, 3, 99], r"got \[0, 3, 99\], expected numbers that rise from 0 to the length, 6"),
        ((1, 6), [1, 3, 6], r"got \[1, 3, 6\]"),
        ((2, 3), [0, 3], "got batch 2, expected 1"),
        ((1, 6), [0.0, 6.0], "got torch.float32, expected int32 or int64"),
    ],
    ids=str,
)
def test_bounds_that_do_not_fit_are_refused(
    attention: str, positions: str, shape: tuple[int, int], bounds: list[float], cause: str
) -> None:
    model = LanguageModel(replace(TINY, attention=attention, positions=positions))
    with pytest.raises((TypeError, ValueError), match=f"cu_seqlens: {cause}"):
        model(torch.zeros(shape, dtype=torch.int64), cu_seqlens=torch.tensor(bounds))


@every_pair
def test_positions_may_be_given(attention: str, positions: str) -> None:
    model, tokens = LanguageModel(replace(TINY, attention=attention, positions=positions)), torch.arange(6)
    plain, _ = model(tokens[None])
    given, _ = model(tokens[None], positions=torch.arange(6))
    spread, _ = model(tokens[None], positions=torch.arange(6) * 3)
    packed, _ = model(tokens[None], positions=torch.arange(6) * 3, cu_seqlens=torch.tensor([0, 6]))
    torch.testing.assert_close(given, plain)
    torch.testing.assert_close(packed, spread, rtol=1e-4, atol=1e-5)
    assert torch.allclose(spread, plain, atol=1e-6) == (positions == "none")


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_positions_and_their_layout_make_a_difference(attention: str) -> None:
    tokens, logits = torch.randint(256, (1, 9)), []
    for options in ({}, {"rotary": "half"}, {"rotary": None}, {"positions": "none"}):
        torch.manual_seed(0)
        logits.append(LanguageModel(replace(TINY, attention=attention, **options))(tokens)[0])
    assert torch.equal(logits[2], logits[3])
    assert not any(torch.allclose(a, b) for a, b in ((logits[0], logits[1]), (logits[0], logits[2])))


def test_a_quarter_of_the_features_turns_in_linear_attention_and_all_in_softmax_attention() -> None:
    wide = replace(TINY, head_dim=16)
    assert LanguageModel(wide).blocks[0].attention.rotary.rotary_dim == 4
    assert LanguageModel(replace(wide, feature_map="hedgehog")).blocks[0].attention.rotary.rotary_dim == 8
    assert LanguageModel(replace(wide, rotary="interleaved")).blocks[0].attention.rotary.rotary_dim == 16
    assert LanguageModel(replace(wide, rotary="selective")).blocks[0].attention.rotary.rotary_dim == 16
    softmax = replace(wide, attention="softmax")
    for rotary, turned in (("auto", 16), ({"partial_rotary_factor": 0.25}, 4)):
        assert (
            LanguageModel(replace(softmax, rotary=rotary)).blocks[0].attention.encoding.rotary_dim == turned
        )


@pytest.mark.parametrize("feature_map", ["rebased", {"name": "hedgehog", "bias": True}])
def test_learned_maps_start_as_in_a_new_layer(feature_map: str | dict[str, Any]) -> None:
    model = LanguageModel(replace(TINY, feature_map=feature_map))
    layer = model.blocks[0].attention
    fresh = LinearRoPEAttention(TINY.embed_dim, TINY.num_heads, feature_map=feature_map)
    names = [name for name, x in fresh.feature_map.named_parameters() if x.ndim == 2]
    assert names
    for name in names:
        assert torch.equal(layer.feature_map.get_parameter(name), fresh.feature_map.get_parameter(name))


@pytest.mark.parametrize("attention", ["linear", "softmax"])
def test_learned_positions_end(attention: str) -> None:
    model = LanguageModel(replace(TINY, attention=attention, positions="learned", max_length=8))
    with pytest.raises(ValueError, match=r"positions: got 0 \.\. 8, expected 0 \.\. 7"):
        model(torch.zeros(1, 9, dtype=torch.int64))
    tokens = generate(model, torch.zeros(1, 6, dtype=torch.int64), 10)
    with pytest.raises(ValueError, match=r"positions: got 8 \.\. 8, expected 0 \.\. 7"):
        list(tokens)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"attention": "softmix"},
            "attention='softmix': expected one of linear, softmax; did you mean 'softmax'",
        ),
        ({"positions": "learnt"}, "positions='learnt': expected one of rope, .*did you mean 'learned'"),
        (
            {"rotary": "both", "positions": "none"},
            "rotary='both': expected one of auto, interleaved, half, selective, a dict or None",
        ),
        ({"positions": "shaw"}, "positions='shaw': adds a term to the n x m scores, .*attention='softmax'"),
        ({"rotary": "half", "positions": "none"}, "rotary='half': expected positions='rope', not 'none'"),
        ({"positions": "learned", "max_length": 0}, "max_length=0"),
        (
            {"attention": "softmax", "trapezoid": True},
            "trapezoid=True: expected False with attention='softmax'",
        ),
        ({"value_head_dim": 0}, "value_head_dim=0: expected at least 1"),
        ({"hidden_dim": -8}, "hidden_dim=-8: expected at least 1"),
        ({"attention": "softmax", "decay": "retnet"}, "decay='retnet': expected None"),
        ({"decay": "fast"}, "decay='fast'"),
        ({"attention": "softmax", "forget_gate": True}, "forget_gate=True: expected False"),
        ({"attention": "softmax", "write_gate": "tied"}, "write_gate='tied': expected None"),
        ({"attention": "softmax", "feature_map": "relu"}, r"feature_map='relu': expected 'elu\+1' with"),
        ({"attention": "softmax", "normalize": False}, "normalize=False: expected True with attention"),
        ({"short_conv": "silu"}, "short_conv='silu': expected 'auto', a number"),
        ({"init": "xavier"}, "init='xavier': expected one of fan-in, gpt-2"),
        (
            {"attention": "softmax", "rotary": "selective"},
            "rotary='selective': expected auto, interleaved, half, a dict without a name, or None",
        ),
        ({"rotary": {"name": "selected"}}, "rotary='selected': expected one of selective"),
        (
            {"attention": "softmax", "rotary": {"name": "selective"}},
            "rotary={'name': 'selective'}: expected auto",
        ),
        ({"positions": "sinusoidal", "embed_dim": 9, "num_heads": 3}, "dim=9"),
    ],
)
def test_choices_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LanguageModel(replace(TINY, **options))


@pytest.mark.parametrize(
    ("options", "decays"),
    [
        ({"forget_gate": False}, True),
        ({}, False),
        ({"forget_gate": {}}, False),
        ({"decay": None}, False),
        ({"forget_gate": False, "rotary": None}, False),
        ({"forget_gate": False, "positions": "sinusoidal"}, False),
    ],
    ids=str,
)
def test_without_a_forget_gate_a_decay_is_the_default_beside_a_rotation(
    options: dict[str, Any], decays: bool
) -> None:
    decay = LanguageModel(replace(TINY, **options)).blocks[0].attention.decay
    assert (decay is not None) == decays
    assert not decays or decay.tolist() == [2**-1, 2 ** (-1 / 4096)]


def test_packed_softmax_attention_takes_no_states() -> None:
    model = LanguageModel(replace(TINY, attention="softmax"))
    tokens, cu_seqlens = torch.zeros(1, 4, dtype=torch.int64), torch.tensor([0, 4])
    _, states = model(tokens)
    with pytest.raises(ValueError, match="states: got a list with cu_seqlens"):
        model(tokens, states, cu_seqlens=cu_seqlens)


def test_the_model_is_causal(model: LanguageModel) -> None:
    tokens = torch.randint(256, (1, 100))
    changed = tokens.clone()
    changed[:, 50:] = (changed[:, 50:] + 1) % 256
    assert torch.equal(model(tokens)[0][:, :50], model(changed)[0][:, :50])


def test_logits_and_embedding_share_their_weights(model: LanguageModel) -> None:
    logits, _ = model(torch.randint(256, (1, 5)))
    logits.sum().backward()
    assert not any("head" in name for name, _ in model.named_parameters())
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_state_memory_does_not_grow(model: LanguageModel) -> None:
    sizes = []
    for n in (1, 300):
        _, states = model(torch.randint(256, (1, n)))
        sizes.append(sum(s.kv.numel() + s.z.numel() for s in states))
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    "config",
    [
        TINY,
        LanguageModelConfig(embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=2, feature_map="favor+"),
        LanguageModelConfig(embed_dim=32, num_layers=1, num_heads=2, decay="retnet"),
        LanguageModelConfig(
            embed_dim=32,
            num_layers=1,
            num_heads=2,
            decay={"name": "learned", "longest": 100},
            forget_gate={"longest": 64},
            rotary={"name": "selective", "bound": "add"},
            short_conv=4,
            qk_norm=True,
        ),
        LanguageModelConfig(
            embed_dim=32, num_layers=1, num_heads=2, feature_map={"name": "dpfp", "nu": 2}, normalize=True
        ),
        LanguageModelConfig(embed_dim=32, num_layers=1, num_heads=2, rotary=None, gate=False, out_norm=False),
        LanguageModelConfig(
            embed_dim=32,
            num_layers=1,
            num_heads=2,
            num_value_heads=4,
            qk_norm=True,
            qk_bias=True,
            trapezoid=True,
        ),
        LanguageModelConfig(embed_dim=32, num_layers=1, num_heads=2, feature_map="silu", normalize=False),
    ],
)
def test_save_and_load_round_trip(config: LanguageModelConfig, tmp_path: Path) -> None:
    model, tokens = LanguageModel(config), torch.randint(256, (1, 20))
    model.save(tmp_path / "model")
    loaded = LanguageModel.load(tmp_path / "model")
    assert loaded.config == config
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])


def test_a_loaded_model_has_the_dtypes_that_were_saved(tmp_path: Path) -> None:
    model = LanguageModel(replace(TINY, feature_map="favor+")).bfloat16()
    model.norm.double()
    model.save(tmp_path)
    loaded = LanguageModel.load(tmp_path).state_dict()
    assert all(x.dtype == loaded[name].dtype for name, x in model.state_dict().items())
    assert all(torch.equal(x, loaded[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: (f / "config.json").write_text('{"embed_dim": 64}'), "differs from the one"),
        (lambda f: (f / "config.json").write_text('{"width": 64}'), "unknown keys .'width'."),
        (lambda f: (f / "config.json").write_text('{"gate": 1}'), "gate=1, expected"),
        (lambda f: (f / "config.json").write_text('{"forget_gate": 1}'), "forget_gate=1, expected"),
        (lambda f: (f / "config.json").write_text('{"short_conv": true}'), "short_conv=True, expected"),
        (lambda f: (f / "config.json").write_text("{"), "config.json: "),
        (lambda f: (f / "config.json").write_text("[]"), "got list, expected an object"),
        (lambda f: (f / "model.safetensors").write_bytes(b"\x80\x04."), "not a readable safetensors"),
    ],
)
def test_a_damaged_model_is_refused(
    change: object, message: str, model: LanguageModel, tmp_path: Path
) -> None:
    model.save(tmp_path)
    change(tmp_path)  # type: ignore[operator]
    with pytest.raises(ValueError, match=message):
        LanguageModel.load(tmp_path)


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"expected a folder with checkpoints"):
        LanguageModel.load(tmp_path)


def test_config_json_is_readable(model: LanguageModel, tmp_path: Path) -> None:
    model.save(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["embed_dim"] == 32


def test_the_model_s_options_start_as_the_layer_starts_them() -> None:
    gates = {"forget_gate": {"longest": 64}, "rotary": "selective", "short_conv": 4, "decay": "learned"}
    attention = LanguageModel(replace(TINY, **gates)).blocks[0].attention
    assert not attention.angle_steps.up.any()
    assert torch.equal(
        attention.short_conv.weight[..., -1], torch.ones_like(attention.short_conv.weight[..., -1])
    )
    torch.testing.assert_close(attention.decay[0], torch.tensor(0.5).double())


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


def test_a_model_of_mixers_alone_has_no_feed_forward_networks() -> None:
    model = LanguageModel(replace(TINY, feed_forward=False, num_value_heads=4, value_head_dim=8))
    assert not any("feed_forward" in name for name in model.state_dict())
    tokens = torch.randint(256, (2, 9))
    logits, _ = model(tokens)
    start, states = model(tokens[:, :5])
    torch.testing.assert_close(torch.cat((start, model(tokens[:, 5:], states)[0]), 1), logits)


def test_states_that_are_not_asked_for_are_not_made(model: LanguageModel) -> None:
    tokens = torch.randint(256, (1, 9))
    logits, states = model(tokens, return_states=False)
    assert states == []
    assert torch.equal(logits, model(tokens)[0])


@pytest.mark.parametrize("token", [-1, 256])
def test_a_token_outside_the_vocabulary_is_refused(token: int, model: LanguageModel) -> None:
    with pytest.raises(ValueError, match=r"tokens: got ids .* expected 0 .. 255"):
        model(torch.tensor([[token]]))


def test_tokens_that_are_no_matrix_of_integers_are_refused(model: LanguageModel) -> None:
    with pytest.raises(TypeError, match=r"tokens: got torch.float32, expected integers"):
        model(torch.ones(1, 2))
    with pytest.raises(ValueError, match=r"tokens: got shape \(2,\), expected \(b, n\)"):
        model(torch.tensor([1, 2]))


def test_a_run_s_folder_gives_its_last_model(model: LanguageModel, tmp_path: Path) -> None:
    model.save(tmp_path / "step-00000002")
    with torch.no_grad():
        model.embed.weight += 1
    model.save(tmp_path / "step-00000010")
    assert torch.equal(LanguageModel.load(tmp_path).embed.weight, model.embed.weight)
