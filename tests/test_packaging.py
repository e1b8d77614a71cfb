"""What an installation holds: the commands, the shipped heads, and nothing called `train` or `infer`; what the README and .ci/run say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SCRIPTS: dict[str, str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["shared-scripts"]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """The command's output; a failure shows both streams."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def tracked(*folders: str) -> list[str]:
    """Files under version control, or all but caches where there is none."""
    if (ROOT / ".git").exists():
        return run("git", "ls-files", *folders).split()
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    return [path.relative_to(ROOT).as_posix() for path in paths]


def test_every_program_is_a_command():
    """Each starts with a line that the installer replaces by its interpreter, and may be executed: pip keeps the file's mode."""
    assert {path for path in tracked("train", "infer") if path.endswith(".py")} == set(SCRIPTS)
    for source, name in SCRIPTS.items():
        assert re.fullmatch(r"#!(/usr/bin/env python3|python)", (ROOT / source).read_text().split("\n")[0]), source
        assert os.access(ROOT / source, os.X_OK), f"{source} is not executable: git update-index --chmod=+x {source}"
        assert re.fullmatch(r"eagle3-[a-z]+", name)


def test_torch_is_imported_inside_functions_only():
    """Importing the library must never need torch, nor any other extra."""
    extras = {"torch", "datasets", "pyarrow", "matplotlib", "tensorboard", "wandb"}
    for path in [*ROOT.glob("eagle3_jax/**/*.py"), *ROOT.glob("train/*.py"), *ROOT.glob("infer/*.py")]:
        for node in ast.parse(path.read_text()).body:
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not {name.split(".")[0] for name in names} & extras, f"{path}:{node.lineno}"


def test_the_library_reads_no_environment():
    """But for one thing: where the user's cache folder is."""
    for path in set(ROOT.glob("eagle3_jax/**/*.py")) - {ROOT / "eagle3_jax" / "user_cache.py"}:
        assert not re.search(r"os\.environ(?!\.setdefault)|os\.getenv|environb", path.read_text()), path


def test_the_readme_lists_every_file():
    """Its tree has one line for each module of library and programs, and no line for a file that is gone."""
    text = (ROOT / "README.md").read_text()
    tree = text.split("## Where things are")[1].split("```")[1]
    listed, folders = set(), []
    for line in filter(str.strip, tree.splitlines()):
        name = line.split()[0]
        depth = (len(line) - len(line.lstrip())) // 4
        folders[depth:] = [name.rstrip("/")]
        if name.endswith(".py"):
            listed.add("/".join(folders))
    modules = {path for path in tracked("eagle3_jax", "train", "infer") if path.endswith(".py")}
    modules -= {path for path in modules if path.endswith("/__init__.py") and path.count("/") > 1}
    assert listed == modules, f"not listed: {sorted(modules - listed)}; gone: {sorted(listed - modules)}"


def test_readme_and_ci_install_alike():
    """What a reader types is what is checked: the same install command, and pytest after it."""
    commands = re.findall(r"```bash\n(.*?)\n```", (ROOT / "README.md").read_text())
    assert commands[0].startswith("pip install . && eagle3-generate ")
    install, test = commands[1].split(" && ")
    assert (install, test) == ('pip install -e ".[test]"', "pytest")
    assert install in (ROOT / ".ci" / "run").read_text().splitlines()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder)
    (path,) = folder.glob("*.whl")
    return path


@pytest.mark.slow
def test_wheel_contents(wheel: Path):
    """Library and heads inside, tests and programs outside; commands as scripts with the generic first line."""
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        scripts = {name.rsplit("/", 1)[1]: archive.read(name) for name in names if ".data/scripts/" in name}
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith((".data", ".dist-info"))} == {"eagle3_jax"}
    assert set(tracked("eagle3_jax")) <= names
    assert set(scripts) == set(SCRIPTS.values())
    assert all(text.startswith(b"#!python\n") for text in scripts.values())
    assert any(name.endswith("licenses/LICENSE") for name in names)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "editable"])
def test_installed_commands_run(wheel: Path, tmp_path: Path, kind: str):
    """In an environment of its own (which borrows the dependencies of this one), every command shows its help."""
    venv.create(tmp_path / "env", with_pip=True)
    bin_folder = tmp_path / "env" / ("Scripts" if os.name == "nt" else "bin")
    python = bin_folder / "python"
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    what = [wheel] if kind == "wheel" else ["--no-build-isolation", "-e", ROOT]
    # Behind the environment's own packages, so that eagle3_jax is the one just installed.
    (packages / "borrowed.pth").write_text(sysconfig.get_path("purelib") + "\n")
    run(python, "-m", "pip", "install", "--no-deps", "--quiet", "--ignore-installed", *what)
    where = run(python, "-c", "import eagle3_jax; print(eagle3_jax.__file__)", cwd=tmp_path).strip()
    assert Path(where).is_relative_to(packages if kind == "wheel" else ROOT)
    for name in SCRIPTS.values():
        command = bin_folder / name
        assert command.read_text().splitlines()[0] == f"#!{python}"
        assert f"usage: {name}" in run(command, "--help", cwd=tmp_path)
    probe = "import importlib.util as u; print([n for n in ('train', 'infer', 'tests') if u.find_spec(n)])"
    assert run(python, "-c", probe, cwd=tmp_path).strip() == "[]"
