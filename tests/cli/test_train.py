"""linrope train: a longer run, options from a file, what is said of the text, a full disk."""

from itertools import pairwise
from typing import Any

import pytest

from linrope.models.training import checkpoints
from tests.cli.commands import last_config, metrics
from tests.common.full_disk import full_disk

TRAIN = "train {text} --out {tmp}/run {small} "


def test_the_printed_loss_is_a_mean_of_the_steps_and_a_log_gets_a_line_every_few_seconds(
    run, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr("linrope.cli.training._SECONDS", 0.0)
    printed = run(TRAIN + "--steps 4").splitlines()
    losses = [row["bits_per_byte"] for row in metrics(tmp_path / "run")]
    means = []
    for last in range(1, 5):
        weights = [0.95 ** (last - step) for step in range(1, last + 1)]
        means.append(sum(w * loss for w, loss in zip(weights, losses[:last], strict=True)) / sum(weights))
    lines = [line for line in printed if line.startswith("step ")]
    for step, (line, mean) in enumerate(zip(lines, means, strict=True), 1):
        assert line.startswith(f"step {step} of 4: loss {mean:.3f} bits per byte; ")
    assert any(line.startswith(f"4 steps; loss {means[-1]:.3f} bits per byte") for line in printed)
    assert "" not in printed


def test_a_log_does_not_get_a_line_for_every_step(run) -> None:
    assert "step 1 of" not in run(TRAIN + "--steps 2")


def test_a_finished_run_goes_on_with_more_steps_and_says_what_it_ignores(run, refused) -> None:
    run(TRAIN + "--steps 3")
    resume = "train {text} --out {tmp}/run --resume "
    assert "is complete after 3 steps; a larger number of --steps continues it" in run(resume)
    printed = run(resume + "{small} --steps 5 --embed-dim 64 --seed 1")
    assert "continues at step 3 of 5" in printed
    ignored = "--seed (the checkpoint has 0), --embed-dim (the checkpoint has 32)"
    assert f"ignored with --resume: {ignored}\n" in printed
    assert "after 5 steps" in printed
    assert "--steps=4: expected at least 5" in refused(resume + "--steps 4")


GATED = {"decay": None, "forget_gate": {"longest": 32, "per": "head"}, "write_gate": "tied"}
UNGATED = {"decay": None, "forget_gate": None, "write_gate": None}
CONFIGS: dict[str, dict[str, Any]] = {
    "": GATED,
    "--no-forget-gate": UNGATED | {"decay": {"name": "spread", "longest": 32}},
    "--no-forget-gate --rotary none": UNGATED,
    "--no-forget-gate --positions sinusoidal": UNGATED,
    "--forget-gate --decay learned": GATED | {"decay": {"name": "learned", "longest": 32}},
    "--decay retnet": UNGATED | {"decay": {"name": "retnet"}},
    "--decay none": UNGATED,
    "--erase-gate tied": GATED
    | {
        "write_gate": None,
        "erase_gate": {"name": "tied", "largest": 1},
        "feature_map": {"name": "unit"},
        "normalize": False,
    },
    "--erase-gate independent --feature-map unit": GATED
    | {
        "erase_gate": {"name": "independent", "largest": 1},
        "feature_map": {"name": "unit"},
        "normalize": False,
    },
    "--attention softmax": UNGATED,
    "--attention softmax --positions shaw": UNGATED | {"attention": "softmax", "positions": "shaw"},
    "--feature-map cosformer": {"feature_map": {"name": "cosformer", "max_length": 4096}},
}


@pytest.mark.parametrize(("options", "expected"), CONFIGS.items(), ids=CONFIGS)
def test_options_and_their_defaults_make_the_config_of_the_model(
    options: str, expected: dict[str, Any], run, tmp_path
) -> None:
    run(TRAIN + "--steps 1 " + options)
    config = last_config(tmp_path / "run")
    assert {name: config[name] for name in expected} == expected


OPTIONS = {
    "json": '{"steps": 2, "embed-dim": 32, "layers": 1, "heads": 2, "sequence_length": 32, "qk_norm": true}',
    "yaml": "steps: 2\nembed_dim: 32\nlayers: 1\nheads: 2\nsequence-length: 32\nqk-norm: true\nlearning_rate: 1e-3\n",
}


@pytest.mark.parametrize(("kind", "content"), OPTIONS.items(), ids=OPTIONS)
def test_options_come_from_a_file_too_and_flags_go_first(kind: str, content: str, run, tmp_path) -> None:
    (tmp_path / f"a.{kind}").write_text(content)
    run(f"train {{text}} --out {{tmp}}/run --config {{tmp}}/a.{kind} --heads 4")
    config = last_config(tmp_path / "run")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000002"]
    assert [config[key] for key in ("embed_dim", "num_layers", "num_heads", "qk_norm")] == [32, 1, 4, True]


BOMB = "steps: [&a [x,x,x,x,x,x,x,x,x]," + ",".join(
    f"&{name} [{','.join(['*' + before] * 9)}]" for before, name in pairwise("abcdefghijklmn")
)
WRONG_FILES = {
    "unknown.json": ('{"stepz": 1}', "got the option 'stepz', expected one of"),
    "list.json": ('{"steps": [1]}', "got a list for steps, expected a text"),
    "word.json": ('{"steps": "many"}', "--steps"),
    "deep.json": ("[" * 100_000, "not readable as JSON"),
    "number.json": ("3", "got int, expected options"),
    "twice.json": ('{"steps": 1, "steps": 2}', "got 'steps' twice"),
    "spelt-twice.json": ('{"qk-norm": true, "qk_norm": true}', "got the option 'qk_norm' twice"),
    "true.json": ('{"steps": true}', "got true for steps, expected a text or a number"),
    "bomb.yaml": (BOMB + "]", "line 1: got the alias *a, expected its value"),
    "merge.yaml": ("heads: 2\n<<: [&a {steps: 1}, *a]", "line 2: got the alias *a, expected its value"),
    "twice.yaml": ("steps: 1\nsteps: 2", "got 'steps' twice"),
    "date.yaml": ("steps: 2024-13-45", "month must be in 1..12"),
    "deep.yaml": ("[" * 1000, "recursion"),
}


@pytest.mark.parametrize("name", WRONG_FILES)
def test_a_wrong_file_of_options_is_refused_at_once(name: str, refused, tmp_path) -> None:
    content, cause = WRONG_FILES[name]
    (tmp_path / name).write_text(content)
    message = refused(f"train {{text}} --out {{tmp}}/run --config {{tmp}}/{name}")
    assert cause in message
    assert name.endswith(".json") or f"{tmp_path / name}: not readable as YAML (" in message
    assert len(message) < 1000


def test_files_that_are_no_text_are_named(run, refused, tmp_path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.png", "b.bin"):
        (folder / name).write_bytes(b"\xff\xfe\x00")
    train = "train {tmp}/texts --out {tmp}/run --steps 1 {small}"
    assert "got no text; skipped, as not UTF-8: a.png, b.bin" in refused(train)
    for name in ("c.txt", "d.txt"):
        (folder / name).write_text("To be, or not to be. " * 20)
    skipped = "421 bytes to train on, 421 bytes held out; skipped, as not UTF-8 text: a.png, b.bin"
    assert skipped in run(train)  # in one line, as long as it is: this is no terminal


def test_a_full_disk_is_one_line_and_leaves_no_partial_checkpoint(refused, tmp_path) -> None:
    with full_disk(20_000):  # less than the weights take
        message = refused(TRAIN + "--steps 1")
    assert "model.safetensors: cannot be written" in message
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize("shared", [True, False])
def test_restarts_in_one_store_are_warned_of(shared: bool, run, monkeypatch) -> None:
    """tests/distributed/test_restart.py restarts for real."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(shared))
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in run(TRAIN + "--steps 1")) is shared


def test_a_folder_that_another_process_trains_into_is_refused(run, refused, tmp_path) -> None:
    fcntl, out = pytest.importorskip("fcntl"), tmp_path / "run"
    out.mkdir()
    for resume in ("", "--resume"):
        with open(out / ".lock", "w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            message = refused(TRAIN + "--steps 1 " + resume)
        assert "another process writes into this folder" in message
        if not resume:
            assert {path.name for path in out.iterdir()} == {".lock"}
            run(TRAIN + "--steps 1")
    assert {path.name for path in out.iterdir()} == {".lock", "metrics.jsonl", "step-00000001"}
