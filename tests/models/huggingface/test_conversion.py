from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

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


def llama(**options: Any) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | {"initializer_range": 0.3} | options))).eval()


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


MODELS = {
    "grouped heads": (LlamaForCausalLM, LlamaConfig, {}),
    "tied, wide heads": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": True, "head_dim": 16}),
    "all biases": (LlamaForCausalLM, LlamaConfig, {"attention_bias": True}),
    "yarn": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": YARN}),
    "llama3": (LlamaForCausalLM, LlamaConfig, {"rope_parameters": LLAMA3}),
    "mistral": (MistralForCausalLM, MistralConfig, {"sliding_window": None}),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
}


ADDED: dict[str, Any] = {
    "gate": True,
    "out_norm": True,
    "qk_norm": True,
    "skip": "after",
    "short_conv": {"taps": 4, "activation": "silu"},
}


@pytest.mark.parametrize(("kind", "added"), [*((kind, {}) for kind in MODELS), ("grouped heads", ADDED)])
def test_with_all_layers_kept_nothing_changes(kind: str, added: dict[str, Any]) -> None:
    make, config, options = MODELS[kind]
    torch.manual_seed(0)
    teacher = make(config(**(SIZES | {"initializer_range": 0.3} | options))).eval()
    with torch.no_grad():
        for name, parameter in teacher.named_parameters():
            if name.endswith("bias"):  # which start at 0
                parameter.normal_()
    student = convert(teacher, keep_softmax=range(2), **added)
    batch = tokens(0).to(teacher.device)
    with torch.no_grad():
        expected = teacher(batch).logits
        torch.testing.assert_close(student(batch).logits, expected, rtol=1e-5, atol=1e-5)
    if kind.startswith("tied"):
        assert student.lm_head.weight is student.model.embed_tokens.weight


NEW_PARTS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    ({"gate": True, "out_norm": True}, "g_proj out_norm"),
    (
        {"qk_norm": True, "qk_bias": True, "trapezoid": True, "out_norm": True, "rope_order": "after"},
        "q_norm k_norm q_bias k_bias trapezoid out_norm",
    ),
]


@pytest.mark.parametrize(("options", "parts"), NEW_PARTS, ids=str)
def test_weights_of_one_name_are_equal(options: dict[str, Any], parts: str) -> None:
    teacher = llama()
    teacher.generation_config.temperature = 0.5
    student = convert(teacher, keep_softmax=[1], **options)
    own, given = student.state_dict(), teacher.state_dict()
    assert all(torch.equal(own[name], weight) for name, weight in given.items())
    assert {name.split(".")[4] for name in own.keys() - given.keys()} == {"feature_map", *parts.split()}
    assert student.generation_config.to_dict() == teacher.generation_config.to_dict()


def test_kept_layers_attend_as_the_teacher_and_linear_ones_by_the_formula() -> None:
    teacher = llama(rope_parameters=YARN)
    student = convert(teacher, keep_softmax=[1]).double()
    seen: list[tuple[Tensor, Tensor]] = []
    for layer in teacher.model.layers:
        layer.self_attn.register_forward_hook(
            lambda module, args, kwargs, out: seen.append((kwargs["hidden_states"], out[0])), with_kwargs=True
        )
    with torch.no_grad():
        teacher(tokens(0).to(teacher.device))
        linear, kept = (layer.self_attn for layer in student.model.layers)
        x, expected = seen[1]
        torch.testing.assert_close(kept(x.double()).float(), expected, rtol=1e-5, atol=1e-5)

        # linear: phi = softmax([W x, -W x]) of q and k, turned as the teacher turns them
        x = seen[0][0].double()
        (b, n, _), attention = x.shape, teacher.model.layers[0].self_attn
        cos, sin = (
            y.double()[:, :, None]
            for y in teacher.model.rotary_emb(x, torch.arange(n, device=x.device)[None])
        )
        q = (x @ attention.q_proj.weight.double().T).view(b, n, 4, 8)
        k = (x @ attention.k_proj.weight.double().T).view(b, n, 2, 8).repeat_interleave(2, 2)
        v = (x @ attention.v_proj.weight.double().T).view(b, n, 2, 8).repeat_interleave(2, 2)
        q, k = (y * cos + torch.cat((-y[..., 4:], y[..., :4]), -1) * sin for y in (q, k))
        q, k = (torch.cat((y, -y), -1).softmax(-1) for y in (q, k))  # W starts as the identity
        weights = torch.einsum("bnhf,bmhf->bhnm", q, k).tril()
        out = torch.einsum("bhnm,bmhe->bnhe", weights / weights.sum(-1, keepdim=True), v)
        expected = out.flatten(2) @ attention.o_proj.weight.double().T
        # cos and sin of the teacher are float32
        torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-5)


LOWERED: dict[str, dict[str, Any]] = {
    "all defaults": {},
    "all options": {"rope_order": "after", "feature_map": "t2r", "keep_softmax": [1]},
}
ONE_OPTION: dict[str, dict[str, Any]] = {
    "after": {"rope_order": "after"},
    "t2r": {"feature_map": "t2r"},
    "hybrid": {"keep_softmax": [1]},
}


@pytest.mark.xdist_group("conversion")  # one worker trains the model
@pytest.mark.parametrize(
    "choice",
    [
        *(pytest.param(choice, id=name) for name, choice in LOWERED.items()),
        *(pytest.param(choice, id=name, marks=pytest.mark.long) for name, choice in ONE_OPTION.items()),
    ],
)
def test_each_step_lowers_the_loss(trained: LlamaForCausalLM, choice: dict[str, Any]) -> None:
    torch.manual_seed(1)
    student = convert(trained, **choice)
    before = {name: weight.clone() for name, weight in student.state_dict().items()}
    losses = [evaluate(trained, HELD_OUT), evaluate(student, HELD_OUT)]
    errors = match(student, trained, batches(1000), steps=60)
    assert errors[-1] < errors[0]
    for name, weight in student.state_dict().items():
        assert torch.equal(weight, before[name]) != ("feature_map" in name), name
    losses.append(evaluate(student, HELD_OUT))
    finetune(student, batches(2000), steps=60, learning_rate=5e-3)
    losses.append(evaluate(student, HELD_OUT))
    assert losses[0] < losses[3] < losses[2] < losses[1]


def test_matching_leaves_the_teacher_alone_and_repeats() -> None:
    teacher = llama().train()
    given = {name: weight.clone() for name, weight in teacher.state_dict().items()}
    losses = [match(convert(teacher), teacher, batches(0), steps=3) for _ in range(2)]
    assert losses[0] == losses[1]
    assert teacher.training
    assert not any(module._forward_hooks for module in teacher.modules())
    assert all(torch.equal(weight, given[name]) for name, weight in teacher.state_dict().items())
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_lora_changes_projections_and_maps_full_finetuning_all() -> None:
    teacher = llama(attention_bias=True)
    for method in ("lora", "full"):
        student = convert(teacher)
        frozen = {"model.norm.weight", "model.layers.0.self_attn.feature_map.phi.weight"}
        for name in frozen:
            student.get_parameter(name).requires_grad_(False)
        before = {name: weight.clone() for name, weight in student.state_dict().items()}
        losses = finetune(student, cycle([tokens(0)]), steps=4, method=method, rank=2)
        assert losses[-1] < losses[0]
        assert student.state_dict().keys() == before.keys()
        changed = {name for name, weight in student.state_dict().items() if not weight.equal(before[name])}
        low_rank = {name for name in before if "feature_map" in name or name.endswith("_proj.weight")}
        low_rank -= {name for name in before if ".mlp." in name}
        assert changed == (low_rank if method == "lora" else set(before)) - frozen
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


@pytest.mark.parametrize(
    ("model", "cause"),
    [
        (lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)), "sliding_window=16"),
        (lambda: llama(hidden_act="gelu"), "hidden_act='gelu'"),
        (lambda: llama(mlp_bias=True), r"unexpected: \[.*mlp.gate_proj.bias"),
        (lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8)), "model_type='qwen3'"),
        (lambda: GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2)), "model_type='gpt2'"),
    ],
)
def test_models_with_other_parts_are_refused(model: Any, cause: str) -> None:
    with pytest.raises(ValueError, match=cause):
        convert(model())


def test_what_does_not_fit_is_named() -> None:
    with pytest.raises(TypeError, match="got LlamaModel, expected a causal"):
        convert(LlamaModel(LlamaConfig(**SIZES)))
    teacher = llama()
    for options, cause in (
        ({"keep_softmax": [1, 2]}, r"keep_softmax: got \[2\], expected indices 0 .. 1"),
        ({"feature_map": "hedghog"}, "did you mean 'hedgehog'"),
        ({"rope_order": "during"}, "rope_order='during'"),
        ({"feature_map": "silu"}, "normalize=False"),
    ):
        with pytest.raises(ValueError, match=cause):
            convert(teacher, **options)
    for options in ({"feature_map": "elu+1"}, {"keep_softmax": range(2), "gate": True}):
        with pytest.raises(ValueError, match="has nothing to match"):
            match(convert(teacher, **options), teacher, batches(0), steps=1)
    with pytest.raises(ValueError, match="got 1, expected steps=2"):
        match(convert(teacher), teacher, [tokens(0)], steps=2)
    with pytest.raises(ValueError, match="steps=0"):
        match(convert(teacher), teacher, [tokens(0)], steps=0)
    with pytest.raises(ValueError, match="method='half'"):
        finetune(convert(teacher), [tokens(0)], steps=1, method="half")


def test_a_loss_that_is_not_finite_stops_and_leaves_no_additions() -> None:
    student = convert(llama())
    names = student.state_dict().keys()
    with torch.no_grad():
        student.model.norm.weight[0] = torch.inf
    with pytest.raises(RuntimeError, match="at step 0: expected finite numbers"):
        finetune(student, [tokens(0)], steps=1)
    assert student.state_dict().keys() == names
