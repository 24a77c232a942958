"""docs/one_machine.md says what really happens: its sessions are run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from pages import commands_of

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "one_machine.md").read_text(encoding="utf-8")
(SCRIPT,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
SESSIONS = [
    (command.removeprefix("tfdist "), "\n".join(lines))
    for command, lines in commands_of("docs/one_machine.md")
    if "--dry-run" in command or "--log-dir" in command
]

pytestmark = pytest.mark.timeout(25)


def normal(text):
    text = re.sub(r"after \d+\.\d s", "after N s", text)
    text = re.sub(r"(worker:\d) \d{2,}", r"\1 PID", text)
    text = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:PORT", text)
    return sorted(text.splitlines())  # the tasks' lines come in any order


@pytest.mark.parametrize(("words", "output"), SESSIONS)
def test_sessions_on_the_page_are_real(mark, tmp_path, words, output):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "tfdist_ext.cli", *shlex.split(words)],
        cwd=tmp_path,
        env=mark.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=20,
    )
    assert normal(done.stdout) == normal(output)
