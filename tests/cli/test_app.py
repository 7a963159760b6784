import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

import linrope
from linrope.cli import main
from linrope.cli.app import _in_words_of_the_command, run
from linrope.cli.training import Log
from linrope.models import LanguageModel, LanguageModelConfig
from linrope.models.training import checkpoints

SMALL = ["--embed-dim", "32", "--layers", "1", "--heads", "2", "--batch-size", "2", "--sequence-length", "32"]


@pytest.mark.parametrize("command", [[], ["train"], ["eval"], ["generate"], ["bench"], ["demo"]])
def test_help_says_what_each_command_does(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    assert "Usage: " in capsys.readouterr().out


def test_train_resume_generate(text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "run")
    assert run(["train", str(text), "--out", out, "--steps", "4", *SMALL]) == 0
    assert "bits per byte after 4 steps" in capfd.readouterr().out
    assert run(["train", "--out", out, "--resume"]) == 0  # on the text of the checkpoint
    capfd.readouterr()
    generated = []
    for _ in range(2):
        arguments = ["--prompt", "To be", "--max-new-tokens", "9", "--seed", "1"]
        assert run(["generate", "--checkpoint", out, *arguments]) == 0
        generated.append(capfd.readouterr().out)
    assert generated[0].startswith("To be")
    assert len(generated[0].rstrip("\n")) >= 5
    assert generated[0] == generated[1]


def test_train_with_other_attention_and_positions(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, choice = tmp_path / "run", ["--attention", "softmax", "--positions", "shaw"]
    assert run(["train", str(text), "--out", str(out), "--steps", "3", *choice, *SMALL]) == 0
    assert "bits per byte after 3 steps" in capfd.readouterr().out
    config = json.loads((checkpoints(out)[-1] / "config.json").read_text())
    assert (config["attention"], config["positions"], config["decay"]) == ("softmax", "shaw", None)
    assert run(["generate", "--checkpoint", str(out), "--prompt", "To be", "--max-new-tokens", "5"]) == 0
    assert capfd.readouterr().out.startswith("To be")


def test_metrics_of_every_step_and_tensorboard(text: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    out = tmp_path / "run"
    options = ["--steps", "5", "--save-every", "2", "--tensorboard", "--warmup-steps", "2", "--pieces", "3"]
    assert run(["train", str(text), "--out", str(out), *options, *SMALL]) == 0
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "held_out_bits_per_byte" in line] == [2, 4, 5]
    assert {"bits_per_byte", "learning_rate", "gradient_norm", "seconds"} <= lines[0].keys()
    assert len(list((out / "tensorboard").iterdir())) == 1


def test_absent_tensorboard_is_named(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert run(["train", str(text), "--out", str(tmp_path / "run"), "--tensorboard", *SMALL]) == 2
    assert "tensorboard is missing; install linrope[train]" in capfd.readouterr().err


def test_a_log_forgets_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    log = Log(tmp_path, 2, tensorboard=False)
    log.write({"step": 3, "bits_per_byte": 2.5})
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "bits_per_byte": 2.5}\n'


def test_a_line_without_a_step_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"note": "a new idea"}\n')
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}, line 2: got step None, expected"):
        Log(tmp_path, 2, tensorboard=False)


def test_a_tokenizer_stays_with_the_run(
    text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder, out = tmp_path / "tokenizer", str(tmp_path / "run")
    words = ["<?>", *sorted(set(re.findall(r"\w+|[^\w\s]", text.read_text())))]
    tokenizers, transformers = pytest.importorskip("tokenizers"), pytest.importorskip("transformers")
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<?>")
    own = tokenizers.Tokenizer(model)
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=own).save_pretrained(folder)
    train = ["train", str(text), "--out", out]
    assert run([*train, "--tokenizer", str(folder), "--steps", "3", *SMALL]) == 0
    config = json.loads((checkpoints(out)[-1] / "config.json").read_text())
    assert config["vocab_size"] == len(words)
    folder.rename(tmp_path / "elsewhere")
    assert run([*train, "--resume"]) == 0
    assert run(["eval", "--checkpoint", out, "--length", "20"]) == 0
    capfd.readouterr()
    arguments = ["--prompt", "To be", "--max-new-tokens", "5", "--seed", "1"]
    assert run(["generate", "--checkpoint", out, *arguments]) == 0
    generated = capfd.readouterr().out.split()
    assert generated[:2] == ["To", "be"]
    assert len(generated) == 7
    assert set(generated) <= set(words)


@pytest.mark.parametrize(
    ("arguments", "cause"),
    [
        (["train", "absent.txt"], "absent.txt: no such file or folder"),
        (["train", "--steps", "many"], "--steps"),
        (["train", "--stepz", "1"], "--stepz"),
        (["train", "{text}", "--steps", "0"], "--steps=0: expected at least 1"),
        (["train", "{text}", "--feature-map", "elu+"], "did you mean 'elu+1'"),
        (["train", "{text}", "--heads", "5"], "--embed-dim=128: expected a multiple of --heads=5"),
        (["train", "{text}", "--layers", "0"], "--layers=0: expected at least 1"),
        (
            ["train", "{text}", "--embed-dim", "24"],
            "--embed-dim=24, --heads=8: heads of 3, expected an even size",
        ),
        (["bench", "--kv-heads", "3"], "--kv-heads=3: expected a divisor of --heads=8"),
        (["train", "{text}", "--rotary", "both"], "--rotary='both'"),
        (["train", "{text}", "--attention", "softmax", "--rotary", "both"], "--rotary='both'"),
        (["train", "{text}", "--attention", "square"], "--attention='square'"),
        (["train", "{text}", "--positions", "learnt"], "did you mean 'learned'"),
        (["train", "{text}", "--positions", "deberta"], "expected --attention='softmax'"),
        (["train", "{text}", "--feature-map", "silu"], "signed"),
        (["train", "{text}", "--out", "{text}/run", "--steps", "1", *SMALL], "text.txt"),
        (["train", "{text}", "--out", "{tmp}/none", "--resume"], "expected a folder with checkpoints"),
        (["train", "{text}", "--pieces", "0"], "--pieces=0"),
        (["train", "{text}", "--pieces", "2", "--attention", "softmax"], "--pieces=2"),
        pytest.param(
            ["train", "{text}", "--tokenizer", "{tmp}/none"],
            "{tmp}/none",
            marks=pytest.mark.skipif(find_spec("transformers") is None, reason="needs transformers"),
        ),
        (["train", "{text}", "--decay", "fast"], "--decay='fast'"),
        (["train", "{text}", "--short-conv", "1"], "--short-conv=1:"),
        (["train", "{text}", "--short-conv", str(10**30)], "--short-conv=1000"),
        (["train", "{text}", "--embed-dim", str(2**30)], "not enough memory"),
        (["train", "{text}", "--seed", str(10**30)], "--seed=1000"),
        (["train", "{text}", "--learning-rate", "1e300"], "--learning-rate=1e+300"),
        (["bench", "--lengths", " "], "--lengths=' '"),
        (["train", "{text}", "--out", "{tmp}/\udcff"], r"\udcff': expected a path in UTF-8"),
        (
            ["train", "{text}", "--attention", "softmax", "--forget-gate"],
            "--forget-gate: softmax attention has no forget gate; leave",
        ),
        (["train", "{text}", "--attention", "softmax", "--rotary", "selective"], "--rotary='selective'"),
        (["eval", "--checkpoint", "{tmp}"], "expected a folder with checkpoints"),
        (["eval", "--checkpoint", "{tmp}", "--sequences", "0"], "--sequences=0"),
        (["eval", "--checkpoint", "{text}"], "--checkpoint={text}: {text} is a file, expected a folder"),
        (["generate", "--checkpoint", "{tmp}"], "expected a folder with checkpoints"),
        (["generate"], "--checkpoint"),
        (["train", "{text}", "--feature-map", "performer"], "did you mean 'favor+'"),
        (["train", "{text}", "--device", "tpu9"], "--device=tpu9"),
        (["train", "{text}", "--device", "meta"], "--device=meta"),
        (["train", "{text}", "--config", "{tmp}/none"], "{tmp}/none"),
        (["dance"], "dance"),
        (["train", "{text}", "--layers", "-1"], "--layers=-1: expected at least 1"),
        (["train", "{text}", "--heads", "64", "--embed-dim", "64"], "--embed-dim=64, --heads=64: heads of 1"),
        (["train", "{text}", "--short-conv", "-4"], "--short-conv=-4: expected at least 2 taps, or 0"),
        (["train", "{text}", "--save-every", "0"], "--save-every=0: expected at least 1"),
        (["train", "{text}", "--out", "{text}"], "text.txt is a file, expected a folder"),
        (["train", "{text}", "--config", "{tmp}"], "{tmp}: Is a directory"),
        (
            ["train", "{text}", "--rotary", "half", "--positions", "none"],
            "--rotary=half: expected --positions=rope",
        ),
        (
            ["train", "{text}", "--feature-map", "relu", "--attention", "softmax"],
            "--feature-map: softmax attention has no feature map",
        ),
        (
            ["train", "{text}", "--gradients-through-pieces"],
            "--gradients-through-pieces has no effect with --pieces=1",
        ),
        (
            ["train", "{text}", "--sequence-parallel", "2", *SMALL],
            "--sequence-parallel=2, --tensor-parallel=1: expected",
        ),
        (["eval", "--checkpoint", "{tmp}", "--length", "0"], "--length=0: expected at least 1"),
        (["eval", "--checkpoint", "{tmp}", "--out", "{text}"], "text.txt is a file, expected a folder"),
        (["bench", "--out", "{text}/new"], "text.txt is a file, expected a folder"),
        (["bench", "--budget", "0"], "--budget=0.0: expected a positive number"),
        (["demo", "--seconds", "-1"], "--seconds=-1.0: expected a positive finite number"),
        (["demo", "--out", "{text}"], "text.txt is a file, expected a folder"),
        (["env", "--xml"], "--xml"),
    ],
)
def test_wrong_input_exits_2_with_one_line(
    arguments: list[str], cause: str, text: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run([part.format(text=text, tmp=tmp_path) for part in arguments]) == 2
    message = capfd.readouterr().err
    assert message.startswith("linrope: ")
    assert message.count("\n") == 1
    assert cause.format(text=text, tmp=tmp_path) in message


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        (["--max-new-tokens", "-1"], "--max-new-tokens=-1: expected at least 0"),
        (["--temperature", "nan"], "--temperature=nan: expected at least 0"),
        (["--top-k", "0"], "--top-k=0: expected at least 1"),
        (["--top-p", "2"], "--top-p=2.0: expected more than 0, at most 1"),
        (["--seed", str(10**30)], f"--seed={10**30}: expected an integer of 64 bits"),
    ],
)
def test_wrong_options_of_generate_have_their_own_names(
    options: list[str], cause: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    LanguageModel(LanguageModelConfig(embed_dim=16, num_layers=1, num_heads=2)).save(tmp_path)
    assert run(["generate", "--checkpoint", str(tmp_path), *options]) == 2
    assert capfd.readouterr().err == f"linrope: {cause}\n"


def test_tokens_that_are_not_bytes_require_a_tokenizer(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    LanguageModel(LanguageModelConfig(300, embed_dim=16, num_layers=1, num_heads=2)).save(tmp_path)
    assert run(["generate", "--checkpoint", str(tmp_path)]) == 2
    printed = capfd.readouterr()
    assert printed.out == ""
    assert (
        printed.err == f"linrope: {tmp_path}: has no tokenizer; expected one, or vocab_size=256 for bytes\n"
    )


def test_only_names_of_options_are_rewritten() -> None:
    error = ValueError("embed_dim=4: runs/steps=3 'steps=3' vocab_size=9 and num_heads=2")
    rewritten = "--embed-dim=4: runs/steps=3 'steps=3' vocab_size=9 and --heads=2"
    assert _in_words_of_the_command(error, ["train", "x"]) == rewritten
    assert _in_words_of_the_command(error, ["env"]) == str(error)
    absent = OSError("tokenizer='x': there is no such folder")
    assert _in_words_of_the_command(absent, ["train"]) == f"--{absent}"


def test_ctrl_c_saves_and_resume_goes_on(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = [sys.executable, "-m", "linrope.cli", "train", str(text), "--out", str(out), *SMALL]
    command += ["--steps", "100000", "--save-every", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ)
    end = time.monotonic() + 120
    while not checkpoints(out) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130
    assert b"checkpoint: " in output
    metadata = json.loads((checkpoints(out)[-1] / "config.json").read_text())
    assert metadata["embed_dim"] == 32


def test_env_prints_lines_or_json(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["env"]) == 0
    assert "backend eager     yes\n" in capfd.readouterr().out
    assert run(["env", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["backends"]["eager"] is None


def test_without_a_command_the_help_is_printed_as_it_is(capfd: pytest.CaptureFixture[str]) -> None:
    assert run([]) == 0
    text = capfd.readouterr().out
    assert run(["--help"]) == 0
    assert text == capfd.readouterr().out
    assert not re.search(r"\w\.\.\.", text)  # no description is cut off
    for command in ("train", "generate", "eval", "bench", "convert", "env", "demo"):
        assert re.search(rf"^  {command} +\S.*\.$", text, re.MULTILINE)


def test_version_and_python_m(capfd: pytest.CaptureFixture[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "linrope", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"linrope {linrope.__version__}\n")
    assert run(["--version"]) == 0
    assert capfd.readouterr().out == done.stdout


def test_an_error_that_is_not_the_input_s_exits_1_and_leads_to_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(**_: object) -> None:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr("linrope.cli.app.show_versions", broken)
    assert run(["env"]) == 1
    message = "linrope: RuntimeError: no such kernel (linrope --traceback .. shows where)\n"
    assert capfd.readouterr().err == message
    for arguments in (["--traceback", "env"], ["env", "--traceback"]):
        with pytest.raises(RuntimeError, match="no such kernel"):
            run(arguments)
    with pytest.raises(ValueError, match="--prompt"):
        run(["generate", "--checkpoint", "a", "--prompt", "", "--traceback"])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux's OpenMP")
@pytest.mark.parametrize(
    ("command", "variable", "anew"),
    [("train", None, True), ("bench", None, False), ("train", "OMP_NUM_THREADS", False)],
)
def test_commands_that_train_let_waiting_threads_sleep(
    command: str, variable: str | None, anew: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Spinning ones took five times as long on a machine that others use.
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    started: list[str] = []

    def execve(path: str, arguments: list[str], environment: dict[str, str]) -> None:
        started.append(environment["OMP_WAIT_POLICY"])

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(sys, "argv", ["linrope", command, "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert started == (["passive"] if anew else [])
