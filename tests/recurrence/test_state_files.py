"""The file of a LinearAttentionState: every bit of it, and no damaged or foreign one."""

import json
import pickle
import struct
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save_file

from linrope import LinearAttentionState
from linrope.common.files import digest
from tests.support.states import IDENTITY, B, D, E, G, assert_same, attend, some_state, tokens


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_save_and_load_keep_every_bit(dtype: torch.dtype, tmp_path) -> None:
    state = some_state().to(dtype=dtype)
    state.save(tmp_path / "new folder" / "state.safetensors")
    loaded = LinearAttentionState.load(str(tmp_path / "new folder" / "state.safetensors"))
    assert_same(loaded, state)
    assert torch.equal(attend(tokens(3, 1), loaded)[0], attend(tokens(3, 1), state)[0])


def test_save_takes_views_and_tensors_that_require_grad(tmp_path) -> None:
    state = attend([x.requires_grad_() for x in tokens(3)])[1]
    view = replace(state, kv=state.kv.mT.contiguous().mT)
    view.save(tmp_path / "state")
    assert_same(LinearAttentionState.load(tmp_path / "state"), state.detach())


def plain(**change) -> dict[str, torch.Tensor]:
    kv, z = torch.ones(B, G, D, E), torch.ones(B, G, D, dtype=torch.float64)
    return {"kv": kv, "z": z, "position": torch.zeros(B).long(), **change}


META = {"format": "linrope.LinearAttentionState", "version": "1", "identity": IDENTITY}


def written(path, content=None, **metadata) -> None:
    """A well-formed safetensors file, of whatever content, which its digest tells."""
    kept = {name: value for name, value in {**META, **metadata}.items() if value is not None}
    content = plain() if content is None else content
    save_file(content, path, metadata=kept | {"digest": digest(content, kept)})


def cut(path, size: int | None, more: bytes = b"") -> None:
    written(path)
    path.write_bytes(path.read_bytes()[:size] + more)


class Opened:
    """An object that fails the test when it is unpickled."""

    def __reduce__(self):
        return pytest.fail, ("a pickle was loaded",)


def overlapping(path) -> None:
    where = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
    header = json.dumps({"__metadata__": META, "kv": where, "z": where, "position": where}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)


DAMAGED = {
    "empty": lambda path: path.write_bytes(b""),
    "text": lambda path: path.write_text("not a state\n" * 9),
    "header too long": lambda path: path.write_bytes(struct.pack("<Q", 2**62) + b"{}"),
    "cut in the header": lambda path: cut(path, 40),
    "cut in the data": lambda path: cut(path, -1),
    "extra bytes": lambda path: cut(path, None, b"\0" * 8),
    "overlapping": overlapping,
    "pickle": lambda path: path.write_bytes(pickle.dumps(Opened())),
    "torch.save": lambda path: torch.save(plain(), path),
    "other keys": lambda path: written(path, {**plain(), "more": torch.ones(1)}),
    "missing key": lambda path: written(path, {"kv": torch.ones(1), "z": torch.ones(1)}),
    "shapes": lambda path: written(path, plain(z=torch.ones(B, G, D + 1))),
    "half precision": lambda path: written(path, plain(kv=torch.ones(B, G, D, E).bfloat16())),
    "integer sums": lambda path: written(path, plain(z=torch.ones(B, G, D).long())),
    "another format": lambda path: written(path, format="other"),
    "no format": lambda path: written(path, format=None),
    "newer": lambda path: written(path, version="2"),
    "no version": lambda path: written(path, version=None),
    "no identity": lambda path: written(path, identity=None),
}


SAID = {
    "newer": "version '2', expected '1'",
    "pickle": "not a readable safetensors file",
    "other keys": "got .*'more'.*, expected kv, z, position and an identity",
    "missing key": r"got \['kv', 'z'\], expected kv, z, position",
    "no identity": "expected kv, z, position and an identity",
    "shapes": "state: got kv .* expected",
    "half precision": "state.kv: got torch.bfloat16",
    "integer sums": "state.z: got torch.int64",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_load_refuses_damaged_and_foreign_files_and_names_them(name: str, tmp_path) -> None:
    path = tmp_path / "broken.safetensors"
    DAMAGED[name](path)
    with pytest.raises(ValueError, match=rf"broken\.safetensors: .*{SAID.get(name, '')}"):
        LinearAttentionState.load(path)


@pytest.mark.parametrize("name", ["missing", "."])
def test_load_of_a_missing_file_says_so(name: str, tmp_path) -> None:
    with pytest.raises(FileNotFoundError, match="no such file"):
        LinearAttentionState.load(tmp_path / name)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [({"kv": "text"}, TypeError, "state.kv: got str, expected Tensor"),
     ({"z": None}, TypeError, "state.z: got NoneType, expected Tensor"),
     ({"angle": [1.0]}, TypeError, "state.angle: got list, expected Tensor"),
     ({"identity": 3}, TypeError, "state.identity: got int, expected str"),
     ({"donated": None}, TypeError, "state.donated: got NoneType, expected bool"),
     ({"slots": torch.tensor([1, 1])}, ValueError, r"slots: got \[1, 1\], expected different rows 0 \.\. 2"),
     ({"slots": torch.tensor([B])}, ValueError, r"slots: got \[3\], expected different rows"),
     ({"loop": "text"}, ValueError, "state: got .*, loop; expected kv, z, position, identity, and otherwise"),
     ({"more": 1}, ValueError, "state: got .*, more; expected .*, and otherwise only angle, log_scale, .*")],
)  # fmt: skip
def test_torch_load_refuses_states_with_fields_of_other_kinds(change, error, message: str, tmp_path) -> None:
    state = some_state()
    fields = state.__getstate__() | change  # what another program may write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LinearAttentionState, "__getstate__", lambda _: fields)
        torch.save(state, tmp_path / "state.pt")
    with pytest.raises(error, match=message):
        torch.load(tmp_path / "state.pt", weights_only=True)


def test_an_interrupted_save_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch) -> None:
    path, old = tmp_path / "state", some_state()
    old.save(path)

    def interrupted(tensors, temporary, metadata) -> None:
        with open(temporary, "wb") as file:
            file.write(b"half a file")
        raise KeyboardInterrupt

    monkeypatch.setattr("linrope.common.files.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        some_state(9).save(path)
    assert_same(LinearAttentionState.load(path), old)
    assert list(tmp_path.iterdir()) == [path]
