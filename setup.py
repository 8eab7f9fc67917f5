"""The package's description: README.md with links that work outside of the repository.

Everything else is in pyproject.toml. If it names a repository (`urls.Repository`), relative links point there.
Otherwise they become plain text, because a package index cannot resolve them.
"""

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def make_description(readme: str, repository: str | None) -> str:
    """Replace the relative links and pictures of a Markdown text.

    Args:
        readme: Text of README.md.
        repository: URL of the repository, or `None`.
    """
    link = r"(!?)\[([^\]]*)\]\((?!https?://)([^)]+)\)"
    if repository is None:
        return re.sub(link, lambda match: "" if match[1] else match[2], readme)
    folders = {"": "blob", "!": "raw"}
    return re.sub(
        link, lambda match: f"{match[1]}[{match[2]}]({repository}/{folders[match[1]]}/main/{match[3]})", readme
    )


if __name__ == "__main__":
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    setup(
        long_description=make_description(
            (ROOT / "README.md").read_text("utf-8"), project.get("urls", {}).get("Repository")
        ),
        long_description_content_type="text/markdown",
    )
