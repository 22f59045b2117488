"""Where the test servers come from."""

import base64
import hashlib
from pathlib import Path

import pytest

from tests.servers import npm


def test_an_archive_with_another_hash_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "package.tgz"
    archive.write_bytes(b"content")
    right = f"sha512-{base64.b64encode(hashlib.sha512(b'content').digest()).decode()}"
    npm.verify(archive, right)
    archive.write_bytes(b"content!")
    with pytest.raises(RuntimeError, match="not what was pinned"):
        npm.verify(archive, right)


def test_what_was_fetched_once_is_not_fetched_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(npm.VARIABLE, str(tmp_path))
    package = npm.Package("@scope/name", "1.0.0", "sha512-x")
    assert package.directory.parent == tmp_path
    assert package.directory != npm.Package("@scope/name", "1.0.0", "sha512-y").directory
    package.directory.mkdir()
    monkeypatch.setenv("PATH", "")  # so that npm could not be found
    assert npm.fetched(package) == package.directory


def test_a_missing_npm_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(npm.VARIABLE, str(tmp_path))
    monkeypatch.setenv("PATH", "")
    with pytest.raises(RuntimeError, match="apt install npm"):
        npm.fetched(npm.Package("@scope/name", "1.0.0", "sha512-x"))
    assert list(tmp_path.iterdir()) == []
