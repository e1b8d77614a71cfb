"""Runs a notebook's code cells one after the other in this process, and can put their outputs into the file: no Jupyter needed.

    python tests/notebook_runner.py notebooks/mechanism.ipynb --set TARGET='"stories260k"'

`--set` replaces what the cell tagged "parameters" assigns. What a cell prints, the value of its last line and pictures shown through
`IPython.display` become its outputs. `--check` runs without writing.
"""

from __future__ import annotations

import argparse
import ast
import base64
import contextlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DISPLAY = "from IPython.display import Image, display\n"
"""Taken out of the cells: what it brings is there already. A stand-in among the modules would mislead libraries that look for IPython."""


def run_notebook(path: Path, parameters: Mapping[str, Any] | None = None, folder: Path | None = None) -> dict[str, Any]:
    """The notebook with the outputs of a fresh run, in `folder` (the current one otherwise). An error names the cell."""
    notebook = json.loads(path.read_text(encoding="utf-8"))
    shown: list[dict[str, Any]] = []
    scope: dict[str, Any] = {"__name__": "__main__", **_pictures(shown)}
    count = 0
    with contextlib.chdir(folder or Path.cwd()):
        for number, cell in enumerate(notebook["cells"]):
            if cell["cell_type"] != "code":
                continue
            count += 1
            source = "".join(cell["source"]).replace(DISPLAY, "")
            printed = io.StringIO()
            try:
                with contextlib.redirect_stdout(printed):
                    value = _run(source, f"<{path.name}, cell {number}>", scope)
                    if "parameters" in cell["metadata"].get("tags", []):
                        scope.update(parameters or {})
            except Exception as error:
                error.add_note(f"in cell {number} of {path.name}:\n{source}")
                raise
            cell["execution_count"] = count
            cell["outputs"] = [*_stream(printed.getvalue()), *shown, *_result(value, count)]
            shown.clear()
    return notebook


def _run(source: str, name: str, scope: dict[str, Any]) -> Any:
    """Executes a cell; the value of its last line when that is an expression that does not end in a semicolon."""
    tree = ast.parse(source, name)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, name, "exec"), scope)
    if last is None:
        return None
    assert isinstance(last, ast.Expr)
    value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
    return None if source.rstrip().endswith(";") else value


def _pictures(shown: list[dict[str, Any]]) -> dict[str, Any]:
    """What a notebook imports from IPython.display: pictures are collected."""

    class Image:
        def __init__(self, data: bytes | None = None, filename: str | None = None):
            self.data = data if data is not None else Path(str(filename)).read_bytes()

    def display(image: Image) -> None:
        data = {"image/png": base64.b64encode(image.data).decode(), "text/plain": ["<picture>"]}
        shown.append({"output_type": "display_data", "data": data, "metadata": {}})

    return {"Image": Image, "display": display}


def _stream(text: str) -> list[dict[str, Any]]:
    return [{"output_type": "stream", "name": "stdout", "text": text.splitlines(keepends=True)}] if text else []


def _result(value: Any, count: int) -> list[dict[str, Any]]:
    if value is None:
        return []
    data = {"text/plain": repr(value).splitlines(keepends=True)}
    return [{"output_type": "execute_result", "execution_count": count, "data": data, "metadata": {}}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("notebooks", nargs="+", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a parameter, as a Python literal")
    parser.add_argument("--folder", type=Path, help="where the notebook runs and writes its files; unset: here")
    parser.add_argument("--check", action="store_true", help="leave the files as they are")
    args = parser.parse_args()
    parameters = {name: ast.literal_eval(value) for name, _, value in (text.partition("=") for text in args.set)}
    for path in args.notebooks:
        done = run_notebook(path, parameters, args.folder)
        if not args.check:
            part = path.with_suffix(".part")
            part.write_text(json.dumps(done, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            os.replace(part, path)
        print(f"{path}: {sum(cell['cell_type'] == 'code' for cell in done['cells'])} cells ran")


if __name__ == "__main__":
    main()
