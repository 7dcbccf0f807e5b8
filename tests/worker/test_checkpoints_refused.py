"""Bad checkpoints: refused before anything is touched, with everything that is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.worker.saved import DATA, PlainState, resume, rewrite_manifest, save, step_in
from worker.checkpoints.errors import CheckpointError
from worker.checkpoints.storage import find_checkpoints, newest_complete

FILE = "rank-00000.safetensors"


def _refused(**arguments: Any) -> str:
    """Return why a resume is refused, having checked that it changed nothing."""
    state = arguments.pop("state", None) or PlainState()
    state.fill(0.5)
    with pytest.raises(CheckpointError) as caught:
        resume(arguments.pop("directory", None), state, **arguments)
    assert all(torch.equal(t, torch.full_like(t, 0.5)) for t in state.tensors.values()), "something was loaded"
    return str(caught.value)


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "a byte of a tensor": (lambda path: _flip(path / FILE, -1), "does not have the hash"),
    "a byte of the header": (lambda path: _flip(path / FILE, 12), "does not have the hash"),
    "a byte of the manifest": (lambda path: _flip(path / "manifest.json", 200), "manifest"),
    "a file cut short": (lambda path: (path / FILE).write_bytes((path / FILE).read_bytes()[:-7]), "the manifest says"),
    "an empty manifest": (lambda path: (path / "manifest.json").write_bytes(b""), "cannot be read"),
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "no manifest"),
    "no file": (lambda path: (path / FILE).unlink(), FILE),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_found_and_passed_over(tmp_path: Path, damage: str) -> None:
    save(tmp_path, 1, 2)
    spoil, said = DAMAGE[damage]
    spoil(tmp_path / "step-00000002")
    assert said in _refused(explicit=tmp_path / "step-00000002")
    state = PlainState()
    assert resume(tmp_path, state) == 1
    assert torch.equal(state.tensors["weight", "matrix"], torch.ones(4, 3))
    shutil.rmtree(tmp_path / "step-00000001")
    assert "none that is sound" in _refused(directory=tmp_path), "to start anew would throw work away unasked"


def _set(path: str, value: object) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
        place: Any = body
        for part in way:
            place = place[part]
        place[last] = value

    return change


LIES: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another version": (_set("format_version", 7), "format version 7, this code reads version 1"),
    "a hole": (_set("tensors.0.parts.0.start", 2), "not its 12 elements, each once"),
    "a part too long": (_set("tensors.0.parts.0.stop", 13), "not its 12 elements, each once"),
    "a part twice": (lambda body: body["tensors"][0]["parts"].append(body["tensors"][0]["parts"][0]), "each once"),
    "a shape": (_set("tensors.0.shape", [5, 3]), "not its 15 elements"),
    "a dtype": (_set("tensors.0.dtype", "I32"), "has 12 F32 for weight of matrix, the manifest 12 I32"),
    "a dtype that there is not": (_set("tensors.0.dtype", "F31"), "unknown dtype F31"),
    "a file that there is not": (_set("tensors.0.parts.0.file", 3), "names a file that there is not"),
    "a file elsewhere": (_set("files.0.name", "../secret"), "cannot be read"),
    "a size": (_set("files.0.num_bytes", 5), "the manifest says 5"),
    "a name twice": (lambda body: body["tensors"].append(body["tensors"][0]), "stands twice"),
    "another name": (_set("tensors.0.names", ["other"]), "has nothing for weight of other"),
    "no tensors": (lambda body: body.pop("tensors"), "cannot be read"),
    "a negative step": (_set("step", -1), "cannot be read"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies(tmp_path: Path, lie: str) -> None:
    """With a hash of its own that is right: only what it says can give it away."""
    save(tmp_path, 1)
    change, said = LIES[lie]
    rewrite_manifest(tmp_path / "step-00000001", change)
    assert said in _refused(explicit=tmp_path / "step-00000001")


def test_nothing_there(tmp_path: Path) -> None:
    assert newest_complete(tmp_path / "absent") is None and find_checkpoints(tmp_path / "absent") == ([], [])
    assert resume(tmp_path / "absent", PlainState()) is None, "a first run has nothing to continue"
    assert "there is nothing at" in _refused(explicit=tmp_path / "absent")
    assert "holds no complete one" in _refused(explicit=tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "which model.path takes" in _refused(explicit=tmp_path)


def test_another_model_is_refused_with_every_difference(tmp_path: Path) -> None:
    save(tmp_path, 3)
    other = PlainState(names={"matrix": "muon", "scale": "adamw"}, rows=5)
    other.tensors["momentum_buffer", "matrix"] = other.tensors["momentum_buffer", "matrix"].bfloat16()
    data = DATA.model_copy(update={"fingerprint": "other", "global_batch": 6})
    said = _refused(directory=tmp_path, state=other, data=data, steps=2)
    for line in (
        "weight of matrix has shape (4, 3), the job's (5, 3)",
        "momentum_buffer of matrix is F32, the job's BF16",
        "missing weight of scale",
        "unexpected weight of bias",
        "route of bias was adamw and is frozen",
        "route of scale was frozen and is adamw",
        "fingerprint of the text was text and is other",
        "global_batch was 12 and is 6",
        "training.steps: 3 are done, the job has 2",
    ):
        assert line in said, f"{line!r} is not in\n{said}"


def test_a_changed_route_needs_a_word(tmp_path: Path) -> None:
    """AdamW's moments mean the same wherever they are kept; what Muon keeps means nothing to AdamW."""
    save(tmp_path, 3)
    moved = {"matrix": "muon", "bias": "sharded_adamw"}
    assert "route of bias was adamw and is sharded_adamw" in _refused(directory=tmp_path, state=PlainState(names=moved))
    kept, cold = PlainState(names=moved), PlainState(names=moved)
    assert resume(tmp_path, kept, policy="keep") == resume(tmp_path, cold, policy="cold") == 3
    assert torch.equal(kept.tensors["exp_avg", "bias"], torch.full((3,), 3.0))
    assert torch.equal(cold.tensors["exp_avg", "bias"], torch.zeros(3))
    for state in (kept, cold):
        assert torch.equal(state.tensors["weight", "bias"], torch.full((3,), 3.0))
        assert torch.equal(state.tensors["momentum_buffer", "matrix"], torch.full((4, 3), 3.0))
    other = {"matrix": "adamw", "bias": "adamw"}
    assert "checkpoint.on_route_change" in _refused(directory=tmp_path, state=PlainState(names=other))
    changed = PlainState(names=other)
    assert resume(tmp_path, changed, policy="keep") == 3
    assert torch.equal(changed.tensors["weight", "matrix"], torch.full((4, 3), 3.0))
    assert torch.equal(changed.tensors["exp_avg", "matrix"], torch.zeros(4, 3)), "muon kept no moments"


def test_one_directory_is_a_whole_checkpoint(tmp_path: Path) -> None:
    save(tmp_path / "run", 2, 4)
    shutil.copytree(tmp_path / "run" / "step-00000002", tmp_path / "elsewhere")
    shutil.rmtree(tmp_path / "run")
    assert step_in(tmp_path / "elsewhere") == 2
    state = PlainState()
    assert resume(None, state, explicit=tmp_path / "elsewhere") == 2
    assert all(torch.equal(t, torch.full_like(t, 2.0)) for t in state.tensors.values())


def test_a_directory_of_checkpoints_names_its_newest(tmp_path: Path) -> None:
    save(tmp_path / "run", 2, 4)
    assert resume(None, PlainState(), explicit=tmp_path / "run") == 4


def test_the_files_open_with_any_reader_of_safetensors(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    save(tmp_path, 5)
    found = load_file(tmp_path / "step-00000005" / FILE)
    assert torch.equal(found["momentum_buffer:matrix@0"], torch.full((12,), 5.0))
    manifest = json.loads(json.loads((tmp_path / "step-00000005" / "manifest.json").read_text())["manifest"])
    assert manifest["data"]["samples"] == 60
    assert manifest["kernels"]["launched"] == [{"kernel": "cublas", "algorithm": "gram", "launches": 6, "matrices": 2}]
