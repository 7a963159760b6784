"""From a trained softmax model to linear attention: take its weights, match its attention, finetune.

    student = convert(teacher)                     # weights as they are, attention replaced
    match(student, teacher, batches, steps=300)    # only the feature maps learn
    finetune(student, batches, steps=1000)         # next-token loss

The steps of LoLCATs (Zhang et al. 2024, arXiv 2410.10254), without its sliding window.
"""

import copy
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from linrope.models.huggingface.configuration import LinRopeConfig
from linrope.models.huggingface.modeling import LinRopeForCausalLM
from linrope.models.training.optional import need

FAMILIES = ("llama", "mistral", "qwen2")  # model types that differ from Llama in their biases alone
FINETUNING = ("lora", "full")
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
# Modules and parameters that a softmax model does not have.
_NEW = {"feature_map", "g_proj", "out_norm", "decay_logit", "forget_gate", "angle_steps", "short_conv"}
_NEW |= {"q_norm", "k_norm"}
_SAME = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "max_position_embeddings", "rope_parameters", "rms_norm_eps",
    "initializer_range", "tie_word_embeddings", "use_cache", "pad_token_id", "bos_token_id", "eos_token_id",
)  # fmt: skip


@dataclass(frozen=True)
class Losses:
    """Next-token losses of one held-out text, in nats per token; None: that step was left out."""

    before: float
    after_replacement: float
    after_matching: float | None
    after_finetuning: float | None


def convert(
    model: PreTrainedModel,
    *,
    feature_map: str | dict[str, Any] = "hedgehog",
    rope_order: str = "before",
    keep_softmax: Collection[int] = (),
    **options: Any,
) -> LinRopeForCausalLM:
    """The same model with linear attention: all weights are copied by name, learned feature maps are new.

    Maps start as ``linrope.feature_maps`` makes them, random ones from torch's generator. Until ``match`` has
    trained them the model is poor.

    Args:
        model: a Llama, Mistral or Qwen2 for causal language modeling; it is left as it is.
        feature_map: as in LinRopeConfig.
        rope_order: "before" as in the softmax model, or "after" the feature map (RoFormer eq. 19).
        keep_softmax: indices of the layers whose attention stays.
        options: further ones of LinRopeConfig: decay, forget_gate, selective_rope, short_conv, qk_norm,
            normalize, out_norm, gate. Decay is None and the last two are False if not given: a model does
            without them at first, and gate and norm start at random.

    Raises:
        TypeError: model is not a model of transformers for causal language modeling.
        ValueError: a model with parts that are not supported, named; an option that does not fit.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from linrope.models.huggingface.conversion import convert
    >>> teacher = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48,
    ...                                        num_hidden_layers=2, num_attention_heads=2))
    >>> student = convert(teacher, keep_softmax=[1])
    >>> student.config.layer_types
    ['linear_attention', 'full_attention']
    """
    weights = _check(model)
    layers = model.config.num_hidden_layers
    if wrong := [index for index in keep_softmax if not 0 <= index < layers]:
        raise ValueError(f"keep_softmax: got {wrong}, expected indices 0 .. {layers - 1}")
    new: dict[str, Any] = {
        "feature_map": feature_map,
        "rope_order": rope_order,
        "decay": None,
        "layer_types": [
            "full_attention" if index in keep_softmax else "linear_attention" for index in range(layers)
        ],
        "attention_bias": any(name.endswith("q_proj.bias") for name in weights),
        "out_norm": False,
        "gate": False,
    }
    same: dict[str, Any] = {name: getattr(model.config, name, None) for name in _SAME}
    student = LinRopeForCausalLM(LinRopeConfig(**same, **(new | options)))
    student.to(model.device, model.dtype)  # type: ignore[arg-type]

    missing, unexpected = student.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not _is_new(name) and not name.endswith("o_proj.bias")]
    if missing or unexpected:
        raise ValueError(f"model: expected Llama's weights; got too many, {unexpected}; too few, {missing}")
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if name not in weights and name.endswith("o_proj.bias"):  # Qwen2 has biases of q, k and v alone
                parameter.zero_()
    student.generation_config = copy.deepcopy(model.generation_config)
    student.eval()
    return student


def match(
    student: LinRopeForCausalLM,
    teacher: PreTrainedModel,
    batches: Iterable[Tensor],
    *,
    steps: int,
    learning_rate: float = 1e-2,
) -> list[float]:
    """Trains what is new in the student until its attention gives what the teacher's gives.

        loss = mean over linear layers of |y - y'|^2 / |y|^2,   y' = attention(x)

    x and y are what the teacher's attention gets and gives: no layer sees the errors of those before it.
    Nothing but the feature maps, and gates and norms where they are, changes.

    Args:
        student: what ``convert`` made of the teacher.
        teacher: stays as it is.
        batches: tokens (b, n), at least as many batches as steps.
        steps: updates, with AdamW; the rate falls to a tenth.
        learning_rate: of the first step.

    Returns:
        The loss of each step; that of an attention which gives 0 is 1.

    Raises:
        ValueError: there is nothing to learn; too few batches.
        RuntimeError: the loss or a gradient is not finite.

    Source: attention transfer, arXiv 2410.10254.
    """
    parameters = [parameter for name, parameter in student.named_parameters() if _is_new(name)]
    if not parameters:
        raise ValueError("student: has nothing to match, expected linear layers with a learned feature map")
    kinds = student.config.layer_types or []
    linear = [index for index, kind in enumerate(kinds) if kind == "linear_attention"]
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def keep(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: tuple[Tensor, Any]) -> None:
            seen[index] = kwargs["hidden_states"], output[0]

        return hook

    def loss(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            teacher.model(tokens, use_cache=False)
        errors = []
        for index in linear:
            x, y = seen.pop(index)
            difference = student.model.layers[index].self_attn(x) - y
            errors.append(difference.float().square().sum() / y.float().square().sum())
        return torch.stack(errors).mean()

    training = teacher.training
    teacher.eval()
    hooks = [
        teacher.model.layers[index].self_attn.register_forward_hook(keep(index), with_kwargs=True)
        for index in linear
    ]
    try:
        return _train(parameters, loss, batches, steps, learning_rate)
    finally:
        for handle in hooks:
            handle.remove()
        teacher.train(training)


def finetune(
    student: LinRopeForCausalLM,
    batches: Iterable[Tensor],
    *,
    steps: int,
    method: str = "lora",
    learning_rate: float = 1e-3,
    rank: int = 8,
) -> list[float]:
    """Trains the student to predict the next token.

    Args:
        student: after ``match``.
        batches: tokens (b, n), at least as many batches as steps.
        steps: updates, with AdamW; the rate falls to a tenth.
        method: "lora": additions of low rank to W_q, W_k, W_v and W_o of all layers, which are merged into
            them at the end, and what is new in the student; or "full": all weights.
        learning_rate: of the first step.
        rank: of the additions, which are scaled by 2.

    Returns:
        The loss of each step, in nats per token.

    Raises:
        ModuleNotFoundError: method="lora", and peft is not installed.
        ValueError: unknown method; too few batches.
        RuntimeError: the loss or a gradient is not finite.

    Source: LoRA, Hu et al. 2021, arXiv 2106.09685.
    """
    if method not in FINETUNING:
        raise ValueError(f"method={method!r}: expected one of {', '.join(FINETUNING)}")

    def loss(tokens: Tensor) -> Tensor:
        value: Tensor = student(tokens, labels=tokens, use_cache=False).loss
        return value

    if method == "full":
        return _train(list(student.parameters()), loss, batches, steps, learning_rate)
    peft = need("peft", "linrope[huggingface]")
    choice = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_PROJECTIONS)
    adapted = peft.LoraModel(student, choice, "default")  # changes the student's own modules
    for name, parameter in student.named_parameters():
        if _is_new(name):
            parameter.requires_grad_(True)
    learning = [parameter for parameter in student.parameters() if parameter.requires_grad]
    try:
        return _train(learning, loss, batches, steps, learning_rate)
    finally:
        adapted.merge_and_unload()
        student.requires_grad_(True)


@torch.no_grad()
def evaluate(model: PreTrainedModel, batches: Collection[Tensor]) -> float:
    """The mean next-token loss in nats per token, of batches (b, n) of one size."""
    training = model.training
    model.eval()
    losses = [
        float(model(tokens.to(model.device), labels=tokens.to(model.device), use_cache=False).loss)
        for tokens in batches
    ]
    model.train(training)
    return math.fsum(losses) / len(losses)


def _check(model: PreTrainedModel) -> dict[str, Tensor]:
    """The weights of a model that can be converted."""
    if not isinstance(model, PreTrainedModel) or not hasattr(model, "lm_head"):
        raise TypeError(
            f"model: got {type(model).__name__}, expected a causal language model of transformers"
        )
    config = model.config
    if config.model_type not in FAMILIES:
        raise ValueError(f"model_type={config.model_type!r}: expected one of {', '.join(FAMILIES)}")
    if config.hidden_act not in ("silu", "swish"):
        raise ValueError(f"hidden_act={config.hidden_act!r}: expected 'silu'")
    if (window := getattr(config, "sliding_window", None)) is not None:
        raise ValueError(f"sliding_window={window}: expected None, as attention is to see all tokens")
    weights: dict[str, Tensor] = model.state_dict()
    return weights


def _is_new(name: str) -> bool:
    return not _NEW.isdisjoint(name.split("."))


def _train(
    parameters: list[nn.Parameter],
    loss: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    steps: int,
    learning_rate: float,
) -> list[float]:
    """AdamW without weight decay, a cosine down to a tenth; gradients of the parameters alone."""
    if steps < 1:
        raise ValueError(f"steps={steps}: expected at least 1")
    optimizer = torch.optim.AdamW(parameters, learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    for tokens in islice(batches, steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate * (0.55 + 0.45 * math.cos(math.pi * len(losses) / steps))
        value = loss(tokens.to(parameters[0].device))
        optimizer.zero_grad()
        value.backward(inputs=parameters)
        norm = nn.utils.clip_grad_norm_(parameters, 1.0)
        if not (math.isfinite(value.item()) and math.isfinite(norm.item())):
            raise RuntimeError(
                f"loss {value.item()}, gradient norm {norm.item()} at step {len(losses)}: "
                "expected finite numbers"
            )
        optimizer.step()
        losses.append(value.item())
    if len(losses) < steps:
        raise ValueError(f"batches: got {len(losses)}, expected steps={steps}")
    return losses
