"""The layer and whole models: the default block, softmax attention in it, generation, torch.compile, CUDA graphs."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.gpu.machine import Machine, Row, Shape, each, finite, whole
from linrope import LinearRoPEAttention
from linrope.decode import generate as generate_tokens
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import pack

LAYERS, VOCABULARY = 4, 256
# How far results in bfloat16 may be from those in float32, as a fraction of their norm: 16 roundings of 2^-8
TOLERANCE = 2.0**-4
SIZES: list[Shape] = [(8, 1024, 16, 64), (2, 4096, 16, 64), (1, 16_384, 16, 64)]
SMALL: Shape = (1, 40, 2, 64)


# The layer


def block(on: Machine) -> Iterator[Row]:
    """The default block's layer: training, and a decoding step."""
    training = [(8, 1024, 16, 64), (1, 16_384, 16, 64), (8, 1024, 8, 128)]
    yield from each(on.sizes(training, [SMALL]), partial(block_row, on))
    yield from each(on.sizes([(64, 1, 16, 64), (64, 1, 8, 128)], [(2, 1, 2, 64)]), partial(step_row, on))


def layers_of(on: Machine, shape: Shape) -> tuple[LinearRoPEAttention, LinearRoPEAttention, Tensor]:
    """The layer with linrope's kernels, the same in plain PyTorch and float32, and an input."""
    b, n, h, d = shape
    torch.manual_seed(0)
    plain = LinearRoPEAttention.block(h * d, h, backend="eager", device=on.device)
    layer = LinearRoPEAttention.block(h * d, h, backend=on.backend, device=on.device, dtype=on.layer_dtype)
    layer.load_state_dict(plain.state_dict())
    return layer, plain, torch.randn(b, n, h * d, device=on.device)


def block_row(on: Machine, shape: Shape) -> Row:
    layer, plain, x = layers_of(on, shape)
    g, few, results = torch.randn_like(x), (slice(0, 1), slice(0, 1024)), []
    for one, dtype in ((layer, on.layer_dtype), (plain, torch.float32)):
        y = x[few].to(dtype).requires_grad_()
        out = one(y)
        results.append((out, *torch.autograd.grad(out, (y, *one.parameters()), g[few].to(dtype))))
    finite(*results[0])
    row: Row = {"errors": differences(layer, *results)}
    x, g = x.to(on.layer_dtype).requires_grad_(), g.to(on.layer_dtype)

    def training() -> tuple[Tensor, ...]:
        return torch.autograd.grad(layer(x), (x, *layer.parameters()), g)

    forward = torch.no_grad()(partial(layer, x))
    row |= {"forward launches": len(on.kernels(forward)), "training launches": len(on.kernels(training))}
    return row | on.both_times("forward", forward) | on.both_times("training", training)


def differences(layer: torch.nn.Module, found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> Row:
    """The errors of a layer's output, and of the gradients of its input and parameters."""
    names = ("out", "dx", *(f"d {name}" for name, _ in layer.named_parameters()))
    return {
        name: whole(name, x.detach(), y.detach(), TOLERANCE)
        for name, x, y in zip(names, found, expected, strict=True)
    }


@torch.no_grad()
def step_row(on: Machine, shape: Shape) -> Row:
    """A decoding step of the layer, which overwrites its state; beside the token of one call."""
    layer, plain, x = layers_of(on, (shape[0], 20, *shape[2:]))
    _, state = layer(x[:, :19].to(on.layer_dtype), return_state=True)
    token = x[:, 19:].to(on.layer_dtype)
    out, _ = layer(token, state=state.clone().donate(), return_state=True)
    row: Row = {"errors": {"out": whole("out", out, plain(x)[:, 19:], TOLERANCE)}}

    def step() -> Tensor:
        return layer(token, state=state.donate(), return_state=True)[0]

    return row | {"launches": len(on.kernels(step))} | on.both_times("step", step)


# Models


def model_of(
    on: Machine, shape: Shape, attention: str = "linear", backend: str | None = None, layers: int = LAYERS
) -> LanguageModel:
    """The default block, or softmax attention in it, with random weights, the same in each call."""
    _, _, heads, dim = shape
    torch.manual_seed(0)
    config = LanguageModelConfig(
        vocab_size=VOCABULARY, embed_dim=heads * dim, num_heads=heads, num_layers=on.sizes(layers, 1),
        attention=attention, backend=backend or on.backend,
    )  # fmt: skip
    return LanguageModel(config).to(on.device)


def check_model(on: Machine, model: Callable[..., Any], plain: LanguageModel, tokens: Tensor) -> float:
    """The error of the logits under autocast, relative to plain PyTorch in float32. AssertionError: it is large."""
    with torch.no_grad():
        with torch.autocast(on.device, on.dtype):
            logits = model(tokens)[0].float()
        return whole("logits", logits, plain(tokens)[0], TOLERANCE)


def loss_of(on: Machine, model: Callable[..., Any], tokens: Tensor) -> Tensor:
    with torch.autocast(on.device, on.dtype):
        logits, _ = model(tokens[:, :-1], return_states=False)
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def random_tokens(on: Machine, shape: Shape) -> Tensor:
    return torch.randint(VOCABULARY, shape[:2], device=on.device)


def steps_of(
    on: Machine, model: Any, tokens: Tensor, parameters: list[Tensor]
) -> tuple[Callable[[], Tensor], Callable[[], tuple[Tensor, ...]]]:
    """A forward pass, and a training step without an optimizer."""
    loss = partial(loss_of, on, model, tokens)
    return torch.no_grad()(loss), lambda: torch.autograd.grad(loss(), parameters)


def model(on: Machine) -> Iterator[Row]:
    yield from each(on.sizes(SIZES, [SMALL]), partial(model_row, on))


def model_row(on: Machine, shape: Shape) -> Row:
    """Times of both models under autocast, launched from Python and in a CUDA graph."""
    row: Row = {"functions": {}, "errors": {}}
    tokens = random_tokens(on, shape)
    for name in ("linear", "softmax"):
        model = model_of(on, shape, name)
        row["errors"][name] = check_model(
            on, model, model_of(on, shape, name, backend="eager"), tokens[:1, :1024]
        )
        forward, training = steps_of(on, model, tokens, [*model.parameters()])
        times = on.both_times("forward", forward) | on.both_times("training", training)
        if on.on_gpu:
            torch.cuda.reset_peak_memory_stats()
            training()
            times["training"]["peak_memory"] = torch.cuda.max_memory_allocated()
        row["functions"][name] = times
    return row


def generate(on: Machine) -> Iterator[Row]:
    """Greedy decoding, also in a graph: every token must be the likeliest of one call with all tokens, or nearly."""
    yield from each(["linrope", "transformers"], partial(generate_row, on))


@torch.no_grad()
def generate_row(on: Machine, library: str) -> Row:
    batch, new = on.sizes(64, 2), on.sizes(128, 4)
    if library == "linrope":
        model: Any = model_of(on, on.sizes(SIZES[0], SMALL))
        call = lambda tokens: model(tokens)[0]  # noqa: E731
    else:
        from linrope.models.huggingface import LinRopeConfig, LinRopeForCausalLM

        torch.manual_seed(0)
        heads = on.sizes(16, 2)
        sizes = {"hidden_size": 64 * heads, "num_attention_heads": heads, "num_hidden_layers": LAYERS}
        config = LinRopeConfig(vocab_size=VOCABULARY, intermediate_size=128 * heads, **sizes)
        model = LinRopeForCausalLM(config).to(on.device).eval()
        call = lambda tokens: model(tokens).logits  # noqa: E731
    prompt = torch.randint(1, VOCABULARY, (batch, on.sizes(512, 8)), device=on.device)

    def run(graph: bool) -> Tensor:
        if library == "linrope":
            return torch.stack([*generate_tokens(model, prompt, new, temperature=0, graph=graph)], 1)
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "graph": graph}
        out: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **how)
        return out[:, prompt.shape[1] :]

    row: Row = {"batch": batch, "errors": {}, "tokens/s": {}}
    for way in ("launched", "graph"):
        graph = way == "graph" and on.has_graphs
        run(graph)
        on.wait()
        begun = time.perf_counter()
        tokens = run(graph)
        on.wait()
        row["tokens/s"][way] = batch * new / (time.perf_counter() - begun)
        assert tokens.shape == (batch, new), tokens.shape
        logits = call(torch.cat((prompt, tokens), 1))[:, prompt.shape[1] - 1 : -1].float()
        behind = logits.amax(-1) - logits.gather(-1, tokens[..., None])[..., 0]
        row["errors"][way] = error = float(behind.max() / logits.std())
        assert error <= 1e-2, f"{way}: a token is {error:.3g} standard deviations behind the likeliest"
    return row


# torch.compile and CUDA graphs


def compiled(on: Machine) -> Iterator[Row]:
    modes = ["default", "reduce-overhead"]
    models = [("linear", "default"), ("softmax", "default"), ("linear", "reduce-overhead")]
    yield from each(on.sizes(modes, modes[:1]), partial(compiled_layer, on))
    yield from each(on.sizes(models, models[:1]), partial(compiled_model, on))


def graph_breaks() -> int:
    return sum(torch._dynamo.utils.counters["graph_break"].values())


def fresh_compiler() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled_layer(on: Machine, mode: str) -> Row:
    fresh_compiler()
    shape = on.sizes((8, 1024, 16, 64), SMALL)
    layer, _, x = layers_of(on, shape)
    x = x.to(on.layer_dtype).requires_grad_()

    def training(call: Callable[[Tensor], Tensor]) -> tuple[Tensor, ...]:
        out = call(x)
        return out, *torch.autograd.grad(out.float().square().mean(), (x, *layer.parameters()))

    # Before the compiled call: it also copies constants to the GPU, or else the layer would be compiled twice.
    expected = training(layer)
    begun = time.perf_counter()
    fast = torch.compile(layer, mode=mode)
    for _ in range(on.sizes(3, 1)):  # a mode with CUDA graphs records in the second call
        found = training(fast)
    row: Row = {"compile s": time.perf_counter() - begun, "graph breaks": graph_breaks()}
    row["errors"] = differences(layer, found, expected)
    return row | {"training": on.timed(partial(training, fast)), "plain": on.timed(partial(training, layer))}


def compiled_model(on: Machine, case: tuple[str, str]) -> Row:
    attention, mode = case
    fresh_compiler()
    shape = on.sizes((2, 4096, 16, 64), SMALL)
    model, tokens = model_of(on, shape, attention, layers=2), random_tokens(on, shape)
    _, plain = steps_of(on, model, tokens, [*model.parameters()])
    expected = plain()
    begun = time.perf_counter()
    fast = torch.compile(model, mode=mode)
    _, training = steps_of(on, fast, tokens, [*model.parameters()])
    for _ in range(on.sizes(3, 1)):
        found = training()
    row: Row = {"attention": attention, "mode": mode, "compile s": time.perf_counter() - begun}
    errors = [whole("gradient", x, y, TOLERANCE) for x, y in zip(found, expected, strict=True)]
    row |= {"graph breaks": graph_breaks(), "errors": {"gradients": max(errors)}}
    return row | {"training": on.timed(training), "plain": on.timed(plain)}


def graphs(on: Machine) -> Iterator[Row]:
    """A training step with its optimizer in one CUDA graph, also of packed documents, and a model in
    make_graphed_callables."""
    yield from each(["whole step", "packed", "model"], partial(graphs_row, on))


class Logits(torch.nn.Module):
    """A model under autocast as a function of tensors alone, which make_graphed_callables requires."""

    def __init__(self, on: Machine, model: LanguageModel) -> None:
        super().__init__()
        self.on, self.model = on, model

    def forward(self, tokens: Tensor, cu_seqlens: Tensor | None = None) -> Tensor:
        with torch.autocast(self.on.device, self.on.dtype, cache_enabled=False):
            logits: Tensor = self.model(tokens, cu_seqlens=cu_seqlens, return_states=False)[0]
        return logits.float()


def optimizer_step(
    model: Any, optimizer: torch.optim.Optimizer, tokens: Tensor, targets: Tensor, *packing: Tensor
) -> Tensor:
    loss = F.cross_entropy(model(tokens, *packing).flatten(0, 1), targets.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()  # a graphed model keeps its gradients in memory that it overwrites
    return loss.detach()


def graph_batches(on: Machine, shape: Shape, packed: bool) -> list[tuple[Tensor, ...]]:
    """Tokens and targets; packed: as many tokens in a row of documents, another number of them in each batch."""
    (b, n, *_), count = shape, on.sizes(6, 4)  # GraphedStep launches three
    if not packed:
        tokens = torch.randint(VOCABULARY, (count, b, n + 1), device=on.device)
        return [(x[:, :-1], x[:, 1:]) for x in tokens]
    batches = []
    for i in range(count):
        lengths = [n // (i + 1) - 1] * (b * (i + 1))
        documents = [torch.randint(VOCABULARY, (length,), device=on.device) for length in lengths]
        batches.append(pack(documents, tokens=b * n, sequences=b * count))
    return batches


def graphs_row(on: Machine, kind: str) -> Row:
    """Losses of the fourth step and those after it, launched and in a graph, from the same weights and batches."""
    shape = on.sizes((8, 1024, 16, 64), (1, 12, 1, 64))
    batches, row = graph_batches(on, shape, kind == "packed"), Row(losses={})
    for way in ("launched", "graph"):
        model: Any = Logits(on, model_of(on, shape))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=on.on_gpu)
        if on.on_gpu and (kind, way) == ("model", "graph"):
            model = torch.cuda.make_graphed_callables(model, (batches[0][0],))
        step: Callable[..., Tensor] = partial(optimizer_step, model, optimizer)
        if way == "graph" and kind != "model":
            step = on.graphed(step)
        row["losses"][way] = [float(step(*batch)) for batch in batches][3:]
        row[way] = on.timed(partial(step, *batches[0]))
    pairs = zip(row["losses"]["graph"], row["losses"]["launched"])
    error = max(abs(x - y) / abs(y) for x, y in pairs)
    assert error <= 1e-2, f"the losses differ: {row['losses']}"
    return row | {"errors": {"loss": error}}
