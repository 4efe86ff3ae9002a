from pathlib import Path

from knnper.data.site_data import place_of


def test_a_way_back_is_left_out(tmp_path: Path) -> None:
    base = tmp_path / "clients" / "cats"
    assert place_of(base, "../../shares/cat.npz") == tmp_path / "shares/cat.npz"
    assert place_of(base, "own.npz") == base / "own.npz"
    assert place_of(base, str(tmp_path / "own.npz")) == tmp_path / "own.npz"


def test_a_way_back_from_behind_a_link_stays(tmp_path: Path) -> None:
    (tmp_path / "disk" / "cats").mkdir(parents=True)
    base = tmp_path / "cats"
    base.symlink_to(tmp_path / "disk" / "cats")
    (tmp_path / "disk" / "own.npz").touch()
    assert place_of(base, "../own.npz").is_file()
