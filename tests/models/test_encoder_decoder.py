import re

import pytest
import torch

from linrope.models.encoder_decoder import Decoder, DecoderBlock, Encoder, EncoderBlock

EXACT = {"rtol": 0, "atol": 1e-12}


@pytest.fixture(autouse=True)
def _float64():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)


def test_padding_changes_nothing_of_an_encoder() -> None:
    encoder, x = Encoder(16, 2, 2), torch.randn(1, 7, 16)
    mask = torch.arange(10)[None] < 7
    padded = torch.cat((x, torch.randn(1, 3, 16)), 1)
    torch.testing.assert_close(encoder(padded, mask)[:, :7], encoder(x), **EXACT)


@pytest.mark.parametrize(
    "options", [{}, {"decay": "spread"}, {"forget_gate": True, "short_conv": 4}], ids=str
)
def test_a_decoder_s_steps_give_what_one_call_gives(options) -> None:
    decoder, context, x = Decoder(16, 2, 2, 24, **options), torch.randn(2, 9, 24), torch.randn(2, 6, 16)
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    whole, _ = decoder(x, context, mask)
    y, states = decoder(x[:, :2], context, mask)
    parts = [y]
    for i in range(2, 6):
        y, states = decoder(x[:, i : i + 1], states=states)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, **EXACT)
    alone, _ = decoder(x[1:], context[1:, :5])
    torch.testing.assert_close(alone, whole[1:], **EXACT)


def test_a_decoder_sees_the_past_alone_and_all_of_the_context() -> None:
    decoder, context, x = Decoder(16, 2, 2, 16), torch.randn(1, 9, 16), torch.randn(1, 6, 16)
    y, _ = decoder(x, context)
    later = torch.cat((x[:, :4], torch.randn(1, 2, 16)), 1)
    assert torch.equal(decoder(later, context)[0][:, :4], y[:, :4])
    assert not torch.equal(decoder(x, context.flip(1).sin())[0][:, :1], y[:, :1])


def test_a_context_is_there_where_it_is_expected() -> None:
    x = torch.randn(1, 3, 16)
    with pytest.raises(ValueError, match="context: got a tensor, expected None"):
        Decoder(16, 1, 2)(x, x)
    with pytest.raises(ValueError, match="context: got None, expected"):
        Decoder(16, 1, 2, 16)(x)
    decoder = Decoder(16, 1, 2, 16)
    _, states = decoder(x, x, torch.ones(1, 3, dtype=torch.bool))
    with pytest.raises(ValueError, match="context_mask: got a tensor without a context, expected None"):
        decoder(x, context_mask=torch.ones(1, 3, dtype=torch.bool), states=states)
    with pytest.raises(ValueError, match="states: got 2, expected one per block, 1"):
        decoder(x, states=states * 2)
    assert Decoder(16, 1, 2)(x)[1][0].context is None


def test_another_direction_than_the_module_s_is_refused_with_the_module_that_has_it() -> None:
    past, every = "which sees the past alone", "which sees all tokens"
    instead = {
        Encoder: f"causal=True: expected False, or Decoder(dim, depth, heads), {past} and returns y and its states",
        Decoder: f"causal=False: expected True, or Encoder(dim, depth, heads), {every} and returns y alone",
        EncoderBlock: f"causal=True: expected False, or DecoderBlock(dim, heads), {past}",
        DecoderBlock: f"causal=False: expected True, or EncoderBlock(dim, heads), {every}",
    }
    for kind, message in instead.items():
        sizes = (16, 2) if kind.__name__.endswith("Block") else (16, 1, 2)
        causal = kind in (Decoder, DecoderBlock)
        with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
            kind(*sizes, causal=not causal)
        assert [x.causal for x in kind(*sizes, causal=causal).modules() if hasattr(x, "causal")] == [causal]
        with pytest.raises(TypeError, match="causal='yes': expected True or False"):
            kind(*sizes, causal="yes")


def test_an_encoder_on_a_grid_follows_the_positions() -> None:
    encoder, x = Encoder(16, 2, 2, rotary={"axes": 2}), torch.randn(1, 6, 16)
    places = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    order = torch.randperm(6)
    mixed = encoder(x[:, order], positions=places[order])
    torch.testing.assert_close(mixed, encoder(x, positions=places)[:, order], **EXACT)
    assert not torch.allclose(encoder(x, positions=places * 2), encoder(x, positions=places))


def test_dtype_device_and_backend_are_those_of_all_parts() -> None:
    options = {"dtype": torch.float32, "device": "meta", "backend": "eager"}
    for model in (Encoder(16, 1, 2, **options), Decoder(16, 1, 2, 24, **options)):
        assert {(x.dtype, x.device.type) for x in model.parameters()} == {(torch.float32, "meta")}
        assert {x.backend for x in model.modules() if hasattr(x, "backend")} == {"eager"}
