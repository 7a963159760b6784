"""When a command refuses options, its message names these options and not Python's arguments."""

import re
from itertools import combinations

import pytest

from linrope import feature_maps
from linrope.cli.app import _command, run
from linrope.cli.layer_flags import FLAGS
from linrope.cli.option_words import in_option_words
from tests.cli.commands import SMALL

COMMANDS = ("train", "convert")
# Names and values of Python, but for those of options: True, feature_map, {'name': .., UnitMap(16
PYTHON = re.compile(r"\b(True|False|None)\b|[{\[]'|\w\(|(?<![\w./-])[a-z]+_[a-z_]+")
SIGNED = ("identity", "silu", "unit")
OTHERS = {
    "train": [
        "--attention softmax", "--heads 3", "--pieces 2",
    ],
    "convert": ["--rope-order after", "--keep-softmax 0", "--match-steps 0"],
}  # fmt: skip


def choices(command: str) -> list[str]:
    """Each option of the attention with each value, and some other options of the command."""
    chosen = list(OTHERS[command])
    parameters = {x.name: x for x in _command().commands[command].params}
    for name, flag in FLAGS.items():
        if name not in parameters:
            continue
        options = [*parameters[name].opts, *parameters[name].secondary_opts]
        if flag is bool:
            chosen += options
        else:
            values = (
                feature_maps.NAMES if name == "feature_map" else (0, 2) if flag is int else (*flag, "none")
            )
            chosen += [f"{options[0]} {value}" for value in values]
    return chosen


def line(command: str, options: tuple[str, ...], folder: str) -> list[str]:
    start = f"train {SMALL}" if command == "train" else f"convert {folder} --finetune none"
    return f"{start} --out {folder}/new {' '.join(options)}".split()


@pytest.mark.long
@pytest.mark.usefixtures("only_the_model")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_refusal_of_a_pair_of_options_has_words_of_python(command: str, tmp_path, capfd) -> None:
    options = choices(command)
    pairs = [pair for pair in combinations(options, 2) if pair[0].split()[0] != pair[1].split()[0]]
    refused = 0
    for pair in [*((x,) for x in options), *pairs]:
        status = run(line(command, pair, str(tmp_path)))
        message = capfd.readouterr().err
        assert status in (0, 2), (pair, message)
        assert not status or message.startswith("linrope: --"), (pair, message)
        assert not PYTHON.search(message), (pair, message)
        refused += status == 2
    assert refused > len(pairs) // 20


REFUSED = {
    "train --write-gate tied --decay spread": "--write-gate='tied': expected --forget-gate with it, or none",
    "train --write-gate tied --erase-gate tied": "--write-gate='tied': expected none with --erase-gate='tied', "
    "which writes too",
    "train --attention softmax --rotary selective": "--rotary=selective: softmax attention has no selective "
    "rotation; expected interleaved, half or none, or --attention=linear",
    "train --erase-gate none --feature-map silu": "--feature-map=silu: its features have both signs, "
    f"expected one of {', '.join(x for x in feature_maps.NAMES if x not in SIGNED)}",
    "convert --erase-gate tied --feature-map relu": "--feature-map='relu': with --erase-gate keys must have length "
    "1, or the state grows without bound; expected 'unit', which may have an activation",
    "convert --erase-gate tied --feature-map favor+": "--feature-map='favor+': its features have scales, which "
    "mean nothing with --erase-gate; expected 'unit'",
    "convert --short-conv 1": "--short-conv=1: expected the number of taps, 2 .. 65536, or 0",
}


@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=REFUSED)
@pytest.mark.usefixtures("only_the_model")
def test_a_refusal_of_the_layer_is_one_of_options(command: str, message: str, tmp_path, capfd) -> None:
    name, *options = command.split()
    assert run(line(name, tuple(options), str(tmp_path))) == 2
    assert capfd.readouterr().err == f"linrope: {message}\n"


@pytest.mark.usefixtures("only_the_model")
def test_options_that_fit_are_not_refused(tmp_path, capfd) -> None:
    options = ("--erase-gate", "none", "--feature-map", "relu")
    assert run(line("train", options, str(tmp_path))) == 0, capfd.readouterr().err


def test_texts_and_paths_that_have_names_of_options_stay_as_they_are() -> None:
    parameters = _command().commands["train"].params
    message = (
        "runs/forget_gate/config.json: got 'None', expected qk_norm=True or bias=True, not the write_gate"
    )
    words = "runs/forget_gate/config.json: got 'None', expected --qk-norm, not the --write-gate"
    assert in_option_words(message, parameters) == words
    assert in_option_words("gate=False: got qk_norm=None", parameters) == "--no-gate: got --no-qk-norm"
    assert (
        in_option_words("steps=None: expected short_conv=None", parameters)
        == "--steps=None: expected --short-conv=0"
    )
    assert in_option_words(message, []) == message
