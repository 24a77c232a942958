"""How scripts/docs builds these pages, which GitHub shows as they are."""

from typing import Any

project = "tfdist_ext"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["README.md"]  # index.md includes it

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_title = project
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4  # of the links to headings
smartquotes = False  # "GPU:0" is to be copied
default_role = "literal"  # docstrings have `names` as Markdown has them
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True  # the attributes that a docstring lists, beside the fields of a dataclass


def mark_code(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Indented paragraphs of a docstring are code, as in Markdown: mark them by `::`."""
    marked: list[str] = []
    before = ""
    for number, line in enumerate(lines):
        if number and not lines[number - 1] and _indent(line) >= _indent(before) + 4:
            marked += [" " * _indent(before) + "::", ""]
        marked.append(line)
        before = line or before
    lines[:] = marked


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def setup(app: Any) -> None:
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon
