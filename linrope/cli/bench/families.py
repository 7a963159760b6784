"""Measures transformers' own models with and without linrope: ``linrope bench --transformers``."""

import copy
import datetime
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from linrope.cli.bench import plots
from linrope.cli.bench.benchmark import machine, peak_memory
from linrope.cli.bench.report import noise_warning, times
from linrope.cli.bench.timing import measured
from linrope.cli.console import plain_table
from linrope.cli.training import Lines, progress_bar
from linrope.common.argument_checks import check_name
from linrope.common.files import replace_file, unused
from linrope.integrations import transformers as linrope_transformers
from linrope.integrations.transformers.families import KIMI_DELTA_ATTENTION

LENGTHS = [512, 2048, 8192]
KINDS = ("prefill", "training", "decoding")
SIDES = ("transformers", "linrope")
# The largest allowed difference of a logit, as a fraction of the largest logit. In half precision the sides round
# differently in every layer.
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.05, "float16": 0.01}
# transformers' own Kimi Delta Attention takes 32 KB of memory per token and head of 128 features, and with gradients a
# multiple of that in each layer
LONGEST = {family: {"prefill": 2048, "training": 512, "decoding": 2048} for family in KIMI_DELTA_ATTENTION}
_STEPS = 10  # decoding steps per call
_SIZES = {"vocab_size": 1000, "hidden_size": 1024, "pad_token_id": 0}
_HEADS = {"num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2048}
_LAYERS = {"num_hidden_layers": 4, "layer_types": ["linear_attention"] * 3 + ["full_attention"]}
_GATED_DELTA_NET = {
    **_HEADS,
    **_LAYERS,
    "head_dim": 64,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
}
_ONE_EXPERT = {
    "num_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 1024,
    "shared_expert_intermediate_size": 1024,
}
_LATENT = {
    **_HEADS,
    **_LAYERS,
    "num_key_value_heads": 16,
    "kv_lora_rank": 256,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "mlp_layer_types": ["dense"] * 4,
}
_KIMI = {"linear_num_heads": 16, "linear_head_dim": 128}
_CONVOLUTIONS = {
    **_HEADS,
    "num_hidden_layers": 3,
    "num_key_value_heads": 8,
    "layer_types": ["conv", "conv", "full_attention"],
}
_MAMBA = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_n_groups": 1}
# As wide as the smaller models of each family. Each has two or three layers that linrope computes. Hybrids also have
# one layer of softmax attention, which takes the same time on both sides. There are no mixtures of experts. In Inkling
# all layers have convolutions.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "bamba": ("BambaConfig", _HEADS | _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [2]}),
    "bailing_hybrid": ("BailingHybridConfig", _LATENT | {"head_dim": 128}),
    "falcon_h1": ("FalconH1Config", _HEADS | _MAMBA | {"num_hidden_layers": 2, "mamba_d_ssm": 2048}),
    "glm5_next": (
        "Glm5NextConfig",
        {
            "text_config": {
                **_LATENT,
                **_KIMI,
                "layer_types": ["linear_attention"] * 3 + ["indexed_attention"],
                "q_lora_rank": 512,
                "qk_rope_head_dim": 0,
                "index_n_heads": 8,
            },
            "vision_config": {"depth": 1, "out_hidden_size": _SIZES["hidden_size"]},
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        _HEADS
        | _MAMBA
        | {
            "num_hidden_layers": 3,
            "layer_types": ["mamba", "mamba", "attention"],
            "num_local_experts": 0,
            "shared_intermediate_size": 2048,
        },
    ),
    "inkling": (
        "InklingTextConfig",
        _HEADS
        | {
            "num_hidden_layers": 2,
            "layer_types": ["hybrid_sliding", "hybrid"],
            "mlp_layer_types": ["dense", "dense"],
            "head_dim": 64,
            "swa_num_attention_heads": 16,
            "swa_num_key_value_heads": 4,
            "swa_head_dim": 64,
            "intermediate_size": 4096,
        },
    ),
    "kimi_linear": ("KimiLinearConfig", _LATENT | _KIMI),
    "lara_mini": ("LaraMiniConfig", _GATED_DELTA_NET | _ONE_EXPERT),
    "lfm2": ("Lfm2Config", _CONVOLUTIONS | {"intermediate_size": 6656}),
    "lfm2_moe": ("Lfm2MoeConfig", _CONVOLUTIONS | {"intermediate_size": 3584, "num_dense_layers": 3}),
    "lfm3": ("Lfm3Config", _CONVOLUTIONS | {"intermediate_size": 3840, "head_dim": 64}),
    "mamba2": (
        "Mamba2Config",
        {"num_hidden_layers": 2, "num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1},
    ),
    "minimax": (
        "MiniMaxConfig",
        _HEADS
        | {
            "num_hidden_layers": 3,
            "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "num_local_experts": 1,
            "num_experts_per_tok": 1,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        _HEADS
        | {
            "layers_block_type": ["mamba", "mlp", "mamba", "attention"],
            "mamba_num_heads": 32,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 8,
            "head_dim": 64,
        },
    ),
    "olmo_hybrid": (
        "OlmoHybridConfig",
        _GATED_DELTA_NET | {"linear_key_head_dim": 96, "linear_value_head_dim": 192},
    ),
    "qwen3_5": ("Qwen3_5TextConfig", _GATED_DELTA_NET),
    "qwen3_5_moe": ("Qwen3_5MoeTextConfig", _GATED_DELTA_NET | _ONE_EXPERT),
    "qwen3_next": ("Qwen3NextConfig", _GATED_DELTA_NET | _ONE_EXPERT),
    "qwen4_exp": (
        "Qwen4ExpTextConfig",
        _GATED_DELTA_NET
        | _ONE_EXPERT
        | {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 64,
            "indexer_budget": 2048,
            "indexer_compress_ratio": 16,
        },
    ),
    "zamba2": (
        "Zamba2Config",
        _HEADS
        | {
            "num_hidden_layers": 3,
            "layers_block_type": ["mamba", "mamba", "hybrid"],
            "mamba_d_state": 128,
            "n_mamba_heads": 32,
            "mamba_ngroups": 1,
            "num_key_value_heads": 16,
        },
    ),
}


class FamilyBenchmark:
    """A model of a family with random weights, and the calls that are measured."""

    def __init__(self, family: str, dtype: str = "float32") -> None:
        import transformers

        quiet: Any = transformers.logging
        quiet.set_verbosity_error()  # its fallback says that it is slow
        torch.manual_seed(0)
        kind, sizes = CONFIGURATIONS[family]
        sizes = _SIZES | sizes
        if "text_config" in sizes:
            sizes["text_config"] = _SIZES | sizes["text_config"]
        config = getattr(transformers, kind)(**sizes)
        self.family, self.dtype = family, dtype
        models: Any = transformers.AutoModelForCausalLM
        if "text_config" in sizes:  # GLM's models exist only with their vision tower
            models = transformers.AutoModelForImageTextToText
        self.model: Any = models.from_config(config).to(getattr(torch, dtype))

    def tokens(self, batch: int, length: int) -> Tensor:
        return torch.randint(3, _SIZES["vocab_size"], (batch, length))

    def call(self, kind: str, batch: int, length: int) -> Callable[[], Tensor]:
        """Returns a function that computes, and returns the logits of the last token."""
        self.model.train(kind == "training")
        ids = self.tokens(batch, length)

        def prefill() -> Tensor:
            with torch.no_grad():
                result: Tensor = self.model(ids, use_cache=True, logits_to_keep=1).logits
            return result

        def training() -> Tensor:
            self.model.zero_grad(set_to_none=True)
            result = self.model(ids, labels=ids, use_cache=False)
            result.loss.backward()
            last: Tensor = result.logits[:, -1:].detach()
            return last

        return {"prefill": prefill, "training": training}.get(kind) or self._decoding(ids)

    def _decoding(self, ids: Tensor) -> Callable[[], Tensor]:
        with torch.no_grad(), linrope_transformers.enable(self.family):
            result = self.model(ids, use_cache=True, logits_to_keep=1)
        name = next(x for x in ("cache", "cache_params", "past_key_values") if x in result)  # by version
        start, following = result[name], self.tokens(len(ids), _STEPS)

        def decoding() -> Tensor:
            cache = copy.deepcopy(start)  # each call starts from the same token
            with torch.no_grad():
                for i in range(_STEPS):
                    options = {name: cache, "use_cache": True, "logits_to_keep": 1}
                    logits: Tensor = self.model(following[:, i : i + 1], **options).logits
            return logits

        return decoding


def measure(
    benchmark: FamilyBenchmark, kind: str, batch: int, length: int, rounds: int, budget: float
) -> dict[str, Any]:
    """Both sides of one case: seconds per call (or step), peak bytes, and the difference of their outputs."""
    run = benchmark.call(kind, batch, length)

    def with_linrope() -> Tensor:
        with linrope_transformers.enable(benchmark.family):
            return run()

    functions = dict(zip(SIDES, (run, with_linrope), strict=True))
    peaks = {side: peak_memory(function) for side, function in functions.items()}
    expected, got = run(), with_linrope()
    difference = float((got - expected).abs().max() / expected.abs().max())
    if not difference <= TOLERANCE[benchmark.dtype]:
        raise RuntimeError(
            f"{benchmark.family}, {kind}, {length} tokens: outputs differ by {difference:.2g} of the largest logit, "
            f"expected at most {TOLERANCE[benchmark.dtype]}"
        )
    timings = measured(functions, rounds, budget)
    steps = _STEPS if kind == "decoding" else 1
    return {
        "kind": kind,
        "batch": batch,
        "length": length,
        "seconds": {side: timing.seconds / steps for side, timing in timings.items()},
        "spread": max(timing.noise for timing in timings.values()),
        "bytes": peaks,
        "difference": difference,
    }


def compare(
    family: str,
    dtype: str,
    lengths: list[int] | None,
    rounds: int,
    budget: float,
    out: Path,
    console: Console,
) -> Path:
    """Measures a family, prints a table, and writes transformers-<family>-<date>.json and .png.

    A dtype other than float32 and a number of threads other than 1 are part of the files' names. lengths: None for
    those of ``LENGTHS`` that transformers' own code can take.
    """
    check_name("--transformers", family, tuple(CONFIGURATIONS))
    benchmark = FamilyBenchmark(family, dtype)
    longest = LONGEST.get(family, {}) if lengths is None else {}
    lengths = lengths or LENGTHS
    cases = [(kind, 1, n) for kind in KINDS for n in lengths if n <= longest.get(kind, n)]
    cases.append(("decoding", 8, lengths[0]))
    rows, say = [], Lines(console)
    with progress_bar(console) as progress:
        task = progress.add_task(family, total=len(cases))
        for kind, batch, n in cases:
            description = f"{family}: {kind}, {n:,} tokens"
            progress.update(task, description=description)
            say(f"measuring {description}")
            rows.append(measure(benchmark, kind, batch, n, rounds, budget))
            progress.advance(task)
    today = datetime.date.today().isoformat()
    parameters = sum(x.numel() for x in benchmark.model.parameters())
    result = {
        "date": today, "machine": machine(), "family": family, "dtype": dtype, "parameters": parameters, "rows": rows,
    }  # fmt: skip
    console.print(table(result), soft_wrap=False)
    noise = {f"{row['kind']} {row['length']:,}": row["spread"] for row in rows}
    for line in noise_warning(noise):
        console.print(line)
    name = f"transformers-{family}"
    if dtype != "float32":
        name += f"-{dtype}"
    if (threads := torch.get_num_threads()) > 1:
        name += f"-{threads}-threads"
    path = unused(out, f"{name}-{today}")
    replace_file(path, lambda temporary: temporary.write_text(json.dumps(result, indent=1) + "\n"))
    plots.plot_family(result, path.with_suffix(".png"))
    console.print(f"written: {path}, {path.with_suffix('.png')}")
    return path


def table(result: dict[str, Any]) -> Table:
    """A line for each case."""
    model = f"{result['family']} of transformers, {result['parameters'] / 1e6:.0f} M parameters"
    made = plain_table(f"{model}, {result['dtype']}, ms and MB")
    columns = ("", "batch", "tokens", "before", "linrope", "faster", "±", "MB before", "MB linrope", "diff")
    for column in columns:
        made.add_column(column, justify="left" if not column else "right")
    for row in result["rows"]:
        (slow, fast), peaks = row["seconds"].values(), row["bytes"].values()
        memory = ["" if x is None else f"{x / 1e6:,.0f}" for x in peaks]
        made.add_row(
            row["kind"],
            str(row["batch"]),
            f"{row['length']:,}",
            f"{slow * 1e3:,.1f}",
            f"{fast * 1e3:,.1f}",
            times(slow / fast),
            f"{row['spread']:.0%}",
            *memory,
            f"{row['difference']:.0e}",
        )
    return made
