"""What a package index shows: the README with links that lead somewhere, and the addresses of the project."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from lora_parallel import __version__

tomllib = pytest.importorskip("tomllib")  # Python 3.11
ROOT = Path(__file__).parent.parent
REPOSITORY = "https://example.org/someone/project"


@pytest.fixture(scope="module")
def release():
    spec = importlib.util.spec_from_file_location("prepare", ROOT / "tools" / "release" / "prepare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_lead_to_files_of_the_repository(release):
    text = release.absolute_links((ROOT / "README.md").read_text(), REPOSITORY, "v1")
    targets = re.findall(r"\]\((\S+?)\)", text)
    files = [target.removeprefix(f"{REPOSITORY}/").split("/", 2)[2] for target in targets if REPOSITORY in target]
    assert len(files) > 20
    for file in files:
        assert (ROOT / file.partition("#")[0]).exists(), file
    assert f"({REPOSITORY}/raw/v1/docs/assets/mesh.svg)" in text
    assert all(target.startswith(("https://", "#")) for target in targets)


@pytest.mark.parametrize(
    "left", ["[a page]: docs/engine.md", '<img src="docs/assets/mesh.svg">', "[x](<docs/engine.md>)"]
)
def test_a_relative_link_that_is_left_is_an_error(release, left):
    with pytest.raises(ValueError, match=r"docs/\S+"):
        release.absolute_links(left, REPOSITORY, "v1")


def test_the_copy(release, tmp_path):
    release.main(f"{REPOSITORY}/", str(tmp_path / "source"))
    project = tomllib.loads((tmp_path / "source" / "pyproject.toml").read_text())["project"]
    assert project["urls"]["Repository"] == REPOSITORY
    assert f"v{__version__}" in project["urls"]["Changelog"]
    assert REPOSITORY in (tmp_path / "source" / "README.md").read_text()
    assert (tmp_path / "source" / "lora_parallel" / "py.typed").exists()
    assert not (tmp_path / "source" / ".git").exists()


def test_an_address_is_asked_for(release, tmp_path):
    with pytest.raises(SystemExit, match="REPOSITORY="):
        release.main("someone/project", str(tmp_path / "source"))


def test_no_address_is_in_the_project():
    """An address that nobody owns would be on every page of the index."""
    assert "urls" not in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_oldest_versions_are_the_lower_bounds():
    """`make compat` tests those that pip is told to accept."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    lines = (ROOT / "tools" / "constraints" / "oldest.txt").read_text().splitlines()
    bounds = [each.partition(",")[0].replace(">=", "==") for each in wanted if ">=" in each]
    assert [line for line in lines if not line.startswith("#")] == bounds
