"""benchmarks/study: its tasks, that its models are of one size, and that nothing is lost or counted twice."""

import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from benchmarks.study import __main__ as commands
from benchmarks.study import lines, peers, plan, report, runner, shakespeare, steps, text, training, variants
from benchmarks.study.images import Images
from benchmarks.study.mad import (
    Compression,
    FuzzyRecall,
    InContextRecall,
    Mad,
    Memorization,
    SelectiveCopying,
)
from benchmarks.study.runner import Run
from benchmarks.study.tasks import Copying, Recall, Task
from benchmarks.study.text import Distant, Language
from benchmarks.study.tracking import Arithmetic, Brackets, Parity
from linrope.models import language_model
from linrope.models.training import Corpus
from linrope.models.training.batch import NO_TARGET


@lru_cache(maxsize=1)
def small_corpus() -> Corpus:
    """Random letters; the standard library takes seconds to read."""
    generator = torch.Generator().manual_seed(0)
    letters = torch.randint(32, 127, (40, 9000), dtype=torch.uint8, generator=generator)
    return Corpus.from_texts([row.numpy().tobytes().decode() for row in letters])


@pytest.fixture(autouse=True)
def _corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text, "corpus", small_corpus)
    some = torch.randint(65, (3000,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(shakespeare, "characters", lambda: (some[:2000], some[2000:]))


def tiny(task: Task) -> Task:
    """Two steps on two rows, and for text shorter ones."""
    task = replace(task.scaled(1e-4), rows=2)
    if isinstance(task, Mad):
        return replace(task, train_rows=16)
    if isinstance(task, Language):
        return replace(task, length=16)
    return replace(task, length=128, distances=(64, 128), tested=(64,)) if isinstance(task, Distant) else task


TASKS = {task.name: task for task, _ in [*plan.PLAN, *plan.LONG]}
LANGUAGE = tiny(TASKS["language"])


class Model(nn.Module):
    """A model that calls a function. Its parameter is unused: tasks ask models for the device of a parameter."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.unused, self.forward = nn.Parameter(torch.zeros(())), function  # type: ignore[method-assign]


def one_hot(tokens: Tensor, classes: int = 256) -> Tensor:
    return nn.functional.one_hot(tokens % classes, classes).float()


def look_up(inputs: Tensor) -> Tensor:
    """What followed the same token when it stood there first."""
    first = (inputs[:, :, None] == inputs[:, None]).int().argmax(-1)
    return inputs.gather(1, (first + 1).clamp(max=inputs.shape[1] - 1))


def repeat(inputs: Tensor) -> Tensor:
    """The text from its beginning on, once the mark has come."""
    return inputs.roll(inputs.shape[1] // 2, 1)


def selected(inputs: Tensor) -> Tensor:
    """The symbols that are neither blank (14) nor the mark (15), over the blanks at the end."""
    rows = inputs[inputs < 14].view(len(inputs), -1)
    return nn.functional.pad(rows, (inputs.shape[1] - rows.shape[1], 0))


def learned_by_heart(inputs: Tensor) -> Tensor:
    """The value of the key before, as the training rows show it."""
    keys, values = Memorization("mad").make(200, torch.Generator().manual_seed(0), True)
    table = torch.zeros(256, dtype=torch.int64)
    table[keys[:, ::2]] = values[:, 1::2]
    return table[inputs].roll(1, 1)


def look_up_words(inputs: Tensor) -> Tensor:
    """Predicts each symbol of a value: the one that followed when the same key and start of the value came before.

    A key is three symbols under 7.
    """
    found = inputs.clone()
    for row, guess in zip(inputs.tolist(), found):
        for at in range(3, len(row)):
            key = next((i for i in range(at, -1, -1) if row[i] < 7), 2)
            word = row[key - 2 : at + 1]
            starts = (i for i in range(at - len(word)) if row[i : i + len(word)] == word)
            guess[at] = row[next(starts, 0) + len(word)]
    return found


def evaluate(signs: str, inputs: Tensor) -> Tensor:
    """The value modulo 5 of the row up to each token, by Python's eval; 0 where that is no expression."""
    found = torch.zeros_like(inputs)
    for row, values in zip(inputs.tolist(), found):
        text = "".join(f"{('01234' + signs)[x]}" for x in row)
        for at in range(len(text)):
            with contextlib.suppress(SyntaxError):
                values[at] = eval(text[: at + 1].rstrip("=")) % 5
    return found


# Tasks


@pytest.mark.parametrize(
    ("task", "solve"),
    [
        (Recall("recall", test_rows=20), look_up),
        (Distant("distant", test_rows=3, tested=(256, 1024)), look_up),
        (Copying("copying"), repeat),
        (Compression("mad-compress"), lambda inputs: inputs),
        (FuzzyRecall("mad-fuzzy-recall", test_rows=20), look_up_words),
        (InContextRecall("mad-recall", test_rows=200), look_up),
        (InContextRecall("mad-noisy-recall", vocab_size=32, noise=0.2, noise_symbols=16), look_up),
        (SelectiveCopying("mad-copy"), selected),
        (Memorization("mad-memorize"), learned_by_heart),
        (Parity("track-parity", test_rows=9), lambda inputs: inputs.cumsum(1)),
        (Arithmetic("track-arithmetic", longest=50, test_rows=3, tested=(40, 60)), partial(evaluate, "+-*")),
        (Brackets("track-brackets", longest=50, test_rows=40, tested=(40, 60)), partial(evaluate, "+-()=")),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_perfect_solver_gets_the_ceiling_and_guessing_the_floor(
    task: Task, solve: Callable[[Tensor], Tensor]
) -> None:
    classes = task.vocab_size
    assert task.measure(Model(lambda inputs: one_hot(solve(inputs), classes))) == task.ceiling()
    guess = Model(lambda inputs: one_hot(torch.full_like(inputs, 1), classes))
    assert all(share <= max(3 * task.floor()[name], 0.2) for name, share in task.measure(guess).items())


def test_a_model_that_knows_nothing_needs_eight_bits_anywhere() -> None:
    found = LANGUAGE.measure(Model(lambda inputs: torch.zeros(*inputs.shape, 256)))
    assert found["bits"] == pytest.approx(8)
    assert [found[f"{t}x - 1x"] for t in (2, 4, 8)] == [0, 0, 0]
    assert len(found["by position"]) == len(found["by position, 1x"]) == 64
    assert 6 < LANGUAGE.floor()["bits"] < 7  # of 95 letters, all as frequent


def test_what_a_long_context_brings_is_measured_on_the_same_bytes() -> None:
    def counts(inputs: Tensor) -> Tensor:
        """Is the surer of the next byte, which it sees, the longer the context is."""
        return one_hot(inputs.roll(-1, 1)) * torch.arange(inputs.shape[1])[:, None] / 8

    found = LANGUAGE.measure(Model(counts))
    assert found["8x - 1x"] < found["4x - 1x"] < found["2x - 1x"] < 0
    # In the first window they are one, but for its last byte: what this model reads there is in another row.
    assert found["by position"][:7] == pytest.approx(found["by position, 1x"][:7])


def test_the_loss_of_shakespeare_is_that_of_the_whole_validation_part(monkeypatch, tmp_path) -> None:
    task = TASKS["shakespeare-64"]
    guess = Model(lambda inputs: torch.zeros(*inputs.shape, 65))
    assert task.measure(guess)["loss"] == pytest.approx(math.log(65))
    seen = []
    task.measure(Model(lambda inputs: (seen.append(inputs), one_hot(inputs, 65))[1]))  # type: ignore[func-returns-value]
    validation = shakespeare.characters()[1]
    assert torch.equal(torch.cat(seen).flatten(), validation[: sum(x.numel() for x in seen)])
    assert len(validation) - sum(x.numel() for x in seen) <= 64

    monkeypatch.undo()
    shakespeare.characters.cache_clear()
    (tmp_path / "other.txt").write_text("To be, or not to be")
    for path in ("", tmp_path / "other.txt"):
        monkeypatch.setenv(shakespeare.VARIABLE, str(path))
        with pytest.raises(ValueError, match=r"TINY_SHAKESPEARE=.*expected the path of .*input.txt"):
            task.batch(0, 0)


def test_training_asks_for_the_value_of_an_expression_so_far() -> None:
    task = TASKS["track-brackets"]
    for row, targets in zip(*task.batch(0, task.steps - 1)):
        text = "".join("01234+-()="[x] for x in row[targets != NO_TARGET])
        for at, target in enumerate(targets[: len(text)]):
            begun = text[: at + 1].rstrip("=").rstrip("+-(")
            closed = begun + ")" * (begun.count("(") - begun.count(")"))
            assert target == eval(closed or "0") % 5


def test_rows_grow_while_state_tracking_is_trained() -> None:
    task = TASKS["track-parity"]
    assert [task.batch(0, step)[0].shape for step in (0, task.steps - 1)] == [(40, 8), (2, 160)]


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_half_lives_start_spread_up_to_a_whole_row(task: Task) -> None:
    assert task.longest_half_life >= task.length


def test_images_are_seen_whole_and_show_every_direction() -> None:
    images, labels = Images("images").make(200, 32, torch.Generator().manual_seed(0))
    assert images.shape == (200, 3, 32, 32)
    assert labels.unique().tolist() == list(range(8))


@pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
def test_batches_depend_on_seed_and_step_alone(task: Task) -> None:
    task = tiny(task)
    for one, same, other in zip(task.batch(1, 5), task.batch(1, 5), task.batch(2, 5)):
        assert torch.equal(one, same)
        assert one.shape != other.shape or not torch.equal(one, other)
    assert (task.batch(1, 5)[1] != NO_TARGET).any()


# Models


def size(name: str, task: Task) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in variants.build(name, task).parameters())


@pytest.fixture
def no_initial_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the meta device, where there is nothing to set, they take most of the time."""
    monkeypatch.setattr(language_model, "initialize", lambda *_: None)
    for kind in (nn.Linear, nn.Embedding):
        monkeypatch.setattr(kind, "reset_parameters", lambda self: None)


# Their models are also those of other tasks, in the same sizes but for the vocabulary or the length.
LIKE_OTHERS = (
    "language-equal-time",
    "copying-1800",
    "distant",
    "language-long",
    "language-long-600",
    "track-arithmetic",
    "track-brackets",
    "shakespeare-512",
    "shakespeare-512-equal-time",
    "mad-compress",
    "mad-fuzzy-recall",
    "mad-recall",
    "mad-noisy-recall",
    "mad-copy",
)


@pytest.mark.usefixtures("no_initial_weights")
@pytest.mark.parametrize(
    ("task", "names"),
    [
        pytest.param(task, names, marks=pytest.mark.long if task.name in LIKE_OTHERS else (), id=task.name)
        for task, names in [*plan.PLAN, *plan.LONG]
    ],
)
def test_all_models_of_a_task_have_as_many_parameters(task: Task, names: list[str]) -> None:
    counts = {name: size(name, task) for name in names if peers.why_not(name) is None}
    target = size("softmax-rope", task)
    assert all(0.99 * target <= count <= 1.01 * target for count in counts.values()), counts


def test_no_task_has_a_model_twice() -> None:
    assert all(len(set(names)) == len(names) for _, names in [*plan.PLAN, *plan.LONG])


def test_a_model_of_another_size_is_refused() -> None:
    variants.check_parameters("gate-rope", 1010, 1000)
    with pytest.raises(ValueError, match="gate-rope: got 1011 parameters, expected 1000 within 1%"):
        variants.check_parameters("gate-rope", 1011, 1000)


VARIANTS = dict(plan.PLAN)[TASKS["language"]]  # every fifth of them, and in make test-long the others


@pytest.mark.parametrize(
    ("task", "name"),
    [
        pytest.param(LANGUAGE, name, marks=() if i % 5 == 0 else pytest.mark.long, id=f"language-{name}")
        for i, name in enumerate(VARIANTS)
    ]
    + [(tiny(task), names[-1]) for task, names in plan.PLAN[1:]]
    + [(tiny(TASKS["images"]), name) for name in ("softmax-rope", "linear", "axial")]
    + [(tiny(TASKS["mad-compress"]), name) for name in ("block-hybrid", "gated-deltanet")]
    + [(tiny(TASKS["shakespeare-64"]), "gpt-2")]
    + [(tiny(TASKS["track-brackets"]), "block-tied-2-selective-add")],
    ids=lambda value: getattr(value, "name", value),
)
def test_every_model_trains_and_is_measured(task: Task, name: str, tmp_path) -> None:
    if reason := peers.why_not(name):
        pytest.skip(reason)
    model = variants.build(name, task, seed=1)
    before = [p.clone() for p in model.parameters()]
    progress = training.train(model, task, 1, 1e-3, tmp_path / "x.pt")
    assert len(progress.losses) == 2
    moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before)]
    assert sum(moved) > 0.8 * len(moved)  # selective steps start at zero, and half of them get no gradient
    assert all(x == x for x in task.measure(model).values())


def test_variants_are_what_their_names_say() -> None:
    def layers(name: str) -> list[Any]:
        return [block.attention for block in variants.build(name, LANGUAGE).model.blocks]

    assert [layer.rope_order for layer in layers("rope-before")] == ["before"] * 4
    for name, softmax in (("block-hybrid", -1), ("block-hybrid-first", 0)):
        kinds = [type(layer).__name__ for layer in layers(name)]
        assert kinds.pop(softmax) == "SoftmaxAttention"
        assert kinds == ["LinearRoPEAttention"] * 3
    assert layers("spread")[0].decay[-1] == pytest.approx(2 ** (-1 / LANGUAGE.length))
    for name, largest, start in (
        ("block-erase", 1, 0.018),
        ("block-tied-2", 2, 1.0),
    ):
        gate = layers(name)[0].erase_gate
        assert gate.largest == largest
        assert layers(name)[0].feature_map.activation == "identity"
        assert largest * gate.bias.sigmoid().mean().item() == pytest.approx(start, abs=1e-3)


def test_a_model_with_an_autocast_computes_in_its_dtype_and_returns_float32() -> None:
    model = variants.build("block", tiny(TASKS["copying"]))
    model.autocast = torch.bfloat16
    logits = model(torch.zeros(1, 3, dtype=torch.int64))
    assert logits.dtype == torch.float32
    assert torch.equal(logits, logits.bfloat16().float())


def test_the_number_in_a_recall_s_name_is_that_of_a_layer_s_state_and_growing_states_have_none() -> None:
    for task, names in plan.chosen([], 1.0):
        if task.name.startswith("recall-"):
            model = variants.build("block-all-rotated", task)
            assert "block-all-rotated" in names
            assert variants.state_numbers(model) == int(task.name.removeprefix("recall-")) * task.layers
            assert variants.state_numbers(variants.build("softmax-rope", task)) is None
    assert variants.state_numbers(variants.build("block-hybrid", LANGUAGE)) is None


# Runs


def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path, monkeypatch) -> None:
    task = replace(tiny(TASKS["copying"]), steps=6)
    monkeypatch.setattr(training, "SAVE_EVERY", -1.0)

    def trained(folder: str) -> tuple[list[float], list[Tensor]]:
        model = variants.build("block-selective-add", task, seed=1)
        losses = training.train(model, task, 1, 1e-2, tmp_path / folder / "x.pt").losses
        return losses, [p.detach() for p in model.parameters()]

    whole = trained("whole")
    make = Copying.batch

    def kill(self: Copying, seed: int, step: int) -> Any:
        if step == 4:
            raise KeyboardInterrupt
        return make(self, seed, step)

    with monkeypatch.context() as patched:
        patched.setattr(Copying, "batch", kill)
        with pytest.raises(KeyboardInterrupt):
            trained("killed")
    torch.testing.assert_close(trained("killed"), whole, rtol=0, atol=0)


def test_training_ends_early_where_a_task_is_solved(tmp_path, monkeypatch) -> None:
    task = replace(tiny(TASKS["copying"]), steps=6)
    monkeypatch.setattr(Copying, "solved", lambda self, model, step: step == 3)
    progress = training.train(variants.build("block", task), task, 1, 1e-3, tmp_path / "x.pt")
    assert (progress.solved, len(progress.losses)) == (True, 3)

    task = Compression("mad-compress")
    perfect, guess = Model(lambda inputs: one_hot(inputs, 16)), Model(lambda inputs: one_hot(0 * inputs, 16))
    assert [task.solved(model, step) for model in (perfect, guess) for step in (200, 150)] == [
        True,
        False,
        False,
        False,
    ]


def test_a_study_that_was_killed_runs_only_what_is_missing(tmp_path, monkeypatch, capsys) -> None:
    def study() -> list[str]:
        runner.study(
            tmp_path,
            ["recall-1024", "block-all-rotated", "softmax-rope"],
            1e-4,
            seeds=2,
            jobs=1,
            device="cpu",
        )
        return capsys.readouterr().out.splitlines()

    append = lines.append

    def kill(folder: Path, line: lines.Line) -> None:
        if len(lines.read(folder)) == 7:  # 3 learning rates of 2 families, and one run
            raise KeyboardInterrupt
        append(folder, line)

    with monkeypatch.context() as patched:
        patched.setattr(lines, "append", kill)
        with pytest.raises(KeyboardInterrupt):
            study()
    with open(tmp_path / lines.NAME, "a") as file:
        file.write('{"task": "rec')  # a line that was being written
    capsys.readouterr()
    assert len(study()) == 3
    found = lines.read(tmp_path)
    assert len({(x["model"], x["seed"], x["learning_rate"], x["phase"]) for x in found}) == len(found) == 10
    assert [(x["model"], x["seed"]) for x in found[6:]] == [
        ("softmax-rope", 1), ("block-all-rotated", 1), ("softmax-rope", 2), ("block-all-rotated", 2),
    ]  # fmt: skip
    assert study() == []
    assert not list((tmp_path / "unfinished").glob("*"))


def test_a_line_has_what_repeats_the_run(tmp_path) -> None:
    run = Run(tiny(TASKS["copying"]), "block-all-rotated", 3, 1e-3, "run")
    first = runner.perform((run, tmp_path, "cpu"))
    json.dumps(first, allow_nan=False)
    assert first.keys() >= {"options", "settings", "machine", "versions", "modified", "optimizer", "date"}
    assert first["machine"].keys() >= {"cpu", "commit", "threads"}
    assert first["tokens_per_second"] > 0
    again = runner.perform((run, tmp_path, "cpu"))
    assert again["losses"] == first["losses"]
    assert again["results"] == first["results"]
    assert runner.is_done(run, [json.loads(json.dumps(first))])
    assert not runner.is_done(replace(run, task=replace(run.task, steps=3)), [first])


def test_a_run_that_diverges_is_a_line_without_results(tmp_path) -> None:
    run = Run(replace(tiny(TASKS["copying"]), steps=50), "eq19", 1, 1e20, "run")
    line = runner.perform((run, tmp_path, "cpu"))
    assert line["results"] is None
    assert line["diverged_at"] < 50
    lines.append(tmp_path, line)
    assert "| 1 of 1 diverged |" in report.page(tmp_path)


def test_the_learning_rate_is_the_one_with_the_least_loss_of_the_grid() -> None:
    task = TASKS["recall-256"]
    losses = dict(zip(task.learning_rates, (0.5, 0.2, None)))
    grid = [Run(task, "block-erase", plan.GRID_SEED, rate, "grid") for rate in losses]
    found = [run.key() | {"final_loss": losses[run.learning_rate]} for run in grid]
    noise = [Run(task, "block-erase", 1, 1e-2, "run").key() | {"final_loss": 0.0}]
    assert runner.best_rate(task, "block-erase", found + noise) == 3e-3
    with pytest.raises(RuntimeError, match="diverged"):
        runner.best_rate(task, "block-erase", found[2:])
    counting = runner.counting([(task, ["block-erase"])], 3, found)
    assert [(run.seed, run.learning_rate) for run in counting] == [(seed, 3e-3) for seed in (1, 2, 3)]


def test_a_part_of_the_study_uses_the_learning_rates_of_the_whole() -> None:
    ((task, names),) = plan.chosen(["language", "block-feature"], 1.0)
    assert names == ["block-feature"]
    assert plan.representatives(task, names) == {"block": "block-all-rotated"}


def test_a_star_chooses_every_task_and_model_that_it_fits() -> None:
    every = [("track-parity", 2), ("track-arithmetic", 2), ("track-brackets", 2)]
    found = plan.chosen(["track-*", "block-tied-2-*"], 1.0)
    assert [(task.name, len(names)) for task, names in found] == every


def test_what_cannot_be_chosen_is_refused() -> None:
    with pytest.raises(ValueError, match=r"got \['gates'\], expected names"):
        plan.chosen(["gates"], 1.0)
    with pytest.raises(ValueError, match=r"scale=0\.0"):
        plan.chosen([], 0.0)


def test_a_larger_scale_has_more_steps_and_parameters_and_one_of_1_changes_nothing() -> None:
    language = TASKS["language"]
    assert 3.5 < size("eq19", language.scaled(4.0)) / size("eq19", language) < 4.5
    assert language.scaled(4.0).steps == 4 * language.steps
    assert [task.scaled(1.0) for task in TASKS.values()] == list(TASKS.values())


def test_a_peer_that_is_not_installed_is_left_out_and_named(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    runner.study(tmp_path, ["language", "mamba-2"], 1e-4, seeds=1, jobs=1, device="cpu")
    assert capsys.readouterr().out == "language: left out mamba-2: transformers is not installed\n"
    assert lines.read(tmp_path) == []


def test_the_commands(tmp_path, capsys) -> None:
    run = f"run --out {tmp_path} --scale 1e-4 --seeds 1 --only copying --only block-unrotated"
    for command in (run, f"table {tmp_path}", f"plot {tmp_path}"):
        with pytest.raises(SystemExit) as end:
            commands.main(command.split())
        assert end.value.code == 0
    shown = capsys.readouterr().out
    assert "**copying**" in shown
    assert shown.endswith("look-up.svg\n")
    with pytest.raises(SystemExit, match=r"study: .*runs.jsonl: expected the results of at least one run"):
        commands.main(["table", str(tmp_path / "nothing")])


def test_steps_of_models_are_timed_side_by_side(tmp_path, capsys) -> None:
    command = f"steps --only recall-1024 --only softmax-rope --only block --rounds 1 --out {tmp_path}"
    commands.app(command.split(), standalone_mode=False)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("softmax-rope: ")
    assert second.startswith("block: ")
    assert second.endswith("ms, 1.00 (fastest)")
    found = steps.read(tmp_path)
    assert found is not None
    assert found["seconds"].keys() == {"softmax-rope", "block"}


def test_other_people_s_linear_layers_are_timed_on_linrope_and_in_plain_pytorch() -> None:
    if reason := peers.why_not("mamba-2"):
        pytest.skip(reason)
    from linrope.integrations import transformers as linrope_transformers

    found = steps.step_seconds(LANGUAGE, ["mamba-2", "llama"], 1)
    assert [set(sides) for sides in found.values()] == [{"fastest", "plain"}, {"fastest"}]
    model = variants.build("mamba-2", LANGUAGE)
    assert linrope_transformers.replaced(model) == ()
    with peers.on_linrope("mamba-2"):
        assert "scan" in linrope_transformers.replaced(model)
    assert variants.state_numbers(model) is None
    assert peers.state_numbers("mamba-2", model.options) == 8 * 2 * LANGUAGE.dim * model.options["state_size"]
    assert peers.state_numbers("llama", {}) is peers.state_numbers("block-all-rotated", {}) is None


def test_longer_tasks_take_the_learning_rates_of_the_others() -> None:
    for name, other in (
        ("language-equal-time", "language"), ("copying-1800", "copying"), ("language-long-600", "language-long"),
    ):  # fmt: skip
        longer, plain = TASKS[name], TASKS[other]
        assert longer.rate_task() == plain
        assert longer.scaled(2.0).rate_task() == plain.scaled(2.0)
        assert longer.steps > plain.steps
    longer = TASKS["language-equal-time"]
    losses = dict(zip(longer.learning_rates, (0.5, 0.2, 0.3)))
    runs = runner.grid([(longer, ["block"])])
    assert {(run.task, run.model) for run in runs} == {(TASKS["language"], "block-all-rotated")}
    found = [run.key() | {"final_loss": losses[run.learning_rate]} for run in runs]
    (run,) = runner.counting([(longer, ["block"])], 1, found)
    assert (run.task, run.learning_rate) == (longer, 3e-3)
