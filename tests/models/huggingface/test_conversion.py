from collections.abc import Iterator
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from linrope.models.huggingface import LinRopeForCausalLM
from linrope.models.huggingface.conversion import convert, evaluate, finetune, match

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 32,
}  # fmt: skip


def make(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**(SIZES | {"initializer_range": 0.3} | options))
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


llama = partial(make, "Llama")


def tokens(seed: int, b: int = 8, n: int = 48) -> Tensor:
    """Sequences that repeat their first 5 tokens: to predict the next one is to look back 4 tokens."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randint(32, (b, 5), generator=generator, device="cpu").repeat(1, n // 5 + 1)[:, :n]


def batches(first: int) -> Iterator[Tensor]:
    return (tokens(seed) for seed in range(first, first + 1000))


HELD_OUT = [tokens(10_000 + seed) for seed in range(4)]


@pytest.fixture(scope="module")
def trained() -> LlamaForCausalLM:
    """A Llama that looks back. The first 5 of 48 tokens are guesses, 4/47 log 32 = 0.3; uniform ones 3.5."""
    model = llama(initializer_range=0.1).train()
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for _, batch in zip(range(300), batches(0)):
        loss = model(batch.to(model.device), labels=batch.to(model.device)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert evaluate(model, HELD_OUT) < 0.8
    return model.eval()


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "grouped heads": ("Llama", {}),
    "tied, wide heads": ("Llama", {"tie_word_embeddings": True, "head_dim": 16}),
    "all biases": ("Llama", {"attention_bias": True}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "mistral": ("Mistral", {"sliding_window": None}),
    "qwen2": ("Qwen2", {}),
}
ADDED: dict[str, Any] = {
    "gate": True, "out_norm": True, "qk_norm": True, "skip": "after",
    "short_conv": {"taps": 4, "activation": "silu"},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "added"), [*((kind, {}) for kind in MODELS), ("grouped heads", ADDED)])
def test_with_all_layers_kept_nothing_changes(kind: str, added: dict[str, Any]) -> None:
    family, options = MODELS[kind]
    given = make(family, **options)
    with torch.no_grad():
        for name, parameter in given.named_parameters():
            if name.endswith("bias"):  # which start at 0
                parameter.normal_()
        student, batch = convert(given, keep_softmax=range(2), **added), tokens(0).to(given.device)
        torch.testing.assert_close(student(batch).logits, given(batch).logits, rtol=1e-5, atol=1e-5)
    if kind.startswith("tied"):
        assert student.lm_head.weight is student.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        ({}, ""),
        ({"gate": True, "out_norm": True}, "g_proj out_norm"),
        ({"erase_gate": "tied", "forget_gate": True}, "forget_gate erase_gate"),
        ({"qk_norm": True, "out_norm": True, "rope_order": "after"}, "q_norm k_norm out_norm"),
    ],
    ids=str,
)  # fmt: skip
def test_weights_of_one_name_are_equal(options: dict[str, Any], parts: str) -> None:
    teacher = llama()
    teacher.generation_config.temperature = 0.5
    student = convert(teacher, keep_softmax=[1], **options)
    own, given = student.state_dict(), teacher.state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in given.items())
    assert {name.split(".")[4] for name in own.keys() - given.keys()} == {"feature_map", *parts.split()}
    assert student.generation_config.to_dict() == teacher.generation_config.to_dict()


@torch.no_grad()
def test_a_linear_layer_attends_by_the_formula_on_the_teacher_s_projections() -> None:
    """phi = softmax([W x, -W x]) of q and k, turned as the teacher turns them; W starts as the identity."""
    teacher = llama(rope_parameters=YARN)
    linear = convert(teacher, keep_softmax=[1]).double().model.layers[0].self_attn
    attention, x = teacher.model.layers[0].self_attn, torch.randn(2, 48, 32, dtype=torch.float64)
    cos, sin = (y.double()[:, :, None] for y in teacher.model.rotary_emb(x, torch.arange(48)[None]))
    q, k, v = (getattr(attention, f"{x}_proj").weight.double() for x in "qkv")
    q, k, v = ((x @ weight.T).unflatten(2, (-1, 8)) for weight in (q, k, v))
    k, v = k.repeat_interleave(2, 2), v.repeat_interleave(2, 2)
    q, k = (y * cos + torch.cat((-y[..., 4:], y[..., :4]), -1) * sin for y in (q, k))
    q, k = (torch.cat((y, -y), -1).softmax(-1) for y in (q, k))
    weights = torch.einsum("bnhf,bmhf->bhnm", q, k).tril()
    out = torch.einsum("bhnm,bmhe->bnhe", weights / weights.sum(-1, keepdim=True), v)
    expected = out.flatten(2) @ attention.o_proj.weight.double().T
    # cos and sin of the teacher are float32
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)


OPTIONS: dict[str, Any] = {"rope_order": "after", "feature_map": "t2r", "keep_softmax": [1]}
EACH = [pytest.param({name: value}, id=name, marks=pytest.mark.long) for name, value in OPTIONS.items()]


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in model.state_dict().items()}


def changed(model: torch.nn.Module, before: dict[str, Tensor]) -> set[str]:
    return {name for name, weight in model.state_dict().items() if not torch.equal(weight, before[name])}


@pytest.mark.xdist_group("conversion")  # one worker trains the model
@pytest.mark.parametrize("choice", [pytest.param({}, id="defaults"), pytest.param(OPTIONS, id="all"), *EACH])
def test_each_step_lowers_the_loss(trained: LlamaForCausalLM, choice: dict[str, Any]) -> None:
    torch.manual_seed(1)
    student = convert(trained, **choice)
    before = weights(student)
    losses = [evaluate(trained, HELD_OUT), evaluate(student, HELD_OUT)]
    errors = match(student, trained, batches(1000), steps=60)
    assert errors[-1] < errors[0]
    assert changed(student, before) == {name for name in before if "feature_map" in name}
    losses.append(evaluate(student, HELD_OUT))
    finetune(student, batches(2000), steps=60, learning_rate=5e-3)
    losses.append(evaluate(student, HELD_OUT))
    assert losses[0] < losses[3] < losses[2] < losses[1]


def test_matching_leaves_the_teacher_alone_and_repeats() -> None:
    teacher = llama().train()
    given = weights(teacher)
    losses = [match(convert(teacher), teacher, batches(0), steps=3) for _ in range(2)]
    assert losses[0] == losses[1]
    assert teacher.training
    assert not any(module._forward_hooks for module in teacher.modules())
    assert not changed(teacher, given)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_lora_changes_projections_and_maps_full_finetuning_all() -> None:
    teacher = llama(attention_bias=True)
    for method in ("lora", "full"):
        student = convert(teacher)
        frozen = {"model.norm.weight", "model.layers.0.self_attn.feature_map.phi.weight"}
        for name in frozen:
            student.get_parameter(name).requires_grad_(False)
        before = weights(student)
        losses = finetune(student, cycle([tokens(0)]), steps=4, method=method, rank=2)
        assert losses[-1] < losses[0]
        assert student.state_dict().keys() == before.keys()
        low_rank = {name for name in before if "feature_map" in name or name.endswith("_proj.weight")}
        low_rank -= {name for name in before if ".mlp." in name}
        assert changed(student, before) == (low_rank if method == "lora" else set(before)) - frozen
        assert {name for name, x in student.named_parameters() if not x.requires_grad} == frozen


def test_the_loss_is_the_mean_over_next_tokens() -> None:
    model = llama()
    batch = tokens(0).to(model.device)
    with torch.no_grad():
        logits = model(batch).logits.double()
    expected = -logits.log_softmax(-1)[:, :-1].gather(-1, batch[:, 1:, None]).mean()
    assert evaluate(model, [batch, batch]) == pytest.approx(float(expected), rel=1e-6)
    for bad, cause in (([], "batches: got none"), ([batch.float()], "indices")):
        with pytest.raises((ValueError, RuntimeError), match=cause):
            evaluate(model.train(), bad)
        assert model.training


@pytest.mark.parametrize("choice", [{}, {"feature_map": "t2r", "rope_order": "after", "keep_softmax": [0]}])
def test_a_folder_brings_the_model_back(choice: dict[str, Any], tmp_path: Path) -> None:
    student = convert(llama(tie_word_embeddings=True), **choice)
    match(student, llama(tie_word_embeddings=True), batches(0), steps=1)
    student.save_pretrained(tmp_path)
    loaded = LinRopeForCausalLM.from_pretrained(tmp_path).to(student.device).eval()
    batch = tokens(0).to(student.device)
    with torch.no_grad():
        assert torch.equal(loaded(batch).logits, student(batch).logits)
        assert loaded.generate(batch[:, :5], max_new_tokens=3, do_sample=False).shape == (8, 8)


def match_once(steps: int = 1, **options: Any) -> None:
    match(convert(llama(), **options), llama(), [tokens(0)], steps=steps)


@pytest.mark.parametrize(
    ("call", "cause"),
    [
        (lambda: convert(llama().model), "got LlamaModel, expected a causal"),
        (lambda: convert(make("Mistral", sliding_window=16)), "sliding_window=16"),
        (lambda: convert(make("Qwen3", head_dim=8)), "model_type='qwen3'"),
        (lambda: convert(GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2))), "model_type='gpt2'"),
        (lambda: convert(llama(hidden_act="gelu")), "hidden_act='gelu'"),
        (lambda: convert(llama(mlp_bias=True)), r"unexpected: \[.*mlp.gate_proj.bias"),
        (lambda: convert(llama(), keep_softmax=[1, 2]), r"keep_softmax: got \[2\], expected indices 0 .. 1"),
        (lambda: convert(llama(), feature_map="hedghog"), "did you mean 'hedgehog'"),
        (lambda: convert(llama(), rope_order="during"), "rope_order='during'"),
        (lambda: convert(llama(), feature_map="silu"), "normalize=False"),
        (lambda: match_once(feature_map="elu+1"), "has nothing to match"),
        (lambda: match_once(keep_softmax=range(2), gate=True), "has nothing to match"),
        (lambda: match_once(steps=2), "got 1, expected steps=2"),
        (lambda: match_once(steps=0), "steps=0"),
        (lambda: finetune(convert(llama()), [tokens(0)], steps=1, method="half"), "method='half'"),
    ],
)
def test_what_does_not_fit_is_named(call: Any, cause: str) -> None:
    with pytest.raises(TypeError if "LlamaModel" in cause else ValueError, match=cause):
        call()


def test_a_loss_that_is_not_finite_stops_and_leaves_no_additions() -> None:
    student = convert(llama())
    names = student.state_dict().keys()
    with torch.no_grad():
        student.model.norm.weight[0] = torch.inf
    with pytest.raises(RuntimeError, match="at step 0: expected finite numbers"):
        finetune(student, [tokens(0)], steps=1)
    assert student.state_dict().keys() == names
