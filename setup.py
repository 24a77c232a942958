"""Builds the package; its metadata and the settings of tools live in pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPages(build_py):
    """Puts docs/ into the package, because error messages name its pages."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree("docs", str(Path(self.build_lib) / "tfdist_ext" / "docs"))


# In pyproject.toml, the license has one form before setuptools 77, and another one since then.
setup(license="Apache-2.0", cmdclass={"build_py": BuildWithPages})
