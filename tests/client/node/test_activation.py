import shutil
from dataclasses import replace
from pathlib import Path

from knnper.client.flower_node import Activation, locked


def _of(state: Path) -> Activation:
    with locked(state) as lock:
        return Activation.of(state, lock)


def test_a_node_that_did_not_leave_is_known(tmp_path: Path) -> None:
    assert _of(tmp_path).left_behind() is None
    _of(tmp_path).note(2**63 + 1)
    assert _of(tmp_path).left_behind() == 2**63 + 1
    _of(tmp_path).forget()
    assert _of(tmp_path).left_behind() is None


def test_a_copy_of_the_folder_does_not_put_out_the_original(tmp_path: Path) -> None:
    _of(tmp_path / "original").note(1)
    shutil.copytree(tmp_path / "original", tmp_path / "copy")
    assert _of(tmp_path / "copy").left_behind() is None
    on_another_machine = replace(_of(tmp_path / "original"), place="another:1")
    assert on_another_machine.left_behind() is None


def test_a_torn_note_is_none(tmp_path: Path) -> None:
    (tmp_path / "node.json").write_text('{"node_id": ')
    assert _of(tmp_path).left_behind() is None
