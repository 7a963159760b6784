"""The scripts in docs/examples, with less training than they do when started."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "docs" / "examples"

pytestmark = pytest.mark.skipif(
    torch.get_default_device().type != "cpu", reason="the examples run on the CPU"
)


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"examples_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


streaming, vision = load("streaming"), load("vision")
PROMPTS = ["For want of a nail", "And all for", "t"]


@pytest.fixture(scope="module")
def model():
    return streaming.train(30)


def take(batch, count: int) -> torch.Tensor:
    return torch.stack(list(batch.stream(count)), 1)


def test_the_streaming_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    streaming.main(steps=3)
    assert "with the same bytes: True" in capsys.readouterr().out


def test_prompts_of_different_lengths_stream_together_as_each_alone(model) -> None:
    together = take(streaming.Batch.begin(model, PROMPTS), 30)
    alone = [take(streaming.Batch.begin(model, [prompt]), 30) for prompt in PROMPTS]
    assert torch.equal(together, torch.cat(alone))


def test_a_restored_batch_goes_on_bit_by_bit(model, tmp_path: Path) -> None:
    batch = streaming.Batch.begin(model, PROMPTS)
    take(batch, 10)
    batch.save(tmp_path)
    restored = streaming.Batch.load(model, tmp_path)
    assert torch.equal(take(restored, 30), take(batch, 30))
    for a, b in zip(restored.states, batch.states, strict=True):
        assert torch.equal(a.kv, b.kv)
        assert torch.equal(a.z, b.z)
        assert torch.equal(a.position, b.position)


def test_forks_go_on_as_if_each_had_been_there_alone_and_leave_the_batch_as_it_was(model) -> None:
    batch = streaming.Batch.begin(model, PROMPTS)
    forks = take(streaming.fork(batch, 1, [" the", " its"]), 20)
    alone = [take(streaming.Batch.begin(model, [PROMPTS[1] + text]), 20) for text in (" the", " its")]
    assert torch.equal(forks, torch.cat(alone))
    assert torch.equal(take(batch, 20), take(streaming.Batch.begin(model, PROMPTS), 20))


def test_beams_have_the_log_probabilities_that_one_pass_gives_them(model) -> None:
    tokens, scores = streaming.search(streaming.Batch.begin(model, ["For "]), width=4, length=12)
    greedy = take(streaming.Batch.begin(model, ["For "]), 12)
    whole = torch.cat((streaming.to_tokens(["For "]).expand(5, -1), torch.cat((tokens, greedy))), 1)
    ahead = model(whole[:, :-1])[0][:, 3:].log_softmax(-1)
    expected = ahead.gather(-1, whole[:, 4:, None]).sum((1, 2))
    torch.testing.assert_close(scores, expected[:4], rtol=1e-4, atol=1e-4)
    assert scores[0] >= expected[4] - 1e-4  # the likeliest is no less likely than the greedy one


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
