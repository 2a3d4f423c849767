"""Files on disk are used as they were written, or made anew: cut short, swapped, or open to other users."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from kdacompile import compat
from kdacompile.lowering.cpu import compiler
from kdacompile.store import disk

Damage = Callable[[Path, pytest.MonkeyPatch], None]


def cut_short(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def emptied(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.write_bytes(b"")


def changed(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def open_to_all(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o666)


def open_to_a_group(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.chmod(0o660)


def a_pipe(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody writes into it: who opens it to read waits."""
    path.unlink()
    os.mkfifo(path)


def anothers(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    user = os.stat(path).st_uid
    monkeypatch.setattr(disk.os, "getuid", lambda: user + 4321)
    monkeypatch.setattr(disk, "_may_be_anothers", lambda about, own=disk._may_be_anothers: about.st_uid == user or own)


def a_folder(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path.unlink()
    path.mkdir()


DAMAGES = [cut_short, emptied, changed, open_to_all, open_to_a_group, a_pipe, anothers]


@pytest.mark.parametrize("damage", [*DAMAGES, a_folder])
def test_a_text_is_read_as_it_was_written_or_not_at_all(
    damage: Damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "deep" / "text.json"
    assert disk.read_checked(path) is None
    assert not caplog.records  # there is none yet: nothing to say
    disk.write_checked(path, "q, k, v\nand a gate")
    assert disk.read_checked(path) == "q, k, v\nand a gate"
    damage(path, monkeypatch)
    assert disk.read_checked(path) is None
    assert "made anew" in caplog.text


def test_a_text_under_another_name_is_not_read(tmp_path: Path) -> None:
    for name in ("one.json", "other.json"):
        disk.write_checked(tmp_path / name, name)
    (tmp_path / "one.json").replace(tmp_path / "other.json")
    assert disk.read_checked(tmp_path / "other.json") is None


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_file_that_was_damaged_is_made_anew(
    damage: Damage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[Path] = []

    def make(path: Path) -> None:
        made.append(path)
        path.write_bytes(bytes(range(256)))

    path = tmp_path / "deep" / "library.so"
    for _ in range(2):
        assert disk.made_checked(path, make) == path
    assert len(made) == 1
    damage(path, monkeypatch)
    disk.made_checked(path, make)
    assert len(made) == 2
    assert path.read_bytes() == bytes(range(256))
    assert "made anew" in caplog.text


def test_a_file_without_its_hash_is_made_anew(tmp_path: Path) -> None:
    path = tmp_path / "library.so"
    path.write_bytes(b"of an earlier version")

    def make(path: Path) -> None:
        path.write_bytes(b"new")

    disk.made_checked(path, make)
    assert path.read_bytes() == b"new"


def test_nothing_half_written_is_left_where_writing_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(disk.os, "replace", full)
    disk.write_checked(tmp_path / "text.json", "q, k, v")
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_made_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Below a file nothing can be written: a compilation goes on, and keeps nothing."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "file" / "cache"))
    for _ in range(2):
        path = Path(compat.inductor_cache_dir(), "kdacompile", "text.json")
        disk.write_checked(path, "q, k, v")
        assert disk.read_checked(path) is None
    (told,) = caplog.records
    assert "set TORCHINDUCTOR_CACHE_DIR to a folder of your own" in told.message


def test_a_library_cut_short_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loading it would end the process."""
    monkeypatch.setattr(compat, "inductor_cache_dir", lambda: str(tmp_path))
    compiler.library.cache_clear()
    source = ("vectors.c", b"int64_t lanes(void) { return LANES; }", "operands.c")
    compiler.library(source, "float")
    (path,) = tmp_path.rglob("*.so")
    content = path.read_bytes()
    path.unlink()  # this process has it mapped
    path.write_bytes(content[: len(content) // 2])
    compiler.library.cache_clear()
    assert compiler.library(source, "float").lanes() > 0
    assert path.stat().st_size > len(content) // 2
