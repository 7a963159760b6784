"""Samples from a language model."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Literal, overload

import torch
from torch import Tensor

from linrope.common.argument_checks import check_bools, check_sizes
from linrope.common.tracing import values_readable
from linrope.cuda_graphs import GraphedStep, check_on_cuda
from linrope.decode.parts import DecodableModel
from linrope.decode.preparation import prepare, why_not
from linrope.decode.sampling import LOWEST_TEMPERATURE, check_sampling, likeliest_first
from linrope.layer.state import LayerState

_PIECE = 1024  # tokens of the prompt in one call, which takes memory for each of them


# fmt: off
@overload
def generate(
    model: DecodableModel, prompt: Tensor, max_new_tokens: int, *, states: Sequence[Any] | None = ...,
    return_states: Literal[False] = ..., temperature: float = ..., top_k: int | None = ..., top_p: float | None = ...,
    seed: int | None = ..., graph: bool = ...,
) -> Iterator[Tensor]: ...
@overload
def generate(
    model: DecodableModel, prompt: Tensor, max_new_tokens: int, *, states: Sequence[Any] | None = ...,
    return_states: Literal[True], temperature: float = ..., top_k: int | None = ..., top_p: float | None = ...,
    seed: int | None = ..., graph: bool = ...,
) -> tuple[Tensor, list[Any]]: ...
# fmt: on
@torch.no_grad()
def generate(
    model: DecodableModel,
    prompt: Tensor,
    max_new_tokens: int,
    *,
    states: Sequence[Any] | None = None,
    return_states: bool = False,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int | None = None,
    graph: bool = False,
) -> Iterator[Tensor] | tuple[Tensor, list[Any]]:
    """Samples tokens one by one. With linear attention each takes the same time and memory.

    After the prompt it takes prepared steps (``linrope.decode.prepare``) if the model allows them. Do not change the
    model until the last token is drawn.

    Args:
        model: such as ``linrope.models.LanguageModel``.
        prompt: (b, n) integers, n >= 1: what the states have not read.
        max_new_tokens: the number of tokens to yield.
        states: those after the text before the prompt, one per block, which stay as they are; None: there is no text.
        return_states: returns all tokens at once and the states after them, to continue later.
        temperature: divides the logits; 0: always the likeliest token.
        top_k: samples only among the k likeliest tokens.
        top_p: samples only among the likeliest tokens whose probabilities add up to p: as few as possible, 1 or more.
        seed: the seed of the sampling; default: drawn from torch's generator.
        graph: on a CUDA device, replays the steps from the fourth on as a CUDA graph (``linrope.cuda_graphs``).

    Yields:
        (b,) tokens. With return_states=True it returns tokens (b, max_new_tokens) and the states instead. These have
        read the prompt and all tokens but the last, so the last token begins the next prompt.

    Raises:
        TypeError: prompt is no tensor.
        ValueError: an argument is out of range; or with graph=True a state grows, as that of softmax attention does.
        RuntimeError: graph=True on a CPU.

    >>> from linrope.decode import generate
    >>> from linrope.models import LanguageModel, LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(embed_dim=32, num_layers=2, num_heads=2))
    >>> prompt = torch.tensor([[76, 105]])
    >>> len(list(generate(model, prompt, 5, temperature=0.8, top_k=20, seed=1)))
    5
    >>> tokens, states = generate(model, prompt, 5, return_states=True)
    >>> more, states = generate(model, tokens[:, -1:], 5, states=states, return_states=True)
    >>> states[0].position  # 2 + 5 + 5 tokens, but for the last one
    tensor([11])
    """
    if not isinstance(prompt, Tensor):
        raise TypeError(
            f"prompt: got {type(prompt).__name__}, expected a tensor (b, n) of tokens; of a text's bytes: "
            "torch.tensor([[*text.encode()]])"
        )
    if prompt.ndim != 2 or prompt.shape[1] < 1:
        raise ValueError(f"prompt: got shape {tuple(prompt.shape)}, expected (b, n) with n >= 1")
    check_sizes(0, max_new_tokens=max_new_tokens)
    check_sampling(temperature, top_k, top_p, seed)
    check_bools(graph=graph, return_states=return_states)
    if return_states and not max_new_tokens:
        raise ValueError("max_new_tokens=0: expected at least 1 with return_states=True")
    if graph:
        check_on_cuda("graph=True", prompt.device)
    generator = torch.Generator(prompt.device)
    generator.manual_seed(int(torch.randint(2**62, ())) if seed is None else seed)
    sample = partial(_sample, temperature=temperature, top_k=top_k, top_p=top_p, generator=generator)
    after: list[Any] = []
    drawn = _generate(model, prompt, states, max_new_tokens, sample, [generator] if graph else None, after)
    return (torch.stack([*drawn], 1), after) if return_states else drawn


@torch.no_grad()
def _generate(
    model: DecodableModel,
    tokens: Tensor,
    states: Any,
    max_new_tokens: int,
    sample: Callable[[Tensor], Tensor],
    graph: list[torch.Generator] | None,
    after: list[Any],
) -> Iterator[Tensor]:
    """Yields tokens, and keeps the states that have read all of them but the last in ``after``.

    sample: from logits (b, 1, vocab_size) to tokens (b,). graph: its generators; None: without a graph.
    """
    if max_new_tokens == 0:
        return
    for piece in tokens.split(_PIECE, 1):
        logits, states = model(piece, states, logits_to_keep=1)
    after += states
    step = _step_after(model, after) if graph is None else _step_in_place(model, after)

    def take(token: Tensor) -> Tensor:
        return sample(step(token[:, None]))

    next_token: Callable[[Tensor], Tensor] = take if graph is None else GraphedStep(take, generators=graph)
    token = sample(logits)
    for left in reversed(range(max_new_tokens)):
        yield token
        if left:
            token = next_token(token)


def _step_after(model: DecodableModel, states: list[Any]) -> Callable[[Tensor], Tensor]:
    """Returns a function that maps the next tokens (b, 1) to their logits and keeps the next states in the list.

    It overwrites the states' memory where possible.
    """
    if why_not(model, states) is None:
        return prepare(model, states)

    def step(tokens: Tensor) -> Tensor:
        logits: Tensor
        logits, states[:] = model(tokens, [state.donate() for state in states])
        return logits

    return step


def _step_in_place(model: DecodableModel, states: list[Any]) -> Callable[[Tensor], Tensor]:
    """Like ``_step_after``, but always overwrites these states, whose addresses a graph records."""
    check_fixed_size(states)

    def step(tokens: Tensor) -> Tensor:
        logits: Tensor
        logits, after = model(tokens, [state.donate() for state in states])
        for state, new in zip(states, after, strict=True):
            state.write(new)  # copies only what the call has not written there itself
        return logits

    return step


def check_fixed_size(states: Sequence[Any]) -> None:
    """Raises ValueError unless decoding can overwrite every state in place."""
    for state in states:
        if not isinstance(state, LayerState):
            raise ValueError(
                f"graph=True: got a state of type {type(state).__name__}, whose memory may grow; expected linear "
                "attention in every layer"
            )


def _sample(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator: torch.Generator
) -> Tensor:
    """(b, 1, vocab_size) -> (b,) tokens."""
    logits = logits[:, -1].float()
    if temperature == 0:
        return logits.argmax(-1)
    tokens, probabilities = likeliest_first(logits, max(temperature, LOWEST_TEMPERATURE), top_p, top_k)
    if values_readable(probabilities) and not bool(probabilities.isfinite().all()):
        raise RuntimeError("logits: got NaN or infinity, expected finite numbers to sample from")
    # torch.multinomial draws in the same way, but on a GPU it waits for the probabilities to check them.
    draws = torch.empty_like(probabilities).exponential_(generator=generator)
    chosen = probabilities.div(draws).argmax(-1, keepdim=True)
    return tokens.gather(-1, chosen)[:, 0]
