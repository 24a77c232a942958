"""The pages of the documentation, and the blocks of code on them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CONTRIBUTING.md"] + sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
)


@dataclass(frozen=True)
class Block:
    """A block of code: "```python train.py" has a language and a file that it is written to."""

    where: str
    language: str
    file: str
    text: str

    @property
    def program(self) -> str:
        """What it stands for: of a diff the new side."""
        return side(self.text, "+") if self.language == "diff" else self.text

    @property
    def sessions(self) -> Iterator[tuple[str, list[str]]]:
        """The commands of a console block, without comments, and the lines that each prints."""
        for part in re.split(r"^\$ ", self.text.replace("\\\n", " "), flags=re.M)[1:]:
            command, *lines = part.splitlines()
            yield re.sub(r"\s+", " ", command.split(" # ")[0]).strip(), lines


def side(diff: str, sign: str) -> str:
    """One side of a diff, "-" or "+"."""
    lines = diff.splitlines(keepends=True)
    return "".join(line[1:] or "\n" for line in lines if line[0] in f"{sign} \n")


def blocks_of(page: str) -> list[Block]:
    """All blocks of a page, in their order; those by indentation have no language."""
    found = []
    for token in MarkdownIt().parse((ROOT / page).read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            language, _, file = token.info.strip().partition(" ")
            assert token.map is not None
            where = f"{page}:{token.map[0] + 1}"
            found.append(Block(where, language, file.strip(), token.content))
    return found


def commands_of(page: str) -> list[tuple[str, list[str]]]:
    """All commands of a page, with the lines that each prints."""
    blocks = [block for block in blocks_of(page) if block.language == "console"]
    return [session for block in blocks for session in block.sessions]
