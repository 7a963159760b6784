"""The scripts in docs/examples, with less training than they do when started."""

import pytest
import torch

from tests.examples import load

pytestmark = pytest.mark.skipif(
    torch.get_default_device().type != "cpu", reason="the examples run on the CPU"
)

streaming, vision = load("streaming"), load("vision")
PROMPTS = ["For want of a nail", "And all for", "t"]


@pytest.fixture(scope="module")
def model():
    return streaming.train(30)


def run(server, steps: int) -> None:
    for _ in range(steps):
        server.step()


def test_the_streaming_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    streaming.main(steps=30)
    assert "5 sequences in 4 slots, each with the bytes that it has alone" in capsys.readouterr().out


def test_sequences_that_join_at_different_times_stream_as_each_alone(model) -> None:
    server = streaming.Server(model, slots=3)
    slots = []
    for prompt in PROMPTS:
        slots.append(server.join(prompt))
        run(server, 7)
    assert [len(server.running[slot].text) for slot in slots] == [39, 25, 8]
    for slot in slots:
        sequence = server.leave(slot)
        assert sequence.text == streaming.alone(model, sequence)
    assert sorted(server.free) == [0, 1, 2]


def test_forks_go_on_as_if_each_had_been_there_alone_and_leave_the_first_as_it_was(model) -> None:
    server = streaming.Server(model, slots=3)
    first = server.join(PROMPTS[0])
    run(server, 5)
    forks = [server.fork(first, text) for text in (" the", " a horse")]
    run(server, 10)
    for slot in (first, *forks):
        sequence = server.leave(slot)
        assert sequence.text == streaming.alone(model, sequence)


def test_a_slot_keeps_nothing_of_who_has_left(model) -> None:
    server = streaming.Server(model, slots=1)
    server.join(PROMPTS[0])
    run(server, 5)
    server.leave(0)
    server.join(PROMPTS[1])
    server.step()
    fresh = streaming.Server(model, slots=1)
    fresh.join(PROMPTS[1])
    fresh.step()
    for a, b in zip(server.pool, fresh.pool, strict=True):
        assert all(torch.equal(x, y) for x, y in ((a.kv, b.kv), (a.z, b.z), (a.conv, b.conv)))


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
