"""Puts docs/ into the package, because error messages name its pages. See pyproject.toml."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithPages(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree("docs", str(Path(self.build_lib) / "tfdist_ext" / "docs"))


setup(cmdclass={"build_py": BuildWithPages})
