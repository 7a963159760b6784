from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from linrope.models import huggingface
from linrope.models.huggingface import LinRopeCache, LinRopeForCausalLM, LinRopeForMaskedLM
from tests.models.huggingface.tiny import HYBRID, KINDS, causal_lm, checkpoint_activations, config, tokens

every_kind = pytest.mark.parametrize("kind", KINDS)
PARTS = "Model ForCausalLM ForMaskedLM ForQuestionAnswering ForSequenceClassification ForTokenClassification"


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight


def rotated(x: Tensor) -> Tensor:
    """(b, n, h, f) at positions 0, 1, ..: the first quarter of the features, pairs (t, t + f/8), as complex numbers."""
    n, half = x.shape[1], x.shape[-1] // 8
    angle = torch.arange(n)[:, None] * 10000.0 ** -(torch.arange(half).double() / half)
    z = torch.complex(x[..., :half], x[..., half : 2 * half])
    z = z * torch.polar(torch.ones_like(angle), angle)[:, None]
    return torch.cat((z.real, z.imag, x[..., 2 * half :]), -1)


def convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x (b, n, c), each channel with the three tokens before it."""
    return F.silu(F.conv1d(F.pad(x.mT, (3, 0)), weight, bias, groups=x.shape[2]).mT)


def by_hand(weights: dict[str, Tensor], ids: Tensor, full: tuple[int, ...]) -> Tensor:
    """The logits of a model with the default block, of 2 layers and 4 heads that share 2 keys."""
    x = weights["model.embed_tokens.weight"][ids]
    n = ids.shape[1]
    causal = torch.ones(n, n, dtype=torch.float64).tril()
    for i in range(2):
        w = {key.split(".", 3)[3]: value for key, value in weights.items() if f"layers.{i}." in key}
        y = rms(x, w["input_layernorm.weight"])
        qkv = torch.cat([y @ w[f"self_attn.{p}_proj.weight"].T for p in "qkv"], -1)
        qkv = convolved(qkv, w["self_attn.short_conv.weight"], w["self_attn.short_conv.bias"])
        q, k, v = (t.unflatten(-1, (-1, size)) for t, size in zip(qkv.split((32, 16, 32), -1), (8, 8, 16)))
        k, v = (t.repeat_interleave(2, 2) for t in (k, v))
        if i in full:
            scores = torch.einsum("bnhd,bmhd->bhnm", rotated(q), rotated(k)) / 8**0.5
            out = torch.einsum("bhnm,bmhe->bnhe", scores.masked_fill(causal == 0, -torch.inf).softmax(-1), v)
            eps = 1e-6
        else:
            q, k = F.elu(q) + 1, F.elu(k) + 1
            keep = (y @ w["self_attn.forget_gate.weight"].T + w["self_attn.forget_gate.bias"]).sigmoid()
            keep = keep.repeat_interleave(2, 2)
            log = keep.log().cumsum(1)
            decay = (log[:, :, None] - log[:, None]).exp() * causal[:, :, None]
            written = (1 - keep)[..., None] * v
            out = torch.einsum("bnhf,bmhf,bnmh,bmhe->bnhe", rotated(q), rotated(k), decay, written)
            eps = 1e-12  # the sums of a strong gate may be tiny
        out = rms(out, w["self_attn.out_norm.weight"], eps) + w["self_attn.skip"][:, None] * v
        out = out.flatten(2) * F.silu(y @ w["self_attn.g_proj.weight"].T)
        x = x + out @ w["self_attn.o_proj.weight"].T
        y = rms(x, w["post_attention_layernorm.weight"])
        y = F.silu(y @ w["mlp.gate_proj.weight"].T) * (y @ w["mlp.up_proj.weight"].T)
        x = x + y @ w["mlp.down_proj.weight"].T
    return rms(x, weights["model.norm.weight"]) @ weights["lm_head.weight"].T


@pytest.mark.parametrize("full", [(), (1,)])
def test_logits_and_loss_are_those_of_the_formula(full: tuple[int, ...]) -> None:
    model, ids = causal_lm(**HYBRID if full else {}), tokens(2, 9)
    expected = by_hand(dict(model.state_dict()), ids, full)
    out = model(ids, labels=ids)
    torch.testing.assert_close(out.logits, expected)
    loss = F.cross_entropy(expected[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())
    torch.testing.assert_close(out.loss, loss)


@pytest.mark.parametrize(
    ("part", "kind"),
    [*((part, "hybrid") for part in PARTS.split()), *(("ForCausalLM", kind) for kind in KINDS)],
)
def test_saved_and_loaded_models_give_the_same_bits(part: str, kind: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    ours = getattr(huggingface, f"LinRope{part}")
    auto = getattr(transformers, f"AutoModel{part.removeprefix('Model')}")
    model, ids = ours(config(**KINDS[kind])).eval(), tokens(2, 9)
    model.save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").is_file()
    loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert type(loaded) is ours
    assert torch.equal(loaded.to(ids.device)(ids)[0], model(ids)[0])


def test_tied_embeddings_and_missing_weights(tmp_path: Path) -> None:
    options = {"tie_word_embeddings": True, "feature_map": "hedgehog", "decay": "retnet"}
    model = causal_lm(**options)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = {name: tensor for name, tensor in model.state_dict().items() if name.endswith("_proj.weight")}
    loaded = LinRopeForCausalLM.from_pretrained(None, config=config(**options), state_dict=state)
    layer, own = (m.model.layers[1].self_attn for m in (loaded, model))
    assert torch.equal(layer.decay.cpu(), own.decay.cpu())
    assert torch.equal(layer.feature_map.phi["weight"], torch.eye(8, device="cpu").expand(4, 8, 8))
    assert torch.equal(layer.q_proj.weight.cpu().double(), own.q_proj.weight.cpu())


def test_weights_have_the_names_and_shapes_of_llamas() -> None:
    sizes = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    llama = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    plain = {"forget_gate": False, "short_conv": None, "skip": None, "value_head_dim": 8, "gate": False}
    for options in ({}, {"full_attention_interval": 1}):
        ours = causal_lm(out_norm=False, **plain, **options)
        shapes = [{k: v.shape for k, v in model.state_dict().items()} for model in (ours, llama)]
        assert shapes[0] == shapes[1]


@every_kind
@pytest.mark.parametrize("cuts", [(4, 9), tuple(range(1, 12))], ids=["chunks", "tokens"])
def test_pieces_give_what_one_call_gives(kind: str, cuts: tuple[int, ...]) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(2, 12)
    whole = model(ids).logits
    cache, out = LinRopeCache(model.config), []
    for begin, end in zip((0, *cuts), (*cuts, 12)):
        with torch.set_grad_enabled(begin % 2 == 0):  # without gradients a token changes states in place
            out.append(model(ids[:, begin:end], cache=cache).logits)
        assert cache.get_seq_length() == end
    torch.testing.assert_close(torch.cat(out, 1), whole)
    last = model(ids, logits_to_keep=1).logits
    torch.testing.assert_close(last, whole[:, -1:])


@every_kind
@pytest.mark.parametrize("positions", ["counted", "given"])
def test_padded_is_unpadded(kind: str, positions: str) -> None:
    model, ids = causal_lm(**KINDS[kind]), tokens(1, 7)
    alone = model(ids).logits
    left, right = 3, 2
    padded, mask = F.pad(ids, (left, right)), F.pad(torch.ones_like(ids), (left, right))
    batch, mask = torch.cat((padded, tokens(1, 12))), torch.cat((mask, torch.ones(1, 12, dtype=mask.dtype)))
    where = {}
    if positions == "given":  # as transformers writes them: padding stands at 1
        where = {"position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)}
    out = model(batch, attention_mask=mask, **where).logits[:1]
    torch.testing.assert_close(out[:, left : left + 7], alone)
    cache, pieces = LinRopeCache(model.config), []  # and so in pieces, one of them padding alone
    for begin, end in ((0, 3), (3, 8), (8, 9), (9, 12)):
        own = {"position_ids": where["position_ids"][:, begin:end]} if where else {}
        call = model(batch[:, begin:end], attention_mask=mask[:, :end], cache=cache, **own)
        pieces.append(call.logits[:1])
    torch.testing.assert_close(torch.cat(pieces, 1)[:, left : left + 7], alone)


@pytest.mark.parametrize(
    ("kind", "how", "start"),
    [
        *((kind, "cu_seqlens", 0) for kind in KINDS),
        ("hybrid", "cu_seq_lens_q", 0),
        ("hybrid", "cu_seq_lens_k", 0),
        ("hybrid", "position_ids", 0),
        ("decay", "position_ids", 3),
    ],
)
def test_packed_is_separate(kind: str, how: str, start: int) -> None:
    model, one, two = causal_lm(**KINDS[kind]), tokens(1, 5), tokens(1, 8, seed=2)
    first = torch.arange(start, start + 5)[None]
    where = {how: torch.tensor([0, 5, 13], dtype=torch.int32)}
    if how == "position_ids":
        where = {how: torch.cat((first, torch.arange(8)[None]), 1)}
    out = model(torch.cat((one, two), 1), **where)
    assert out.cache is None
    expected = model(one, position_ids=first).logits, model(two).logits
    torch.testing.assert_close(out.logits, torch.cat(expected, 1))


ROWS = ((7, 1, 12), (12, 8))  # two rows of 20 tokens
HOW_ROWS_ARE_PACKED: dict[str, Callable[[Tensor, Tensor], dict[str, Tensor]]] = {  # from positions and numbers
    "position_ids": lambda positions, _: {"position_ids": positions},
    "an all-ones mask": lambda p, _: {"position_ids": p, "attention_mask": torch.ones_like(p)},
    "seq_idx": lambda _, numbers: {"seq_idx": numbers},
    "seq_idx and positions that run on": lambda p, numbers: {
        "seq_idx": numbers, "position_ids": torch.arange(p.shape[1], device=p.device),
    },
}  # fmt: skip


@pytest.mark.parametrize("how", HOW_ROWS_ARE_PACKED)
def test_sequences_packed_into_several_rows_are_separate(how: str) -> None:
    model, ids = causal_lm(**HYBRID), tokens(2, 20)
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in ROWS]).to(ids.device)
    numbers = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in ROWS]).to(
        ids.device
    )
    out = model(ids, output_hidden_states=True, **HOW_ROWS_ARE_PACKED[how](positions, numbers))
    pieces = [piece for row, lengths in zip(ids, ROWS) for piece in row.split(lengths)]
    expected = torch.cat([model(piece[None]).logits for piece in pieces], 1)
    torch.testing.assert_close(out.logits.view_as(expected), expected)
    assert {x.shape for x in out.hidden_states} == {(2, 20, 32)}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
def test_packed_rows_may_be_filled_up(rows: int, masked: bool) -> None:
    """To a multiple of 8, as collators do it, with tokens at position 0 or 1; positions of 1 require the mask."""
    model, ids = causal_lm(**HYBRID), tokens(rows, 11)
    positions = torch.cat((torch.arange(7), torch.arange(4)))
    expected = torch.cat((model(ids[:, :7]).logits, model(ids[:, 7:]).logits), 1)
    mask = {"attention_mask": F.pad(torch.ones_like(ids), (0, 5))} if masked else {}
    for filling in (0, 1) if masked else (0,):
        where = F.pad(positions, (0, 5), value=filling).expand(rows, 16).to(ids.device)
        out = model(F.pad(ids, (0, 5), value=3), position_ids=where, **mask).logits[:, :11]
        torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("kind", ["hybrid", "decay"])
def test_padding_in_packed_sequences_is_skipped(kind: str) -> None:
    model, one, two = causal_lm(**KINDS[kind]), tokens(1, 4), tokens(1, 5, seed=2)
    ids = torch.cat((F.pad(one, (0, 1)), F.pad(two, (1, 0))), 1)
    packed = {"cu_seqlens": torch.tensor([0, 5, 11], dtype=torch.int32), "attention_mask": (ids > 0).long()}
    for positions in (None, torch.tensor([[0, 1, 2, 3, 1, 1, 0, 1, 2, 3, 4]])):
        out = model(ids, position_ids=positions, **packed).logits[ids > 0]
        torch.testing.assert_close(out, torch.cat((model(one).logits, model(two).logits), 1)[0])


@pytest.mark.parametrize("b", [1, 2])
def test_equal_coordinates_on_all_axes_are_positions(b: int) -> None:
    """With and without padding, and in a batch of one, whose tokens at 0 begin no new sequences."""
    rope = {"rope_type": "default", "rope_theta": 1e4}
    plain, axes = (causal_lm(rope_parameters=x) for x in (rope, rope | {"mrope_section": [2, 1, 1]}))
    ids, where = tokens(b, 6), torch.arange(6)[:, None].expand(b, 6, 3)
    expected = plain(ids).logits
    torch.testing.assert_close(axes(ids, position_ids=where).logits, expected)
    mask = F.pad(torch.ones_like(ids), (2, 0))
    out = axes(F.pad(ids, (2, 0)), attention_mask=mask, position_ids=F.pad(where, (0, 0, 2, 0)))
    torch.testing.assert_close(out.logits[:, 2:], expected)


def test_position_ids_shift_nothing_and_scale_something() -> None:
    model, ids = causal_lm(**HYBRID), tokens(2, 9)
    expected = model(ids).logits
    torch.testing.assert_close(model(ids, position_ids=torch.arange(9) + 10**6).logits, expected)
    assert not torch.allclose(model(ids, position_ids=torch.arange(9) * 2).logits, expected)


@pytest.mark.parametrize("kind", ["linear", "hybrid"])
def test_masked_lm_sees_both_sides_and_no_padding(kind: str) -> None:
    torch.manual_seed(0)
    model, ids = LinRopeForMaskedLM(config(**KINDS[kind])).double().eval(), tokens(1, 6)
    out = model(ids, labels=ids)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits[0].float(), ids[0]))
    other = ids.clone()
    other[0, -1] = ids[0, -1] % 49 + 1
    assert not torch.allclose(model(other).logits[:, 0], out.logits[:, 0])
    mask = F.pad(torch.ones_like(ids), (2, 3))
    padded = model(F.pad(ids, (2, 3), value=7), attention_mask=mask).logits[:, 2:-3]
    torch.testing.assert_close(padded, out.logits)


def test_classification_reads_the_last_real_token() -> None:
    torch.manual_seed(0)
    model = huggingface.LinRopeForSequenceClassification(config(num_labels=3)).double().eval()
    ids = tokens(1, 6)
    states = model.model(ids).last_hidden_state
    expected = states[:, -1] @ model.score.weight.T
    for padding in ((3, 0), (0, 3)):
        mask = F.pad(torch.ones_like(ids), padding)
        out = model(F.pad(ids, padding), attention_mask=mask, labels=torch.tensor([2])).logits
        torch.testing.assert_close(out, expected)


def test_bad_arguments_are_refused() -> None:
    model, both, ids = causal_lm(), LinRopeForMaskedLM(config()), tokens(2, 5)
    cache, bounds = LinRopeCache(model.config), torch.tensor([0, 2, 5])
    filled = model(ids[:, :3], use_cache=True).cache
    for called, options, message in (
        (model, {"inputs_embeds": torch.zeros(2, 5, 32)}, "input_ids, inputs_embeds: got both, expected exactly one"),
        (model, {"input_ids": None}, "input_ids, inputs_embeds: got neither, expected exactly one"),
        (model, {"attention_mask": torch.ones(2, 4)}, r"attention_mask: got shape \(2, 4\), expected \(2, 5\)"),
        (model, {"is_causal": False}, "is_causal=False: this model was made with is_causal=True"),
        (model, {"input_ids": ids[:1], "cu_seqlens": bounds, "cache": cache},
         "cache: got a cache and packed sequences"),
        (model, {"position_ids": torch.tensor([0, 1, 2, 0, 1]), "cache": cache},
         "cache: got a cache and packed sequences"),
        (model, {"input_ids": ids[:1], "cache": filled}, "^cache: got 2 sequences, expected 1"),
        (model, {"position_ids": torch.arange(4)}, r"^position_ids: got shape \(4,\), expected \(5,\) or"),
        (model, {"position_ids": torch.tensor([[0, 1, 2, 3, 4], [0, 1, 2, 1, 2]])},
         "position_ids: falls to 1 at token 3 of row 1, expected positions that rise, or 0"),
        (model, {"input_ids": ids[:, 3:], "cache": filled, "position_ids": torch.tensor([3, 0]),
                 "attention_mask": torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])},
         "cache: got a cache and packed sequences"),
        (model, {"seq_idx": torch.zeros(2, 4)}, r"seq_idx: got shape \(2, 4\), expected \(2, 5\)"),
        (model, {"seq_idx": torch.zeros(3, 5)}, r"seq_idx: got shape \(3, 5\), expected \(2, 5\)"),
        (model, {"max_length_q": 3}, "max_length_q: got no cu_seq_lens_q, expected the bounds"),
        (model, {"input_ids": ids[:1], "cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds + 1},
         "cu_seq_lens_k: got other bounds than cu_seq_lens_q"),
        (both, {"cache": LinRopeCache(both.config)},
         "cache: got 2 layers, expected None with is_causal=False"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            called(**{"input_ids": ids} | options)
    with pytest.raises(TypeError, match="cache: got DynamicCache, expected LinRopeCache"):
        model(ids, cache=DynamicCache())


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # of generate(), in that case
@pytest.mark.parametrize(("kind", "reentrant"), [("hybrid", True), ("gated", False)])
def test_checkpointing_changes_no_gradient_and_keeps_the_cache(kind: str, reentrant: bool) -> None:
    model, ids = causal_lm(**KINDS[kind]).train(), tokens(2, 9)
    with torch.no_grad():
        generated = model.generate(ids, max_new_tokens=4, do_sample=False)
    expected = model(ids, use_cache=True)
    expected.logits.sum().backward()
    grads = [p.grad.clone() for p in model.parameters()]
    checkpoint_activations(model, {"use_reentrant": reentrant})
    assert torch.equal(model.generate(ids, max_new_tokens=4, do_sample=False), generated)
    for use_cache in (False, True):
        model.zero_grad()
        out = model(ids, use_cache=use_cache)
        assert torch.equal(out.logits, expected.logits)
        out.logits.sum().backward()
        for p, grad in zip(model.parameters(), grads, strict=True):
            torch.testing.assert_close(p.grad, grad, rtol=0, atol=1e-9 * float(grad.abs().max()))
    assert out.cache.get_seq_length() == 9
    with torch.no_grad():
        again, before = (model(ids[:, :1], cache=x.cache).logits for x in (out, expected))
    assert torch.equal(again, before)


def test_checkpointing_makes_a_cache_only_if_asked_to_and_where_there_can_be_one() -> None:
    model, ids = causal_lm().train(), tokens(1, 8)
    packed = {"position_ids": torch.arange(4).repeat(2)[None]}
    expected = model(ids, **packed).logits
    checkpoint_activations(model, {"use_reentrant": False})
    out = model(ids, use_cache=True, **packed)
    assert out.cache is None
    assert torch.equal(out.logits, expected)
    assert model(ids).cache is None
    for kind in (model, model.model):
        assert kind(ids, use_cache=True, cu_seqlens=None).cache.get_seq_length() == 8


@every_kind
def test_half_precision_is_finite_and_near(kind: str) -> None:
    model, ids = causal_lm(**KINDS[kind]).float(), tokens(2, 40)
    expected = model(ids).logits
    with torch.autocast(ids.device.type, torch.bfloat16):
        out = model(ids, labels=ids)
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    for logits in (out.logits, model.bfloat16()(ids).logits):
        assert (logits.float() - expected).norm() < 0.05 * expected.norm()


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_compiled_is_eager() -> None:
    model, ids = causal_lm(**KINDS["decay"], num_hidden_layers=1), tokens(2, 9)
    compiled = torch.compile(model, backend="aot_eager")
    out = compiled(ids, attention_mask=torch.ones_like(ids), labels=ids, use_cache=False)
    out.loss.backward()
    torch.testing.assert_close(out.logits, model(ids).logits)


@torch.no_grad()
def test_compiled_decoding_compiles_twice_at_most() -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model, ids = causal_lm(num_hidden_layers=1), tokens(2, 12)
    compiled, cache = torch.compile(model, backend=counter, fullgraph=True), LinRopeCache(model.config)
    out = [model(ids[:, :6], cache=cache)]
    out += [compiled(ids[:, i : i + 1], cache=cache) for i in range(6, 12)]
    assert counter.frame_count <= 2  # for one length of the cache, and for any
    torch.testing.assert_close(torch.cat([step.logits for step in out], 1), model(ids).logits)
    torch._dynamo.reset()
