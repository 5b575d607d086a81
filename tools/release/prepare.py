"""Copy the project for a release, with links that work on a package index.

    python tools/release/prepare.py https://github.com/someone/lightning-lora build/source

The README links to files beside it. A package index shows the README without these files, so the copy's links lead to
the repository instead, at the tag of this version ("v0.2.0"), and its pyproject.toml names the repository under
[project.urls]. The address is given here, and nowhere in the project: a fork gives its own. Files are at
ADDRESS/blob/TAG/FILE and pictures at ADDRESS/raw/TAG/FILE, as on GitHub.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".*", "build", "dist", "site", "outputs", "__pycache__", "*.egg-info", "lightning_logs", "checkpoints")
_LINK = re.compile(r"(!?)(\[(?:[^\[\]]|\[[^\[\]]*\])*\])\(([^()<\s][^()\s]*)\)")
_OTHER_FORMS = re.compile(r"""^\[[^\]]+\]:\s*(\S+)|\b(?:src|href)=["']([^"']+)|\]\(<([^>]+)>""", re.M)


def absolute_links(text: str, repository: str, tag: str) -> str:
    """Return Markdown whose relative links lead to the repository at `tag`.

    Raises:
        ValueError: A relative link has a form that is not rewritten.
    """

    def rewrite(found: re.Match[str]) -> str:
        picture, label, target = found.groups()
        if _is_absolute(target):
            return found[0]
        return f"{picture}{label}({repository}/{'raw' if picture else 'blob'}/{tag}/{target})"

    written = _LINK.sub(rewrite, text)
    targets = [found[3] for found in _LINK.finditer(written)]
    targets += [found[1] or found[2] or found[3] for found in _OTHER_FORMS.finditer(written)]
    relative = [target for target in targets if not _is_absolute(target)]
    if relative:
        raise ValueError(f"README.md has relative links that a package index cannot follow: {', '.join(relative)}.")
    return written


def _is_absolute(target: str) -> bool:
    return target.startswith(("https://", "http://", "mailto:", "#"))


def project_urls(repository: str, tag: str) -> str:
    """Return the lines of pyproject.toml that name the repository."""
    return (
        "\n[project.urls]\n"
        f'Repository = "{repository}"\n'
        f'Documentation = "{repository}/blob/{tag}/docs/index.md"\n'
        f'Changelog = "{repository}/blob/{tag}/CHANGELOG.md"\n'
        f'Issues = "{repository}/issues"\n'
    )


def main(repository: str, target: str) -> None:
    """Copy the project to `target`, for the repository at this address."""
    if not re.fullmatch(r"https://[^\s/]+/\S+", repository):
        sys.exit(f"REPOSITORY={repository}: give an address such as https://github.com/someone/lightning-lora.")
    repository = repository.rstrip("/")
    version = re.search(r'^__version__ = "(.+)"$', (ROOT / "lora_parallel" / "__init__.py").read_text(), re.M)
    assert version is not None
    tag, source = f"v{version[1]}", Path(target)
    shutil.copytree(ROOT, source, ignore=shutil.ignore_patterns(*LEFT_OUT))
    readme, project = source / "README.md", source / "pyproject.toml"
    readme.write_text(absolute_links(readme.read_text(), repository, tag))
    project.write_text(project.read_text() + project_urls(repository, tag))


if __name__ == "__main__":
    main(*sys.argv[1:])
