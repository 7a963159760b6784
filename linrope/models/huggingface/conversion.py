"""Converts a trained softmax model to linear attention: copies its weights, matches its attention, finetunes.

    student = convert(teacher)                     # the same weights, the attention replaced
    match(student, teacher, batches, steps=300)    # trains only what is new, such as feature maps
    finetune(student, batches, steps=1000)         # next-token loss

These are the steps of LoLCATs (Zhang et al. 2024, arXiv 2410.10254), without its sliding window.
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

from linrope.common.argument_checks import check_sizes
from linrope.common.optional import need
from linrope.layer.config import LayerConfig
from linrope.models.huggingface.configuration import CHOICES, LinRopeConfig
from linrope.models.huggingface.modeling import LinRopeForCausalLM

FAMILIES = ("llama", "mistral", "qwen2")  # model types that differ from Llama only in their biases
FINETUNING = ("lora", "full")
_PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
_OWN = ("selective_rope", "layer_types", "plain_full_attention", "is_causal", "attention_bias")
_SAME = [name for name in LinRopeConfig.__annotations__ if name not in _OWN]  # Llama's configs have these too


@dataclass(frozen=True)
class Losses:
    """Losses on one held-out text, in bits per byte, as ``linrope convert`` reports; None: the step was skipped."""

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
    """Makes the same model with linear attention: copies all weights by name and adds new feature maps.

    The maps start as ``linrope.feature_maps`` makes them; torch's generator draws the random ones. The
    model is poor until ``match`` has trained them.

    Args:
        model: a Llama, Mistral or Qwen2 for causal language modeling. It is not changed.
        feature_map: as in LinRopeConfig.
        rope_order: "before" as in the softmax model, or "after" the feature map (RoFormer eq. 19).
        keep_softmax: indices of the layers that keep softmax attention. They stay as they are: no option adds to them.
        options: other options of LinRopeConfig. Here they default to those of a plain LinearRoPEAttention and not to
            the block of the models, because the softmax model has no gates, which would start with random weights.

    Raises:
        TypeError: model is not a causal language model of transformers.
        ValueError: the model has an unsupported part (the message names it), or an option does not fit.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from linrope.models.huggingface.conversion import convert
    >>> teacher = LlamaForCausalLM(LlamaConfig(vocab_size=50, hidden_size=32, intermediate_size=48,
    ...                                        num_hidden_layers=2, num_attention_heads=2))
    >>> student = convert(teacher, keep_softmax=[1])
    >>> student.config.layer_types
    ['linear_attention', 'full_attention']
    """
    weights = _convertible_weights(model)
    layers = model.config.num_hidden_layers
    if wrong := [index for index in keep_softmax if not 0 <= index < layers]:
        raise ValueError(f"keep_softmax: got {wrong}, expected indices 0 .. {layers - 1}")
    plain = LayerConfig(1, 1).to_dict()  # all that the block of the models adds is off
    # The block sets normalize=False with an erase_gate alone.
    new: dict[str, Any] = {
        name: plain[name] for name in CHOICES if name not in ("value_head_dim", "normalize")
    }
    new |= {
        "feature_map": feature_map,
        "rope_order": rope_order,
        "layer_types": [
            "full_attention" if index in keep_softmax else "linear_attention" for index in range(layers)
        ],
        "plain_full_attention": True,
        "attention_bias": any(name.endswith("q_proj.bias") for name in weights),
    }
    same: dict[str, Any] = {name: getattr(model.config, name, None) for name in _SAME}
    head_dim = same["head_dim"] or model.config.hidden_size // model.config.num_attention_heads
    student = LinRopeForCausalLM(LinRopeConfig(**same, value_head_dim=head_dim, **(new | options)))
    student.to(model.device, model.dtype)  # type: ignore[arg-type]

    missing, unexpected = student.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not _is_new(name) and not name.endswith("o_proj.bias")]
    if missing or unexpected:
        raise ValueError(f"model: expected Llama's weights; unexpected: {unexpected}; missing: {missing}")
    with torch.no_grad():
        for name, parameter in student.named_parameters():
            if name not in weights and name.endswith("o_proj.bias"):  # Qwen2 has biases of q, k and v only
                parameter.zero_()
    student.generation_config = copy.deepcopy(model.generation_config)
    student.eval()
    return student


def new_parameters(student: LinRopeForCausalLM) -> list[nn.Parameter]:
    """The weights that the softmax model does not have, which ``match`` trains. Frozen ones are left out."""
    return [
        parameter
        for name, parameter in student.named_parameters()
        if _is_new(name) and parameter.requires_grad
    ]


def match(
    student: LinRopeForCausalLM,
    teacher: PreTrainedModel,
    batches: Iterable[Tensor],
    *,
    steps: int,
    learning_rate: float = 1e-2,
) -> list[float]:
    """Trains the student's new parameters to reproduce the outputs of the teacher's attention.

        loss = mean over linear layers of |y - y'|^2 / |y|^2,   y' = attention(x)

    x and y are the inputs and outputs of the teacher's attention, so no layer sees the errors of earlier
    layers. Only what the teacher lacks changes: feature maps and, if there are any, gates, norms, convolution,
    learned decay, selective steps and skip.

    Args:
        student: the model that ``convert`` made from the teacher.
        teacher: the softmax model. It is not changed.
        batches: tokens (b, n), at least as many batches as steps.
        steps: the number of updates, with AdamW; the learning rate falls to a tenth.
        learning_rate: the rate of the first step.

    Returns:
        The loss of each step. An attention whose outputs are 0 has the loss 1.

    Raises:
        ValueError: the student has nothing to learn, or there are too few batches.
        RuntimeError: the loss or a gradient is not finite.

    Source: attention transfer, arXiv 2410.10254.
    """
    parameters = new_parameters(student)
    if not parameters:
        raise ValueError("student: has nothing to match, expected linear layers with a learned feature map")
    kinds = student.config.layer_types or []
    linear = [index for index, kind in enumerate(kinds) if kind == "linear_attention"]
    teacher_pairs: dict[int, tuple[Tensor, Tensor]] = {}  # (x, y) by layer

    def record(index: int) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any], output: tuple[Tensor, Any]) -> None:
            teacher_pairs[index] = kwargs["hidden_states"], output[0]

        return hook

    def loss(tokens: Tensor) -> Tensor:
        with torch.no_grad():
            teacher.model(tokens, use_cache=False)
        errors = []
        for index in linear:
            x, y = teacher_pairs.pop(index)
            difference = student.model.layers[index].self_attn(x) - y
            errors.append(difference.float().square().sum() / y.float().square().sum())
        return torch.stack(errors).mean()

    training = teacher.training
    teacher.eval()
    hooks = [
        teacher.model.layers[index].self_attn.register_forward_hook(record(index), with_kwargs=True)
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
        student: the model after ``match``.
        batches: tokens (b, n), at least as many batches as steps.
        steps: the number of updates, with AdamW; the learning rate falls to a tenth.
        method: "full": trains all weights that are not frozen (requires_grad=False). "lora": trains the student's new
            parameters that are not frozen, and low-rank updates of W_q, W_k, W_v and W_o in all layers. It merges the
            updates at the end.
        learning_rate: the rate of the first step.
        rank: the rank of the updates, which are scaled by 2.

    Returns:
        The loss of each step, in nats per token.

    Raises:
        ModuleNotFoundError: method="lora", and peft is not installed.
        ValueError: the method is unknown, or there are too few batches.
        RuntimeError: the loss or a gradient is not finite.

    Source: LoRA, Hu et al. 2021, arXiv 2106.09685.
    """
    if method not in FINETUNING:
        raise ValueError(f"method={method!r}: expected one of {', '.join(FINETUNING)}")

    def loss(tokens: Tensor) -> Tensor:
        value: Tensor = student(tokens, labels=tokens, use_cache=False).loss
        return value

    if method == "full":
        return _train(
            [x for x in student.parameters() if x.requires_grad], loss, batches, steps, learning_rate
        )
    peft = need("peft", "linrope[huggingface]")
    lora = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=_PROJECTIONS)
    new = new_parameters(student)
    trainable = [parameter for parameter in student.parameters() if parameter.requires_grad]
    # This wraps modules inside the student, and freezes the others.
    adapted = peft.LoraModel(student, lora, "default")
    for parameter in new:
        parameter.requires_grad_(True)
    learning = [parameter for parameter in student.parameters() if parameter.requires_grad]
    try:
        return _train(learning, loss, batches, steps, learning_rate)
    finally:
        adapted.merge_and_unload()
        student.requires_grad_(False)
        for parameter in trainable:
            parameter.requires_grad_(True)


@torch.no_grad()
def evaluate(model: PreTrainedModel, batches: Collection[Tensor]) -> float:
    """The mean next-token loss in nats per token, over batches (b, n) of equal size, at least one."""
    training = model.training
    model.eval()
    try:
        losses = [
            float(model(tokens.to(model.device), labels=tokens.to(model.device), use_cache=False).loss)
            for tokens in batches
        ]
    finally:
        model.train(training)
    if not losses:
        raise ValueError("batches: got none, expected at least one")
    return math.fsum(losses) / len(losses)


def _convertible_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's weights; raises for a model that cannot be converted."""
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
        raise ValueError(f"sliding_window={window}: expected None, since the student attends to all tokens")
    weights: dict[str, Tensor] = model.state_dict()
    return weights


def _is_new(name: str) -> bool:
    """Whether a softmax model has no such parameter: one of the attention that is no projection."""
    parts = name.split(".")
    return "self_attn" in parts and parts[parts.index("self_attn") + 1] not in _PROJECTIONS


def _train(
    parameters: list[nn.Parameter],
    loss: Callable[[Tensor], Tensor],
    batches: Iterable[Tensor],
    steps: int,
    learning_rate: float,
) -> list[float]:
    """AdamW without weight decay, on these parameters only; the rate follows a cosine down to a tenth."""
    check_sizes(steps=steps)
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
