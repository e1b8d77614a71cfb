"""The notebooks run from top to bottom, without edits, on a small target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from command_scripts import save_word_tokenizer
from notebook_runner import run_notebook

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"


def test_every_notebook_has_parameters_and_parses() -> None:
    found = sorted(NOTEBOOKS.glob("*.ipynb"))
    assert [path.stem for path in found] == ["accelerate", "mechanism", "train_a_head"]
    for path in found:
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        assert sum("parameters" in cell["metadata"].get("tags", []) for cell in cells) == 1
        for cell in cells:
            if cell["cell_type"] == "code":
                compile("".join(cell["source"]), str(path), "exec")
                assert not any(output["output_type"] == "error" for output in cell["outputs"])
        shown = [output["data"] for cell in cells for output in cell.get("outputs", []) if "data" in output]
        assert any("image/png" in data for data in shown), f"{path.name} holds no picture: run tests/notebook_runner.py"


def test_the_runner_shows_what_a_notebook_would(tmp_path: Path) -> None:
    cells = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# title"]},
        {"cell_type": "code", "metadata": {"tags": ["parameters"]}, "source": ["x = 1"]},
        {"cell_type": "code", "metadata": {}, "source": ["from IPython.display import Image, display\n", "display(Image(data=b'png'))"]},
        {"cell_type": "code", "metadata": {}, "source": ["print('x is')\n", "x"]},
        {"cell_type": "code", "metadata": {}, "source": ["x;"]},
    ]
    path = tmp_path / "small.ipynb"
    path.write_text(json.dumps({"cells": cells}))
    done = run_notebook(path, {"x": 5}, tmp_path)["cells"]
    assert done[2]["outputs"][0]["data"]["image/png"] == "cG5n"
    assert [output.get("text") or output["data"]["text/plain"] for output in done[3]["outputs"]] == [["x is\n"], ["5"]]
    assert done[4]["outputs"] == []
    path.write_text(json.dumps({"cells": [{"cell_type": "code", "metadata": {}, "source": ["1 / 0"]}]}))
    with pytest.raises(ZeroDivisionError) as caught:
        run_notebook(path)
    assert "in cell 0 of small.ipynb" in caught.value.__notes__[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mechanism", "accelerate"])
def test_with_a_head(name: str, golden: Path, tmp_path: Path) -> None:
    save_word_tokenizer(tmp_path / "tokenizer")
    parameters = {"TARGET": golden / "target", "HEAD": golden / "head", "TOKENIZER": tmp_path / "tokenizer", "NEW_TOKENS": 12}
    words = {"TEXT": "w5 w9 w12"} if name == "mechanism" else {"TEXTS": ["w5 w9 w12", "w30 w31"]}
    run_notebook(NOTEBOOKS / f"{name}.ipynb", {**parameters, **words}, tmp_path)


@pytest.mark.slow
def test_training_from_nothing(shared_data: Path, tmp_path: Path) -> None:
    sizes = {"STORIES": 64, "STORY_TOKENS": 48, "DRAFT_VOCAB": 256, "STEPS": 10, "TTT_STEPS": 2, "NEW_TOKENS": 16}
    done = run_notebook(NOTEBOOKS / "train_a_head.ipynb", {"TARGET": str(shared_data / "stories260k"), **sizes}, tmp_path)
    pictures = [output for cell in done["cells"] for output in cell.get("outputs", []) if output["output_type"] == "display_data"]
    assert len(pictures) == 2
    assert (tmp_path / "my_head" / "model.safetensors").is_file()
