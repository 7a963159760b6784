"""SANA-Video's attention on linrope: a processor for diffusers' SanaVideoTransformer3DModel, with the same weights.

    num_i = sum_j <R(p_i) relu(q_i), R(p_j) relu(k_j)> v_j      den_i = sum_j <relu(q_i), relu(k_j)>
    out_i = num_i / (den_i + 1e-15)                             p = (frame, row, column)

That is RoFormer's equation 19 on a grid of three axes: one call of ``linear_rope_attention``. diffusers computes it in
eight passes over tensors of the queries' size, most of them copies.

``use_linrope(model)`` replaces the processors of the self-attention, which sees all frames. ``use_linrope(model,
frames=1)`` makes it causal from frame to frame, for weights trained that way: a frame then sees itself and the frames
before it, which are a state of constant size. diffusers has no such model.

    python docs/examples/sana_video.py            # one block of the 2B model with random weights, 5 latent frames
    python docs/examples/sana_video.py --frames 21  # 81 frames of video at 480 x 832

Source: SANA-Video, arXiv 2509.24695, and diffusers, models/transformers/transformer_sana_video.py.
"""

import argparse
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from linrope import Rotary, linear_rope_attention
from linrope.rotation.rotary import grid_positions


class Grid(nn.Module):
    """Takes the place of ``model.rope``: the blocks then get places (n, 3) where they got cos and sin."""

    def __init__(self, patch_size: tuple[int, int, int]) -> None:
        super().__init__()
        self.patch_size = patch_size

    def forward(self, latents: Tensor) -> Tensor:
        """latents (b, channels, frames, height, width)"""
        sizes = [size // patch for size, patch in zip(latents.shape[2:], self.patch_size, strict=True)]
        return grid_positions(*sizes).to(latents.device)


class LinRopeProcessor:
    """The self-attention of a block. frames: the number of frames that see each other; None: all."""

    def __init__(self, head_dim: int, frames: int | None = None) -> None:
        space = head_dim // 6  # pairs of features for rows, and as many for columns; frames get the rest
        self.rotary = Rotary.axial(head_dim, axes=3, pairs=(head_dim // 2 - 2 * space, space, space))
        self.frames = frames

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        rotary_emb: Tensor | None = None,
    ) -> Tensor:
        """hidden_states (b, n, dim) -> (b, n, dim). rotary_emb: the places, of ``Grid``."""
        if rotary_emb is None or encoder_hidden_states is not None or attention_mask is not None:
            raise ValueError(
                "expected self-attention with places and without a mask, as in SanaVideoTransformerBlock"
            )
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        q, k = q if attn.norm_q is None else attn.norm_q(q), k if attn.norm_k is None else attn.norm_k(k)
        q, k, v = (x.unflatten(2, (attn.heads, -1)) for x in (q, k, v))
        out = self.attend(q, k, v, rotary_emb).flatten(2)
        return attn.to_out[1](attn.to_out[0](out))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
        """q, k, v (b, n, heads, d), places (n, 3) -> (b, n, heads, d)"""
        options: dict[str, Any] = {
            "feature_map": "relu", "rotary": self.rotary, "causal": False, "eps": 1e-15, "eps_mode": "add",
        }  # fmt: skip
        if self.frames is None:
            return linear_rope_attention(q, k, v, positions=places, **options)
        sizes = torch.bincount(places[:, 0] // self.frames).tolist()  # tokens of each group of frames
        outs, state = [], None
        for *qkv, at in zip(*(x.split(sizes, 1) for x in (q, k, v)), places.split(sizes)):
            out, state = linear_rope_attention(*qkv, positions=at, state=state, return_state=True, **options)
            outs.append(out)
        return torch.cat(outs, 1)


def use_linrope(model: Any, frames: int | None = None) -> None:
    """Makes diffusers' model compute its self-attention with linrope. Weights and configuration stay the same."""
    for block in model.transformer_blocks:
        block.attn1.set_processor(LinRopeProcessor(model.config.attention_head_dim, frames))
    model.rope = Grid(model.config.patch_size)


def measured(function: Callable[[], Any]) -> tuple[float, int]:
    """This thread's seconds in a call, and the bytes by which the process grows in one (0: unknown)."""
    from benchmarks.measuring import peak_memory  # of the repository

    start = time.thread_time()
    function()
    return time.thread_time() - start, peak_memory(function) or 0


def main(frames: int = 5, height: int = 60, width: int = 104, repeats: int = 2, **changes: Any) -> None:
    from diffusers.models.transformers.transformer_sana_video import SanaVideoTransformer3DModel

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = SanaVideoTransformer3DModel(num_layers=1, **changes).eval()
    block, config = model.transformer_blocks[0], model.config
    latents = torch.randn(1, config.in_channels, frames, height, width)
    inputs = latents, torch.randn(1, 300, config.caption_channels), torch.tensor([500])
    sides = {"diffusers": (block.attn1.processor, model.rope)}
    for name, together in (("linrope", None), ("linrope, frame by frame", 1)):
        use_linrope(model, together)
        sides[name] = block.attn1.processor, model.rope

    q, k, v = torch.randn(3, 1, frames * (height // 2) * (width // 2), block.attn1.to_q.out_features)
    between = SimpleNamespace(
        heads=block.attn1.heads, to_q=lambda _: q, to_k=lambda _: k, to_v=lambda _: v, norm_q=None, norm_k=None,
        to_out=[nn.Identity(), nn.Identity()],
    )  # fmt: skip

    def attend(backward: bool) -> Tensor:
        """What the processor does between the projections."""
        for y in (q, k, v):
            y.requires_grad_(backward).grad = None
        out = block.attn1.processor(between, q, rotary_emb=model.rope(latents))
        if backward:
            out.square().sum().backward()
            return torch.stack([y.grad for y in (q, k, v)])
        return out

    @torch.no_grad()
    def predict() -> Tensor:
        return model(*inputs).sample

    calls = {
        "attention": lambda: attend(False),
        "gradients of attention": lambda: attend(True),
        "model with one block": predict,
    }
    outs: dict[tuple[str, str], Tensor] = {}
    costs: dict[tuple[str, str], list[tuple[float, int]]] = {}
    for name, (processor, rope) in sides.items():  # the check before the measurements, which also warms up
        block.attn1.set_processor(processor)
        model.rope = rope
        outs |= {(name, call): function() for call, function in calls.items()}
    for call in calls:
        ours, theirs = outs["linrope", call], outs["diffusers", call]
        difference = ((ours - theirs).abs().max() / theirs.abs().max()).item()
        assert difference < 1e-5, (call, difference)
        print(f"{call}: linrope's numbers are those of diffusers, to {difference:.0e}")
    causal, whole = (outs[name, "attention"].unflatten(1, (frames, -1)) for name in list(sides)[:0:-1])
    difference = ((causal - whole)[:, -1].abs().max() / whole.abs().max()).item()
    assert difference < 1e-5, difference
    print(f"frame by frame: the last frame, which sees all frames, is the same, to {difference:.0e}")

    for _ in range(repeats):
        for name, (processor, rope) in sides.items():
            block.attn1.set_processor(processor)
            model.rope = rope
            for call, function in calls.items():
                costs.setdefault((name, call), []).append(measured(function))
    print(
        f"{q.shape[1]:,} tokens, {block.attn1.heads} heads of {config.attention_head_dim}, float32, one thread:"
    )
    for (name, call), cost in costs.items():
        seconds, size = (min(each) for each in zip(*cost))
        print(f"{call:>23}, {name:<23} {seconds:7.2f} s {size / 2**20:6.0f} MiB")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--frames", type=int, default=5, help="latent frames: 1 + (frames of video - 1) / 4")
    main(parser.parse_args().frames)
