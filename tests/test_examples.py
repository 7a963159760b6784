"""The scripts in docs/examples, with less training than they do when started."""

import pytest
import torch

from tests.support.examples import load

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="examples run on the CPU")

streaming, vision, encoder_decoder = load("streaming"), load("vision"), load("encoder_decoder")


def test_sequences_that_join_at_any_time_and_forks_stream_as_each_alone(capsys, monkeypatch) -> None:
    model = streaming.train(5)
    monkeypatch.setattr(streaming, "train", lambda steps: model)
    streaming.main()  # asserts it of a few, one of them in a freed slot
    assert "5 sequences in 4 slots, each with the bytes that it has alone" in capsys.readouterr().out
    server, slots = streaming.Server(model, slots=5), []
    for prompt in ("For want of a nail", "And all for", "t"):
        slots.append(server.join(prompt))
        for _ in range(7):
            server.step()
    slots += [server.fork(slots[0], text) for text in (" the", " a horse")]
    for _ in range(10):
        server.step()
    for slot, length in zip(slots, (49, 35, 18, 53, 57), strict=True):
        sequence = server.leave(slot)
        assert len(sequence.text) == length
        assert sequence.text == streaming.alone(model, sequence)
    assert sorted(server.free) == [0, 1, 2, 3, 4]
    states = []
    for each in (server, streaming.Server(model, slots=1)):  # a slot keeps nothing of who has left
        slot = torch.tensor([each.join("And all for")])
        each.step()
        states.append([state.at(slot).rows().tensors() for state in each.pool])
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_images_show_the_disc_where_their_class_says() -> None:
    """A square fills its bounding box, a disc does not."""
    images, labels = vision.make_images(100, torch.Generator().manual_seed(0))
    assert torch.bincount(labels, minlength=4).min() > 10
    for image, label in zip(images, labels.tolist(), strict=True):
        bright = image.sum(0) > 0.8
        if vision.CLASSES[label] in ("below", "above"):
            bright = bright.T
        ends = bright.any(0).nonzero().aminmax()
        cut = int(ends.min + ends.max) // 2 + 1
        boxes = (half[half.any(1)][:, half.any(0)] for half in (bright[:, :cut], bright[:, cut:]))
        full = [bool(box.all()) for box in boxes]
        assert full == ([True, False] if vision.CLASSES[label] in ("right", "below") else [False, True])


@pytest.mark.long
def test_the_vision_encoder_learns_where_things_are() -> None:
    """Four classes, each as frequent: without the rotation one in four is right."""
    assert vision.accuracy(vision.train(vision.GRID, steps=150, batch_size=32), 500) > 0.6


@torch.no_grad()
def test_without_the_rotation_the_order_of_the_patches_is_lost() -> None:
    images, _ = vision.make_images(4, torch.Generator().manual_seed(0))
    patches = torch.nn.functional.unfold(images, vision.PATCH, stride=vision.PATCH)
    shuffled = patches[..., torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    mixed = torch.nn.functional.fold(shuffled, (32, 32), vision.PATCH, stride=vision.PATCH)
    torch.manual_seed(0)
    plain, turned = vision.Encoder(None), vision.Encoder(vision.GRID)
    torch.testing.assert_close(plain(mixed), plain(images))
    assert not torch.allclose(turned(mixed), turned(images), atol=1e-3)


@pytest.mark.parametrize(
    "options", [{}, {"decay": "spread"}, {"forget_gate": True, "short_conv": 4}], ids=str
)
def test_a_decoder_s_steps_give_what_one_call_gives_and_padding_changes_nothing(options) -> None:
    torch.manual_seed(0)
    encoder = encoder_decoder.Encoder(24, 2, 2).double()
    decoder = encoder_decoder.Decoder(16, 2, 2, 24, **options).double()
    x, read = (torch.randn(2, n, dim, dtype=torch.float64) for n, dim in ((6, 16), (9, 24)))
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    context = encoder(read, mask)
    whole, _ = decoder(x, context, mask)
    y, states = decoder(x[:, :2], context, mask)
    parts = [y]
    for token in x[:, 2:].split(1, 1):
        y, states = decoder(token, states=states)
        parts.append(y)
    torch.testing.assert_close(torch.cat(parts, 1), whole, rtol=0, atol=1e-12)
    alone, _ = decoder(x[1:], encoder(read[1:, :5]))
    torch.testing.assert_close(alone, whole[1:], rtol=0, atol=1e-12)
    later = torch.cat((x[:, :4], x[:, :2]), 1)  # a decoder sees the past alone, and all of the context
    assert torch.equal(decoder(later, context, mask)[0][:, :4], whole[:, :4])
    assert not torch.allclose(decoder(x, context.sin(), mask)[0][:, :1], whole[:, :1])


def test_an_encoder_on_a_grid_follows_the_positions() -> None:
    encoder, x = encoder_decoder.Encoder(16, 2, 2, rotary={"axes": 2}), torch.randn(1, 6, 16)
    places = torch.cartesian_prod(torch.arange(2), torch.arange(3))
    order = torch.randperm(6)
    mixed = encoder(x[:, order], positions=places[order])
    torch.testing.assert_close(mixed, encoder(x, positions=places)[:, order])
    assert not torch.allclose(encoder(x, positions=places * 2), encoder(x, positions=places))


def test_the_encoder_and_the_decoder_run(capsys) -> None:
    encoder_decoder.main()
    assert "each block's state has read 200 vectors of context" in capsys.readouterr().out
