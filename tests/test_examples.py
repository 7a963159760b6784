"""The scripts in docs/examples, with less training than they do when started."""

import pytest
import torch

from tests.support.examples import load

pytestmark = pytest.mark.skipif(torch.get_default_device().type != "cpu", reason="examples run on the CPU")

streaming, vision = load("streaming"), load("vision")


def test_sequences_that_join_at_any_time_and_forks_stream_as_each_alone(capsys, monkeypatch) -> None:
    model = streaming.train(30)
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
