"""linrope train: a longer run, options from a file, what is said of the text, a full disk."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from linrope.cli.app import run
from linrope.models.training import checkpoints

SMALL = ["--embed-dim", "32", "--layers", "1", "--heads", "2", "--batch-size", "2", "--sequence-length", "32"]


def test_the_printed_loss_is_a_mean_of_the_steps_and_a_log_gets_a_line_every_few_seconds(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("linrope.cli.training._SECONDS", 0.0)
    assert run(["train", str(text), "--out", str(tmp_path), "--steps", "4", *SMALL]) == 0
    printed = capfd.readouterr().out.splitlines()
    metrics = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    means = []
    for last in range(1, 5):
        weights = [0.95 ** (last - step) for step in range(1, last + 1)]
        losses = [row["bits_per_byte"] for row in metrics[:last]]
        means.append(sum(w * loss for w, loss in zip(weights, losses, strict=True)) / sum(weights))
    lines = [line for line in printed if line.startswith("step ")]
    for step, (line, mean) in enumerate(zip(lines, means, strict=True), 1):
        assert line.startswith(f"step {step} of 4: loss {mean:.3f} bits per byte; ")
    assert any(line.startswith(f"4 steps; loss {means[-1]:.3f} bits per byte") for line in printed)
    assert "" not in printed


def test_a_log_does_not_get_a_line_for_every_step(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["train", str(text), "--out", str(tmp_path), "--steps", "2", *SMALL]) == 0
    assert "step 1 of" not in capfd.readouterr().out


def test_a_finished_run_goes_on_with_more_steps_and_says_what_it_ignores(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train = ["train", str(text), "--out", str(tmp_path / "run")]
    assert run([*train, "--steps", "3", *SMALL]) == 0
    capfd.readouterr()
    assert run([*train, "--resume"]) == 0
    assert "is complete after 3 steps; a larger number of --steps continues it" in capfd.readouterr().out
    assert run([*train, "--resume", "--steps", "5", "--embed-dim", "64", "--seed", "1", *SMALL[2:]]) == 0
    printed = capfd.readouterr().out
    assert "continues at step 3 of 5" in printed
    ignored = "--seed (the checkpoint has 0), --embed-dim (the checkpoint has 32)"
    assert f"ignored with --resume: {ignored}\n" in printed
    assert "after 5 steps" in printed
    assert run([*train, "--resume", "--steps", "4"]) == 2
    assert "--steps=4: expected at least 5" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "decay", "gated"),
    [
        ([], None, True),
        (["--no-forget-gate"], {"name": "spread", "longest": 32}, False),
        (["--no-forget-gate", "--rotary", "none"], None, False),
        (["--no-forget-gate", "--positions", "sinusoidal"], None, False),
        (["--forget-gate", "--decay", "learned"], {"name": "learned", "longest": 32}, True),
        (["--decay", "retnet"], "retnet", False),
        (["--decay", "none"], None, False),
        (["--attention", "softmax"], None, False),
    ],
    ids=str,
)
def test_the_default_gates_and_decay_are_those_of_the_models(
    options: list[str], decay: object, gated: bool, text: Path, tmp_path: Path
) -> None:
    assert run(["train", str(text), "--out", str(tmp_path), "--steps", "1", *SMALL, *options]) == 0
    (last,) = checkpoints(tmp_path)
    config = json.loads((last / "config.json").read_text())
    assert config["decay"] == decay
    assert config["forget_gate"] == ({"longest": 32} if gated else False)
    assert config["write_gate"] == ("tied" if gated else None)


@pytest.mark.parametrize(
    ("name", "content"),
    [
        (
            "a.json",
            '{"steps": 2, "embed-dim": 32, "layers": 1, "heads": 2, "sequence_length": 32, "qk_norm": true}',
        ),
        ("a.yaml", "steps: 2\nembed_dim: 32\nlayers: 1\nheads: 2\nsequence-length: 32\nqk-norm: true\n"),
    ],
)
def test_options_come_from_a_file_too_and_flags_go_first(
    name: str, content: str, text: Path, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content + ("learning_rate: 1e-3\n" if name == "a.yaml" else ""))
    out = tmp_path / "run"
    assert run(["train", str(text), "--out", str(out), "--config", str(tmp_path / name), "--heads", "4"]) == 0
    (last,) = checkpoints(out)
    config = json.loads((last / "config.json").read_text())
    assert last.name == "step-00000002"
    assert [config[key] for key in ("embed_dim", "num_layers", "num_heads", "qk_norm")] == [32, 1, 4, True]


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        ('{"stepz": 1}', "got the option 'stepz', expected one of"),
        ('{"steps": [1]}', "got a list for steps, expected a text"),
        ('{"steps": "many"}', "--steps"),
        ("[" * 100_000, "not readable as JSON"),
        ("3", "got int, expected options"),
        ('{"steps": 1, "steps": 2}', "got 'steps' twice"),
        ('{"qk-norm": true, "qk_norm": true}', "got the option 'qk_norm' twice"),
        ('{"steps": true}', "got true for steps, expected a text or a number"),
    ],
)
def test_a_wrong_file_of_options_is_refused(
    content: str, cause: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.json").write_text(content)
    arguments = ["train", str(text), "--out", str(tmp_path / "run"), "--config", str(tmp_path / "a.json")]
    assert run(arguments) == 2
    assert cause in capfd.readouterr().err


BOMB = "steps: [&a [x,x,x,x,x,x,x,x,x]," + ",".join(
    f"&{name} [{','.join(['*' + before] * 9)}]" for before, name in pairwise("abcdefghijklmn")
)


@pytest.mark.parametrize(
    ("content", "cause"),
    [
        (BOMB + "]", "line 1: got the alias *a, expected its value"),
        ("heads: 2\n<<: [&a {steps: 1}, *a]", "line 2: got the alias *a, expected its value"),
        ("steps: 1\nsteps: 2", "got 'steps' twice"),
        ("steps: 2024-13-45", "month must be in 1..12"),
        ("[" * 1000, "recursion"),
    ],
    ids=["bomb", "merge", "twice", "date", "deep"],
)
def test_a_wrong_file_of_yaml_is_refused_at_once(
    content: str, cause: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "a.yaml"
    file.write_text(content)
    assert run(["train", str(text), "--out", str(tmp_path / "run"), "--config", str(file)]) == 2
    message = capfd.readouterr().err
    assert f"{file}: not readable as YAML (" in message
    assert cause in message
    assert len(message) < 1000


def test_files_that_are_no_text_are_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in ("a.png", "b.bin"):
        (folder / name).write_bytes(b"\xff\xfe\x00")
    train = ["train", str(folder), "--out", str(tmp_path / "run"), "--steps", "1", *SMALL]
    assert run(train) == 2
    assert "got no text; skipped, as not UTF-8: a.png, b.bin" in capfd.readouterr().err
    for name in ("c.txt", "d.txt"):
        (folder / name).write_text("To be, or not to be. " * 20)
    assert run(train) == 0
    printed = " ".join(capfd.readouterr().out.split())
    assert "421 bytes to train on, 421 bytes held out; skipped, as not UTF-8 text: a.png, b.bin" in printed


def test_cosformer_trains(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    options = ["--feature-map", "cosformer", "--steps", "1", *SMALL]
    assert run(["train", str(text), "--out", str(out), *options]) == 0
    config = json.loads((checkpoints(out)[-1] / "config.json").read_text())
    assert config["feature_map"] == {"name": "cosformer", "max_length": 4096}


def test_a_full_disk_is_one_line_and_leaves_no_partial_checkpoint(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    # bytes per file: less than the weights take
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        status = run(["train", str(text), "--out", str(tmp_path / "run"), "--steps", "1", *SMALL])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2
    assert "model.safetensors: cannot be written" in capfd.readouterr().err
    assert checkpoints(tmp_path / "run") == []


@pytest.mark.parametrize(("shared", "said"), [("True", True), ("False", False)])
def test_restarts_in_one_store_are_warned_of(
    shared: str, said: bool, text: Path, tmp_path: Path,
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """tests/distributed/test_restart.py restarts for real."""
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", shared)
    assert run(["train", str(text), "--out", str(tmp_path / "run"), "--steps", "1", *SMALL]) == 0
    assert ("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1" in capfd.readouterr().out) is said


def test_a_folder_that_another_process_trains_into_is_refused(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fcntl = pytest.importorskip("fcntl")
    out = tmp_path / "run"
    train = ["train", str(text), "--out", str(out), "--steps", "1", *SMALL]
    out.mkdir()
    for resume in ([], ["--resume"]):
        with open(out / ".lock", "w") as other:
            fcntl.flock(other, fcntl.LOCK_EX)
            assert run([*train, *resume]) == 2
        message = capfd.readouterr().err
        assert "another process writes into this folder" in message
        assert message.count("\n") == 1
        if not resume:
            assert {path.name for path in out.iterdir()} == {".lock"}
            assert run(train) == 0
    assert {path.name for path in out.iterdir()} == {".lock", "metrics.jsonl", "step-00000001"}
