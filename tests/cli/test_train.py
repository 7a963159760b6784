"""linrope train: a longer run, options from a file, what is said of the text, a full disk."""

import io
import os
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from accelerate.state import AcceleratorState

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
}


@pytest.mark.parametrize(("options", "expected"), CONFIGS.items(), ids=CONFIGS)
def test_options_and_their_defaults_make_the_config_of_the_model(
    options: str, expected: dict[str, Any], run, only_the_model
) -> None:
    run(TRAIN + options)
    config = only_the_model[0].to_dict()
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


def test_bytes_a_text_to_hold_out_and_standard_input(run, refused, tmp_path, monkeypatch) -> None:
    (tmp_path / "a.bin").write_bytes(bytes(range(256)) * 8)
    (tmp_path / "b.bin").write_bytes(bytes(range(20)))  # shorter than a row
    train = "train {tmp}/a.bin --held-out {tmp}/b.bin --out {tmp}/run --steps 1 {small} "
    assert "a.bin: expected UTF-8 text, or --binary to train on its bytes" in refused(train)
    reset = AcceleratorState._reset_state  # a process has one precision
    reset(reset_partial_state=True)
    printed = run(train + "--binary --mixed-precision bf16")
    assert "on cpu, mixed bfloat16; " in printed
    assert "a.bin: 2.0 kB to train on, 20 bytes held out" in printed
    again = run("train --out {tmp}/run --resume --steps 2 --mixed-precision no")
    assert "ignored with --resume: --mixed-precision (the checkpoint has bf16)" in again
    assert "the held-out part of" in run("eval --checkpoint {tmp}/run --length 4")
    assert "all of" in run("eval --checkpoint {tmp}/run --length 4 {tmp}/a.bin")

    reset(reset_partial_state=True)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"To be, or not to be. " * 50)))
    stdin = "train - --out {tmp}/stdin --steps 1 {small} "
    assert "on cpu, float32; standard input: 998 bytes to train on, 52 bytes held out" in run(stdin)
    assert "does not record the text it was trained on" in refused("train --out {tmp}/stdin --resume")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff" * 900)))
    assert "standard input: expected UTF-8 text, or --binary" in refused("train - --out {tmp}/x {small}")


def test_a_run_without_a_checkpoint_starts_anew_and_others_keep_their_interval(
    run, refused, tmp_path
) -> None:
    (tmp_path / "run").mkdir()
    message = refused("train --resume --out {tmp}/run {small}")
    assert "has no checkpoint yet; expected the run's own command, with its PATH" in message
    assert "has no checkpoint yet, so the run starts anew" in run(TRAIN + "--resume --steps 2 --save-every 2")
    run("train --out {tmp}/run --resume --steps 5")
    assert [path.name for path in checkpoints(tmp_path / "run")] == ["step-00000004", "step-00000005"]


LONG = """
import resource, sys
from linrope.cli.app import run

for length, pieces, out in ((512, 1, "a"), (16384, 32, "b")):
    command = ["train", sys.argv[1], "--out", sys.argv[2] + out, *sys.argv[3:], "--batch-size", "1", "--steps", "1"]
    assert run([*command, "--sequence-length", str(length), "--pieces", str(pieces)]) == 0
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere the peak has other units")
def test_in_pieces_a_whole_run_takes_the_memory_of_a_piece(tmp_path) -> None:
    """Training, checkpoints and evaluations. The peak of rows of 32 pieces, beside that of rows as long as a piece."""
    (tmp_path / "text").write_bytes(bytes(range(97, 123)) * 30_000)
    small = ["--embed-dim", "32", "--layers", "1", "--heads", "2"]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LONG, str(tmp_path / "text"), str(tmp_path), *small]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, env=one_thread).stdout
    short, long = (int(line) * 1024 for line in printed.splitlines() if line.isdecimal())
    assert long - short < 16384 * 800  # in one piece the rows take 8 times as much
