"""What is said about this machine."""

import json
import re
import sys
from types import ModuleType

import pytest
import torch

import linrope
from linrope import backends
from linrope.versions import show_versions, versions


def test_every_backend_is_told_and_two_run_everywhere() -> None:
    found = versions()
    assert list(found["backends"]) == [name for name in backends.NAMES if name != "auto"]
    for name in ("reference", "eager"):
        assert found["backends"][name] == {"available": True, "reason": None}
    assert found["linrope"] == linrope.__version__
    assert found["torch"] == torch.__version__
    assert found["threads"] == torch.get_num_threads()


@pytest.mark.parametrize(
    ("why_not", "sets", "line"),
    [
        (None, (["v3", "baseline"], "baseline"), "instruction set   baseline, of v3, baseline\n"),
        ("no library in linrope/lib", ([], None), "backend native    no: no library in linrope/lib\n"),
    ],
)
def test_the_instruction_set_in_use_or_why_none_is_is_told(why_not, sets, line, monkeypatch, capsys) -> None:
    module = ModuleType("linrope.backends.native")
    module.why_not = lambda: why_not
    module.instruction_sets, module.instruction_set = lambda: ["v3", "baseline"], lambda: "baseline"
    monkeypatch.setitem(backends.MODULES, "native", module)
    found = versions()
    assert found["backends"]["native"] == {"available": why_not is None, "reason": why_not}
    assert (found["instruction_sets"], found["instruction_set"]) == sets
    show_versions()
    assert line in capsys.readouterr().out


def test_a_backend_that_cannot_be_imported_is_told_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(backends, "triton", raising=False)
    monkeypatch.setitem(sys.modules, "linrope.backends.triton", None)
    assert "linrope.backends.triton" in versions()["backends"]["triton"]["reason"]


@pytest.mark.parametrize(
    ("devices", "capability", "reason"),
    [
        (0, (0, 0), "PyTorch sees no CUDA device"),
        (2, (7, 5), "no GPU here has compute capability 8.0 or more"),
        (2, (9, 0), None),
    ],
)
def test_gpus_are_named_and_triton_asks_for_one(devices, capability, reason, monkeypatch, capsys) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    show_versions()
    named = re.findall(r"^GPU {15}(.*)$", capsys.readouterr().out, re.MULTILINE)
    can = "compute capability {}.{}".format(*capability)
    assert named == ([f"GPU {index}, {can}" for index in range(devices)] or ["none"])
    pytest.importorskip("triton")
    from linrope.backends import triton

    monkeypatch.setattr(triton, "INTERPRETED", False)
    assert versions()["backends"]["triton"] == {"available": reason is None, "reason": reason}


def test_the_json_holds_what_versions_returns(capsys: pytest.CaptureFixture[str]) -> None:
    show_versions(as_json=True)
    assert json.loads(capsys.readouterr().out) == versions()


@pytest.mark.parametrize("reason", [None, "Triton has another way to look at arguments"])
def test_slow_launches_are_told(reason, monkeypatch, capsys) -> None:
    module = ModuleType("linrope.backends.triton")
    module.why_not, module.why_slow_launches = lambda: None, lambda: reason
    monkeypatch.setattr(backends, "load", lambda name: module if name == "triton" else "absent")
    assert versions()["slow_launches"] == reason
    show_versions()
    line = f"slow launches     {reason}\n"
    assert (line in capsys.readouterr().out) == (reason is not None)
