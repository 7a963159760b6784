import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from unittest.mock import Mock

import pytest
import typer

import linrope
from linrope.cli import main
from linrope.cli.app import _in_words_of_the_command
from linrope.cli.bench import ABSENT, bench_of
from linrope.cli.training import Log
from linrope.layer.options import DECAYS
from linrope.models.language_model_config import ATTENTION
from tests.cli.commands import last_config, metrics, tiny_model, word_tokenizer

COMMANDS = ("train", "generate", "eval", "plot", "bench", "convert", "env", "check", "demo")


def test_without_a_command_the_help_is_printed_as_it_is(run) -> None:
    text = run("")
    assert "Usage: " in text
    assert text == run("--help")
    assert not re.search(r"\w\.\.\.", text)  # no description is cut off
    assert all(re.search(rf"^  {command} +\S.*\.$", text, re.MULTILINE) for command in COMMANDS)


def test_the_help_lists_all_names_that_an_option_takes(run) -> None:
    # The texts are written out, since the modules that define the names import PyTorch.
    names = {*ATTENTION, *DECAYS}
    assert names <= set(re.findall(r"[\w-]+", re.sub(r"-\s+", "-", run("train --help"))))


def test_bench_of_a_wheel_says_where_the_benchmarks_are(tmp_path) -> None:
    app = typer.Typer()
    app.command(context_settings=ABSENT)(bench_of(tmp_path))  # an installed wheel has no benchmarks beside it
    with pytest.raises(
        ValueError, match="bench: the benchmarks are not in the wheel; expected linrope installed"
    ):
        app(["--threads", "1", "--compare", "a", "b"], standalone_mode=False)


def test_h_is_help_and_types_have_no_names_of_python(run) -> None:
    for command in COMMANDS:
        text = run(f"{command} -h")
        assert "Usage: " in text
        assert text == run(f"{command} --help")
        assert not re.search(r"<|list\[|\bPath\b", text.partition("Options:")[2])
    assert "--checkpoint FOLDER  " in run("eval -h")


def imported(*arguments: str) -> str:
    """What Python says of the modules that the command imports, a line each."""
    command = [sys.executable, "-X", "importtime", "-m", "linrope", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False).stderr


@pytest.mark.parametrize(
    "line",
    [
        "train --stepz 1", "bench --help",
        *(pytest.param(x, marks=pytest.mark.long) for x in (f"{name} --help" for name in COMMANDS if name != "bench")),
    ],
)  # fmt: skip
def test_help_and_wrong_lines_do_not_wait_for_pytorch(line: str) -> None:
    found = imported(*line.split())
    assert "| linrope\n" in found
    assert not re.search(r"\| +torch$", found, re.MULTILINE)


def test_a_command_s_process_has_the_public_names_too() -> None:
    code = """import sys
sys.argv = ["linrope"]
import linrope
assert "torch" not in sys.modules and not hasattr(linrope, "Rotory")
from linrope import Rotary
found = {name: getattr(linrope, name) for name in linrope.__all__}
assert found["Rotary"] is Rotary
del sys.modules["linrope"], sys.argv[:]
import linrope
assert "Rotary" in vars(linrope)
assert found == {name: getattr(linrope, name) for name in linrope.__all__}"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_run_resumes_and_generates(run) -> None:
    assert "bits per byte after 4 steps" in run("train {text} --out {tmp}/run --steps 4 {small}")
    run("train --out {tmp}/run --resume")  # on the text of the checkpoint
    generate = "generate --checkpoint {tmp}/run --prompt 'To be' --max-new-tokens 9 --seed 1"
    generated = run(generate)
    assert generated.startswith("To be")
    assert generated == run(generate)


def test_metrics_of_every_step_and_tensorboard(run, tmp_path) -> None:
    pytest.importorskip("tensorboard")
    options = "--steps 5 --save-every 2 --tensorboard --warmup-steps 2 --pieces 3 {small}"
    run("train {text} --out {tmp}/run " + options)
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert [line["step"] for line in lines if "held_out_bits_per_byte" in line] == [2, 4, 5]
    assert {"bits_per_byte", "learning_rate", "gradient_norm", "seconds"} <= lines[0].keys()
    assert len(list((tmp_path / "run" / "tensorboard").iterdir())) == 1


def test_absent_tensorboard_is_named(refused, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    message = refused("train {text} --out {tmp}/run --tensorboard {small}")
    assert "tensorboard is missing; install linrope[train]" in message


def test_a_log_forgets_what_came_after_the_checkpoint(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n{"ste')
    log = Log(tmp_path, 2, tensorboard=False)
    log.write({"step": 3, "bits_per_byte": 2.5})
    log.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3, "bits_per_byte": 2.5}\n'


def test_a_line_without_a_step_is_named(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"note": "a new idea"}\n')
    with pytest.raises(ValueError, match=rf"{re.escape(str(path))}, line 2: got step None, expected"):
        Log(tmp_path, 2, tensorboard=False)


def test_a_tokenizer_stays_with_the_run(run, text, tmp_path) -> None:
    tokenizer = word_tokenizer(text)
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    run("train {text} --out {tmp}/run --tokenizer {tmp}/tokenizer --steps 3 {small}")
    assert last_config(tmp_path / "run")["vocab_size"] == len(tokenizer)
    (tmp_path / "tokenizer").rename(tmp_path / "elsewhere")
    run("train {text} --out {tmp}/run --resume")
    run("eval --checkpoint {tmp}/run --length 20")
    command = "generate --checkpoint {tmp}/run --prompt 'To be' --max-new-tokens 5 --seed 1"
    generated = run(command).split()
    assert generated[:2] == ["To", "be"]
    assert len(generated) == 7
    assert set(generated) <= set(tokenizer.get_vocab())


HUGE = "1" + "0" * 30
WRONG = {
    "dance": "dance",
    "env --xml": "--xml",
    "check --seconds nan": "--seconds=nan: expected at least 0",
    "demo --seconds -1": "--seconds=-1.0: expected a positive finite number",
    "demo --out {text}": "text.txt is a file, expected a folder",
    "eval --checkpoint {tmp}": "expected a folder with checkpoints",
    "eval --checkpoint {text}": "--checkpoint={text}: {text} is a file, expected a folder",
    "eval --checkpoint {tmp} --sequences 0": "--sequences=0",
    "eval --checkpoint {tmp} --out {text}": "text.txt is a file, expected a folder",
    "generate": "--checkpoint",
    "generate --checkpoint {tmp}": "expected a folder with checkpoints",
    "train absent.txt": "absent.txt: no such file or folder",
    "train --stepz 1": "--stepz",
    "train {text} --steps 0": "--steps=0: expected at least 1",
    "train {text} --save-every 0": "--save-every=0: expected at least 1",
    "train {text} --heads 5": "--embed-dim=128: expected a multiple of --heads=5",
    "train {text} --embed-dim 24": "--embed-dim=24, --heads=8: heads of 3, expected an even size",
    f"train {{text}} --embed-dim {2**30}": "not enough memory",
    "train {text} --feature-map performer": "did you mean 'favor+'",
    "train {text} --feature-map silu": "--feature-map=silu: its features have both signs, expected one of elu+1, ",
    "train {text} --erase-gate tied --feature-map elu+1": "--feature-map=elu+1: expected unit with --erase-gate",
    "train {text} --feature-map relu --attention softmax": "--feature-map: softmax attention has no feature map",
    "train {text} --rotary both": "expected one of interleaved, half, selective, none\n",
    "train {text} --attention square": "--attention='square'",
    "train {text} --decay sprad": "expected one of spread, learned, retnet, none; did you mean 'spread'?\n",
    "train {text} --forget-gate --attention softmax": "--forget-gate: softmax attention has no forget gate; leave",
    "train {text} --pieces 0": "--pieces=0",
    "train {text} --pieces 2 --attention softmax": "--pieces=2",
    "train {text} --gradients-through-pieces": "--gradients-through-pieces has no effect with --pieces=1",
    "train {text} --sequence-parallel 2 {small}": "--sequence-parallel=2, --tensor-parallel=1: expected",
    "train {text} --short-conv -4": "--short-conv=-4: expected the number of taps, 2 .. 65536",
    f"train {{text}} --short-conv {HUGE}": "--short-conv=1000",
    f"train {{text}} --seed {HUGE}": "--seed=1000",
    "train {text} --learning-rate 1e300": "--learning-rate=1e+300",
    "train {text} --device tpu9": "--device=tpu9",
    "train {text} --device meta": "--device=meta",
    "train {text} --config {tmp}/none": "{tmp}/none",
    "train {text} --config {tmp}": "{tmp}: Is a directory",
    "train {text} --out {text}": "text.txt is a file, expected a folder",
    "train {text} --out {text}/run --steps 1 {small}": "text.txt",
    "train {text} --out {tmp}/\udcff": r"\udcff': expected a path in UTF-8",
    "train {text} --out {tmp}/none --resume": "none: no such folder; expected that of a run, or no --resume",
} | ({} if find_spec("transformers") is None else {"train {text} --tokenizer {tmp}/none": "{tmp}/none"})


@pytest.mark.parametrize(("command", "cause"), WRONG.items(), ids=WRONG)
def test_wrong_input_exits_2_with_one_line(command: str, cause: str, refused, text, tmp_path) -> None:
    assert cause.format(text=text, tmp=tmp_path) in refused(command)


WRONG_TO_GENERATE = {
    "--max-new-tokens -1": "--max-new-tokens=-1: expected at least 0",
    "--temperature nan": "--temperature=nan: expected at least 0, and finite",
    "--top-k 0": "--top-k=0: expected at least 1",
    "--top-p 2": "--top-p=2.0: expected 0 to 1",
    f"--seed {HUGE}": f"--seed={HUGE}: expected an integer of 64 bits",
}


@pytest.mark.parametrize(("options", "cause"), WRONG_TO_GENERATE.items(), ids=WRONG_TO_GENERATE)
def test_wrong_options_of_generate_have_their_own_names(options: str, cause: str, refused, tmp_path) -> None:
    tiny_model().save(tmp_path)
    assert refused("generate --checkpoint {tmp} " + options) == f"linrope: {cause}\n"


def test_tokens_that_are_not_bytes_require_a_tokenizer(refused, tmp_path) -> None:
    tiny_model(300).save(tmp_path)
    message = f"linrope: {tmp_path}: has no tokenizer; expected one, or vocab_size=256 for bytes\n"
    assert refused("generate --checkpoint {tmp}") == message


def test_only_names_of_options_are_rewritten() -> None:
    error = ValueError("embed_dim=4: runs/steps=3 'steps=3' vocab_size=9 and num_heads=2")
    rewritten = "--embed-dim=4: runs/steps=3 'steps=3' vocab_size=9 and --heads=2"
    assert _in_words_of_the_command(error, ["train", "x"]) == rewritten
    assert _in_words_of_the_command(error, ["env"]) == str(error)
    absent = OSError("tokenizer='x': there is no such folder")
    assert _in_words_of_the_command(absent, ["train"]) == f"--{absent}"


def test_env_prints_lines_or_json(run) -> None:
    assert "backend eager     yes\n" in run("env")
    assert json.loads(run("env --json"))["backends"]["eager"]["available"] is True


def test_version_and_python_m(run) -> None:
    done = subprocess.run([sys.executable, "-m", "linrope", "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"linrope {linrope.__version__}\n")
    assert run("--version") == done.stdout


def test_an_error_that_is_not_the_input_s_exits_1_and_leads_to_its_traceback(run, monkeypatch) -> None:
    monkeypatch.setattr("linrope.versions.show_versions", Mock(side_effect=RuntimeError("no such kernel")))
    message = "linrope: RuntimeError: no such kernel (linrope --traceback .. shows where)\n"
    assert run("env", status=1) == message
    for command in ("--traceback env", "env --traceback"):
        with pytest.raises(RuntimeError, match="no such kernel"):
            run(command)
    with pytest.raises(ValueError, match="--prompt"):
        run("generate --checkpoint a --prompt '' --traceback")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="of Linux's OpenMP")
@pytest.mark.parametrize(
    ("command", "variable", "anew"),
    [("train", None, True), ("bench", None, False), ("train", "OMP_NUM_THREADS", False)],
)
def test_commands_that_train_let_waiting_threads_sleep(
    command: str, variable: str | None, anew: bool, monkeypatch
) -> None:
    # Spinning ones took five times as long on a machine that others use.
    for name in ("OMP_WAIT_POLICY", "OMP_NUM_THREADS", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "1")
    started: list[str] = []
    monkeypatch.setattr(os, "execve", lambda path, arguments, new: started.append(new["OMP_WAIT_POLICY"]))
    monkeypatch.setattr(sys, "argv", ["linrope", command, "--help"])
    with pytest.raises(SystemExit, match="0"):
        main()
    assert started == (["passive"] if anew else [])
