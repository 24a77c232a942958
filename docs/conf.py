"""How scripts/docs builds these pages, which GitHub shows as they are."""

import ast
import builtins
import re
import sys
import typing
from pathlib import Path
from typing import Any

project = "tfdist_ext"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["README.md"]  # the list of pages that GitHub shows

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["narrow.css"]
html_search_scorer = str(Path(__file__).with_name("_static") / "scorer.js")
html_title = project
html_copy_source = False
html_show_copyright = False

myst_heading_anchors = 4  # of the links to headings
smartquotes = False  # "GPU:0" is to be copied
default_role = "literal"  # docstrings have `names` as Markdown has them
autodoc_preserve_defaults = True
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


def is_type(text: str) -> bool:
    """Whether a text is a type: an expression of builtins, of typing and of dotted names."""
    try:
        names = [node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)]
    except SyntaxError:
        return False
    return all(
        hasattr(builtins, name) or hasattr(typing, name) or name in sys.modules for name in names
    )


def prose_in_types(lines: list[str]) -> list[str]:
    """Fields for types that hold prose: napoleon takes what is before a colon for a type."""
    fields = (re.match(r"\s*:(?:r|var)?type\b[^:]*: (.*)", line) for line in lines)
    return [field[1] for field in fields if field and not is_type(field[1])]


def check_types(app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    from sphinx.util.logging import getLogger

    for text in prose_in_types(lines):
        getLogger(__name__).warning(
            "%s: %r is taken for a type. Begin the section without a colon.", name, text
        )


def nest_examples(app: Any, page: str, source: list[str]) -> None:
    """Put the examples of a page's last section, "Examples", below the page in the sidebar."""
    section = source[0].partition("\n## Examples\n")[2]
    if names := re.findall(r"\((examples/\w+)\.md\)", section):
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(names) + "\n```\n"


def mark_columns(app: Any, tree: Any) -> None:
    """Give text in columns a class, with which it scrolls instead of wrapping."""
    from docutils import nodes

    for block in tree.findall(nodes.literal_block):
        text = block.astext()
        in_columns = len(re.findall(r"^.*\S\S {2,}[^\s#]", text, re.MULTILINE)) > 1
        if block.get("language") == "text" and in_columns:
            block["classes"].append("columns")


def skip_alias(app: Any, what: str, name: str, obj: Any, skip: bool, options: Any) -> bool | None:
    """Leave out the fields of named tuples, which the docstring of the class describes."""
    return True if type(obj).__name__ == "_tuplegetter" else None


def setup(app: Any) -> None:
    app.connect("autodoc-skip-member", skip_alias)
    app.connect("doctree-read", mark_columns)
    app.connect("source-read", nest_examples)
    app.connect("autodoc-process-docstring", check_types, priority=900)  # after napoleon
    app.connect("autodoc-process-docstring", mark_code, priority=400)  # before napoleon
