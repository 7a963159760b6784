"""The example of SANA-Video, against its equation with a mask in float64, and against diffusers' own model."""

import importlib
import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

from tests.support.examples import load

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="examples run on the CPU")
sana_video = load("sana_video")

HEADS, D = 2, 20  # 4 pairs of features for frames, 3 for rows and 3 for columns
SIZES = (3, 2, 4)  # frames, rows, columns
TINY: dict[str, Any] = {
    "num_attention_heads": HEADS, "attention_head_dim": D, "num_cross_attention_heads": HEADS,
    "cross_attention_head_dim": D, "cross_attention_dim": HEADS * D, "caption_channels": 6, "in_channels": 4,
}  # fmt: skip


def by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """q, k, v (b, n, heads, d); seen (n, n). Pairs turn by a place times 10000^(-2 u / w), w features of its axis."""
    places = torch.cartesian_prod(*(torch.arange(size) for size in SIZES)).double()
    widths = (D - 4 * (D // 6), 2 * (D // 6), 2 * (D // 6))
    angles = torch.cat(
        [
            places[:, [a]] * 10000.0 ** (-torch.arange(0, w, 2, dtype=torch.float64) / w)
            for a, w in enumerate(widths)
        ],
        1,
    )
    turn = torch.polar(torch.ones_like(angles), angles)[:, None]

    def rotated(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    phi, psi = q.relu(), k.relu()
    num = torch.einsum("bnhd,bmhd->bhnm", rotated(phi), rotated(psi)) * seen
    den = (torch.einsum("bnhd,bmhd->bhnm", phi, psi) * seen).sum(-1, keepdim=True) + 1e-15
    return torch.einsum("bhnm,bmhe->bnhe", num / den, v)


@pytest.mark.parametrize("size", [1, 1e-8])  # 1e-8: normalizers near the 1e-15 that is added to them
@pytest.mark.parametrize("frames", [None, 1, 2])
def test_the_processor_is_the_equation_with_a_mask_of_frames(frames: int | None, size: float) -> None:
    torch.manual_seed(0)
    n = 3 * 2 * 4
    q, k, v = torch.randn(3, 2, n, HEADS, D, dtype=torch.float64).unbind()
    q, k = q * size, k * size
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    places = sana_video.Grid((1, 2, 2))(torch.zeros(2, 1, 3, 4, 8))
    group = torch.zeros(n) if frames is None else torch.arange(n) // 8 // frames
    ours = sana_video.LinRopeProcessor(D, frames).attend(q, k, v, places)
    theirs = by_hand(q, k, v, group[:, None] >= group)
    assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    weights = torch.randn(ours.shape, dtype=torch.float64)
    for got, want in zip(*(torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (ours, theirs))):
        assert (got - want).abs().max() <= 1e-7 * want.abs().max()


def test_the_processor_refuses_what_a_block_does_not_pass() -> None:
    processor, x = sana_video.LinRopeProcessor(D), torch.zeros(1, 2, HEADS * D)
    for options in (
        {},
        {"rotary_emb": x, "attention_mask": x},
        {"rotary_emb": x, "encoder_hidden_states": x},
    ):
        with pytest.raises(ValueError, match="self-attention with places"):
            processor(None, x, **options)


@pytest.fixture(scope="module")
def sana() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("diffusers")
        return importlib.import_module("diffusers.models.transformers.transformer_sana_video")


@pytest.mark.parametrize("norm", ["rms_norm_across_heads", None])
def test_a_model_of_diffusers_gives_the_same_with_gradients(sana: ModuleType, norm: str | None) -> None:
    torch.manual_seed(0)
    model: nn.Module = sana.SanaVideoTransformer3DModel(num_layers=2, qk_norm=norm, **TINY)
    inputs = torch.randn(2, 4, 3, 6, 8), torch.randn(2, 5, 6), torch.tensor([500, 20])

    def run() -> tuple[Tensor, list[Tensor]]:
        sample = model(*inputs).sample
        return sample, list(torch.autograd.grad(sample.square().mean(), list(model.parameters())))

    theirs, their_gradients = run()
    names = list(model.state_dict())
    sana_video.use_linrope(model)
    assert list(model.state_dict()) == names
    ours, our_gradients = run()
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.abs().max()
    largest = max(float(x.abs().max()) for x in their_gradients)
    for (name, _), got, want in zip(model.named_parameters(), our_gradients, their_gradients, strict=True):
        assert (got - want).abs().max() <= 1e-5 * largest, name


def test_the_script_measures_what_it_has_compared(
    sana: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    sana_video.main(frames=3, height=8, width=8, repeats=1, **TINY)
    out = capsys.readouterr().out
    assert "model with one block: linrope's numbers are those of diffusers" in out
    assert "48 tokens, 2 heads of 20" in out
