"""The code of each page runs: its Python as one program, then its commands; links lead somewhere.

A page that is new is run like the others; what is run elsewhere is in the tables.
"""

from __future__ import annotations

import ast
import functools
import itertools
import json
import os
import pkgutil
import re
import shlex
import signal
import subprocess
import sys
import time
import tomllib
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml
from pages import PAGES, ROOT, Block, blocks_of, commands_of, side
from warm_programs import Program, run_cluster, run_program

import tfdist_ext as tfd
from tfdist_ext import cli, testing

PYTHON, SHOWN = {"python", "diff"}, {"console", "text", "toml", "json", "yaml"}
FILES = {*PYTHON, "toml"}
BUILT = {ROOT / page for page in PAGES if page.startswith("docs/")} - {ROOT / "docs" / "README.md"}
FOR_SPHINX = {"{container}", "{toctree}", "{literalinclude}", "{eval-rst}", "{include}"}

# Pages whose Python is run by tests of their own, which ask for more.
PYTHON_BY = {
    "docs/configuration.md": "tests/strategies/test_configuration_page.py",
    "docs/notebooks.md": "tests/environments/test_notebook.py",
    "docs/one_machine.md": "tests/launcher/test_one_machine_page.py",
    "docs/ray.md": "tests/environments/test_ray.py",
    "docs/testing.md": "tests/testing/test_sample_project.py",
}

# What a page's Python takes as given.
MODEL_AND_DATA = """
import keras, numpy
x, y = numpy.zeros([128, 20]), numpy.zeros([128, 1])
def build():
    model = keras.Sequential([keras.Input([20]), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
"""
GIVEN = {"README.md": MODEL_AND_DATA, "docs/index.md": MODEL_AND_DATA}

# Pages whose commands need machines, which tests in tests/environments have.
COMMANDS_OF_PAGE_BY = {
    "docs/slurm.md": "tests/environments/test_slurm.py",
}

# What runs commands besides this file: scripts, and tests.
COMMANDS_BY = {
    ".ci/run": [
        "scripts/test",
        "scripts/environments",
        "scripts/demo",
        "scripts/compatibility --tenth",
        "scripts/docs",
        "scripts/chaos --fixed",
    ],
    ".github/workflows/ci.yml": ["scripts/coverage"],
    "scripts/test": ["scripts/check"],
    "tests/test_configs.py::test_config_trains": [
        "tfdist run --workers 2 -- python docs/examples/digits.py"
        " --config configs/digits_multi_worker.toml",
    ],
    "tests/test_configs.py::test_plain_keras_loads_models_of_configs": [
        "python docs/examples/check_saved_model.py runs/digits_multi_worker",
    ],
    "tests/launcher/test_one_machine_page.py::test_sessions_on_the_page_are_real": [
        "tfdist run --workers 2 --dry-run -- python train.py",
        "tfdist run --workers 2 --log-dir logs -- python train.py",
    ],
    "tests/test_docs.py::test_the_job_of_the_quickstart_survives_a_kill": [
        "tfdist run --workers 2 --max-restarts 3 -- python resume.py",
        "kill -9 4243",
    ],
    "tests/environments/test_ray.py::test_the_example": ["python docs/examples/ray_train.py"],
    "tests/environments/test_submitit.py::test_submitit": [
        "pip install submitit",
        "python docs/examples/submitit_train.py runs/line --epochs 20",
    ],
    "tests/cluster/test_environments.py::mpirun": [
        "mpirun -n 4 python train.py",
        'mpirun --host n1:2,n2:2 -x TFDIST_HOSTS="n1:2,n2:2" python train.py',
    ],
    "tests/cluster/test_environments.py::srun": [
        "srun --nodes=2 --ntasks-per-node=2 python train.py",
    ],
    "tests/testing/test_sample_project.py::test_the_sample_project_passes_on_the_installed_wheel": [
        "pip install /path/to/tfdist_ext",
        'pip install "/path/to/tfdist_ext[tensorboard,records]"',
    ],
}
ELSEWHERE = {".ci/run", *itertools.chain.from_iterable(COMMANDS_BY.values())}
EXAMPLE = re.compile(r"\bpython docs/examples/(\w+)\.py\b")  # each has a test that runs it
MEASURED = ".venv/bin/python benchmarks/"  # takes minutes: here its options are looked up


def is_run_here(command: str) -> bool:
    of_example = EXAMPLE.search(command)
    return not (command in ELSEWHERE or command.startswith(MEASURED) or of_example)


# Pages whose commands start clusters as those of other pages do.
CLUSTERS_AS_ELSEWHERE = {
    "docs/migrating.md",  # README.md, docs/quickstart.md
    "docs/placement.md",  # docs/parameter_servers.md
}


@pytest.mark.parametrize("page", PAGES)
def test_the_python_of_the_page_runs(page: str, tmp_path: Path) -> None:
    blocks = blocks_of(page)
    for block in blocks:
        if block.language in PYTHON and block.file:
            compile(block.program, block.where, "exec")
    if page not in PYTHON_BY:
        here = folder_of_the_page(tmp_path)
        program = [block for block in blocks if not block.file]
        _run_as_one_program(program, tmp_path, GIVEN.get(page, ""))
        if page == "README.md":
            assert (here / "model.keras").exists()


def folder_of_the_page(folder: Path) -> Path:
    """What the code of a page finds where it runs."""
    here = folder / "here"
    (here / "docs").mkdir(parents=True)
    for name in ("scripts", "configs", ".venv"):
        (here / name).symlink_to(sys.prefix if name == ".venv" else ROOT / name)
    (here / "docs" / "examples").symlink_to(ROOT / "docs" / "examples")
    return here


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.long if page in CLUSTERS_AS_ELSEWHERE else [])
        for page in PAGES
    ],
)
def test_the_commands_of_the_page_run(page: str, tmp_path: Path) -> None:
    if page in COMMANDS_OF_PAGE_BY:
        return
    blocks = blocks_of(page)
    here = folder_of_the_page(tmp_path)
    for block in reversed(blocks):  # a page may show a file's text after the first command
        if block.language in FILES and block.file:
            (here / block.file).write_text(block.program, encoding="utf-8")
    run = 0
    for block in blocks:
        if block.language in FILES and block.file:
            (here / block.file).write_text(block.program, encoding="utf-8")
        for command, lines in block.sessions if block.language == "console" else ():
            if is_run_here(command):
                folder = tmp_path / f"command_{run}"
                folder.mkdir()
                _compare(_printed_by(command, here, folder), lines, f"{block.where}: {command}")
                run += 1


def test_the_lines_for_two_machines_are_one_cluster() -> None:
    """A cluster trains the script of the page by the command `tfdist run` above these lines."""
    session = r"^([AB])\$ export ([^$]*)\n\1\$ python train\.py$"
    text = "".join(block.text for block in blocks_of("README.md"))
    exports = re.findall(session, text, re.M)
    assert [machine for machine, _ in exports] == ["A", "B"]
    configs = []
    for _, line in exports:
        (setting,) = shlex.split(line)
        configs.append(tfd.ClusterConfig.from_tf_config(setting.removeprefix("TF_CONFIG=")))
    assert [config.address for config in configs] == ["10.0.0.4:2222", "10.0.0.5:2222"]
    assert configs[0].jobs == configs[1].jobs


def test_the_job_of_the_quickstart_survives_a_kill(tmp_path: Path) -> None:
    for block in blocks_of("docs/quickstart.md"):
        if block.file:
            program = block.program.replace("epochs=300", "epochs=80")
            (tmp_path / block.file).write_text(program, encoding="utf-8")
    command = [sys.executable, "-m", "tfdist_ext.cli", "run", "--workers", "2"]
    command += ["--max-restarts", "3", "--", sys.executable, "resume.py"]
    job = Program(command, output=tmp_path / "log", env=dict(os.environ), cwd=tmp_path)
    try:
        for _ in range(600):
            if len(list(tmp_path.glob("checkpoints/epoch-*"))) > 1:
                break
            time.sleep(0.1)
        ids = re.search(
            r"process ids: worker:0 \d+, worker:1 (\d+)", (tmp_path / "log").read_text()
        )
        assert ids is not None
        os.kill(int(ids[1]), signal.SIGKILL)
        assert job.wait(100) == 0
    finally:
        job.kill()
    log = (tmp_path / "log").read_text(encoding="utf-8")
    for line in ("worker:1 failed first", "restart 1 of 3", "resuming after epoch"):
        assert line in log, log[-3000:]


def _run_as_one_program(blocks: list[Block], folder: Path, setup: str) -> None:
    """A `text` block that follows one of Python is what is printed."""
    python = [block for block in blocks if block.language in PYTHON]
    if not python:
        return
    command = [sys.executable, "-c", setup + "\n".join(block.program for block in python)]
    run = run_program(command, folder, cwd=folder / "here", timeout=100)
    assert run.returncode == 0, run.stderr[-3000:]
    for before, block in itertools.pairwise(blocks):
        if before.language in PYTHON and block.language == "text":
            assert block.text in run.stdout, block.where


def _printed_by(command: str, here: Path, folder: Path) -> list[str]:
    """The lines that a command prints; those of a cluster's tasks after each other."""
    words = shlex.split(command)
    if words[:2] == ["tfdist", "run"]:
        return _printed_by_cluster(words, here, folder)
    if words[0] not in ("python", "tfdist") and not words[0].startswith("scripts/"):
        subprocess.run(["bash", "-c", command], cwd=here, check=True, timeout=60)
        return []
    run = run_program(_with_python(words), folder, cwd=here, timeout=100)
    assert run.returncode == 0, f"{command}\n{run.stderr[-3000:]}"
    return run.stdout.splitlines()


def _with_python(words: list[str]) -> list[str]:
    """A command as arguments of this Python."""
    own = {"python": [], "tfdist": ["-m", "tfdist_ext.cli"]}
    return [sys.executable, *own.get(words[0], [words[0]]), *words[1:]]


def _printed_by_cluster(words: list[str], here: Path, folder: Path) -> list[str]:
    at = words.index("--")
    options = cli._parser().parse_args(words[1:at])
    names = ("workers", "chief", "ps", "evaluator")
    tasks: dict[str, Any] = {name: getattr(options, name) for name in names}
    program = _with_python(words[at + 1 :])
    logs = run_cluster(program, folder, timeout=100, cwd=here, **tasks)
    return [f"[{name}] {line}" for name, log in logs.items() for line in log.splitlines()]


def _compare(printed: list[str], expected: list[str], where: str) -> None:
    """Each line that the page shows was printed; "..." in it stands for anything."""
    text = "\n".join(" ".join(line.split()) for line in printed)
    for line in (" ".join(line.split()) for line in expected):
        pattern = re.escape(line).replace(re.escape("..."), ".*")
        is_printed = re.search(f"^{pattern}$", text, re.M)
        assert is_printed, f"{where} does not print {line!r} but\n{text[-3000:]}"


@pytest.mark.parametrize("page", PAGES)
def test_each_block_is_accounted_for(page: str) -> None:
    blocks = blocks_of(page)
    texts = "\n".join(block.text for block in blocks if block.language == "console")
    for block in blocks:
        assert block.language in PYTHON | SHOWN | FOR_SPHINX, (
            f"{block.where} has the language {block.language!r}; it needs a fence with one of"
            f" {', '.join(sorted(PYTHON | SHOWN))}"
        )
        if block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            json.loads(block.text)
        elif block.language == "yaml":
            assert list(yaml.safe_load_all(block.text))
        elif block.language == "diff":
            compile(side(block.text, "-"), block.where, "exec")
        elif block.language == "console":
            assert block.text.startswith("$ "), f"{block.where} does not begin with a command"
        if block.language in FILES and block.file:
            assert re.search(rf"\$ .*\b{re.escape(block.file)}", texts), f"unused: {block.where}"


def test_what_is_run_elsewhere_is_run_there() -> None:
    for page, file in [*PYTHON_BY.items(), *COMMANDS_OF_PAGE_BY.items()]:
        assert Path(page).name in (ROOT / file).read_text(), f"{file} does not know {page}"
    on_pages = {command for page in PAGES for command, _ in commands_of(page)}
    assert on_pages >= ELSEWHERE
    for by, commands in COMMANDS_BY.items():
        file, _, function = by.partition("::")
        text = (ROOT / file).read_text()
        for wanted in [f"def {function}("] if function else commands:
            assert wanted in text, f"{file} has no {wanted}"
    for name in {match[1] for match in map(EXAMPLE.search, on_pages - ELSEWHERE) if match}:
        assert (ROOT / "tests" / "examples" / f"test_example_{name}.py").exists(), name


def test_what_is_measured_by_hand_knows_its_options(tmp_path: Path) -> None:
    options: dict[str, set[str]] = {}
    for command in (command for page in PAGES for command, _ in commands_of(page)):
        if command.startswith(MEASURED):
            _, script, *words = command.split()
            of_script = {word for word in words if word.startswith("--")}
            options[script] = options.get(script, set()) | of_script
    assert options
    for script, of_script in options.items():
        (folder := tmp_path / Path(script).stem).mkdir()
        run = run_program([sys.executable, script, "--help"], folder, cwd=ROOT, timeout=60)
        assert run.returncode == 0, run.stderr[-3000:]
        assert of_script <= set(run.stdout.split())


def test_links_lead_somewhere() -> None:
    for page in PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            if not target.startswith("http"):
                file = ((ROOT / page).parent / target).resolve()
                assert file.exists(), f"{page} links to {target}"
                if page.startswith("docs/"):
                    # Of the pages that Sphinx builds, a link to a file is a download.
                    assert file.is_file(), f"{page} links to the folder {target}"
                    assert file.suffix != ".md" or file in BUILT, f"{page} links to {target}"


def test_each_page_is_in_the_index() -> None:
    """In docs/README.md, by its title; Sphinx warns of a page that the sidebar lacks."""
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for path in (ROOT / "docs").glob("*.md"):
        if path.name not in ("README.md", "index.md", "contributing.md"):  # which includes a page
            title = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            assert f"[{title}]({path.name})" in index, path.name


GENERATED = re.compile(r"<!-- [^>]*\bbegin\b.*?<!-- (?:[^>]* )?end -->", re.S)


def words_of(page: str) -> int:
    """Words and numbers of a page, with its code, without what programs write into it."""
    text = GENERATED.sub("", (ROOT / page).read_text(encoding="utf-8"))
    return sum(any(map(str.isalnum, word)) for word in text.split())


def test_the_book_is_short() -> None:
    words = {page: words_of(page) for page in PAGES}
    assert words["README.md"] <= 880
    assert {page: count for page, count in words.items() if count > 1_500} == {}
    book = sum(count for page, count in words.items() if page.startswith("docs/"))
    assert book <= 26_660, f"{book} words in docs/: cut what a reader would not miss"


def test_the_pictures_are_those_of_their_program(tmp_path: Path) -> None:
    program = ROOT / "scripts" / "figures" / "pictures"
    subprocess.run([sys.executable, str(program), str(tmp_path)], check=True)
    for drawn in tmp_path.iterdir():
        assert drawn.read_text() == (ROOT / "docs" / drawn.name).read_text(), (
            f"run scripts/figures/pictures: docs/{drawn.name} is another picture"
        )


@pytest.mark.timeout(240)
@pytest.mark.parametrize("script", ["architecture.py", "command_line.py"])
def test_the_page_of_the_script_is_up_to_date(script: str) -> None:
    """Modules and options. That of architecture.py also checks that a fit passes few modules."""
    command = [sys.executable, f"scripts/figures/{script}", "--check"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]


def test_the_choice_names_every_strategy() -> None:
    page = (ROOT / "docs" / "choosing.md").read_text(encoding="utf-8")
    assert set(tfd.available_strategies()) <= set(re.findall(r"`(\w+)`", page))


def test_each_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    names = re.findall(r"^\.\. auto\w+:: (\S+)$", page, re.M)
    assert len(names) == len(set(names))
    things = [pkgutil.resolve_name(":".join(name.rpartition(".")[::2])) for name in names]
    for module in (tfd, tfd.data, tfd.placement, tfd.strategies, testing):
        for name in module.__all__:
            thing = getattr(module, name)  # which may have several names, and stands there by one
            assert isinstance(thing, ModuleType) or any(thing is other for other in things), (
                f"docs/reference.md has no {module.__name__}.{name}"
            )


@functools.cache
def nodes_of_the_package() -> list[ast.AST]:
    """All nodes of the syntax trees of the package's modules."""
    paths = (ROOT / "tfdist_ext").rglob("*.py")
    return [node for path in paths for node in ast.walk(ast.parse(path.read_text()))]


def texts_of_the_package() -> set[str]:
    """The strings of the package, with "..." for the values of an f-string."""
    texts = set()
    for node in nodes_of_the_package():
        if isinstance(node, ast.JoinedStr):
            parts = [it.value if isinstance(it, ast.Constant) else "..." for it in node.values]
            texts.add("".join(map(str, parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts.add(node.value)
    return texts


def test_the_listed_messages_are_those_of_the_package() -> None:
    page = (ROOT / "docs" / "error_messages.md").read_text(encoding="utf-8")
    texts = texts_of_the_package()
    rows = re.findall(r"^\| (`.*?) \| ", page.partition("## Clusters and strategies")[2], re.M)
    messages = [message for row in rows for message in re.findall(r"`([^`]+)`", row)]
    assert len(messages) > 40
    for message in messages:
        pattern = re.compile(".*".join(map(re.escape, message.split("..."))), re.S)
        assert any(pattern.search(text) for text in texts), f"no error has the words {message!r}"


def test_every_error_shows_where_it_is_explained() -> None:
    kinds = [tfd.TfDistError]
    for kind in kinds:
        kinds += kind.__subclasses__()
        shown = traceback.format_exception_only(kind("what is wrong"))
        page, _, heading = kind.help_page.partition("#")
        section = f', section "{heading.replace("-", " ")}"' if heading else ""
        assert shown[-1] == f"Help: {ROOT / page}{section}\n"
        assert (ROOT / page).is_file()
    assert len(kinds) > 8


def test_help_in_the_package_leads_to_a_section() -> None:
    files = list((ROOT / "tfdist_ext").rglob("*.py"))
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    links = set(re.findall(r"docs/([\w/]+)\.md(?:#([\w-]+))?", source))
    assert len(links) > 8
    for page, anchor in links:
        titles = re.findall(r"^##+ (.*)$", (ROOT / "docs" / f"{page}.md").read_text("utf-8"), re.M)
        anchors = [re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles]
        assert anchor in ["", *anchors], (page, anchor)


def names_in_package() -> set[str]:
    """Modules, functions and classes of the package, by their own names."""
    kinds = ast.FunctionDef | ast.ClassDef
    names = {node.name for node in nodes_of_the_package() if isinstance(node, kinds)}
    return names | {path.stem for path in (ROOT / "tfdist_ext").rglob("*.py")}


def test_pages_for_developers_name_what_exists() -> None:
    """In CONTRIBUTING.md, and in the last column of the table of docs/tensorflow_facts.md."""
    facts = (ROOT / "docs" / "tensorflow_facts.md").read_text().splitlines()
    text = (ROOT / "CONTRIBUTING.md").read_text()
    text += "\n".join(line.split(" | ")[-1] for line in facts if line.startswith("| "))
    known = names_in_package()
    for name in re.findall(r"`(\w*[A-Z_./][\w./]*)`", text):
        is_file = any((ROOT / folder / name).exists() for folder in ("", "tfdist_ext", "tests"))
        is_file = is_file or any((ROOT / "tfdist_ext").rglob(name))
        assert is_file or set(name.split(".")) <= known, f"{name} does not exist"
