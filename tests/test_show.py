"""Trees as text and as PNG: hand-made trees line for line, and the tiny pair's trees against its output."""

from __future__ import annotations

import builtins
import struct
from pathlib import Path

import pytest

from eagle3_jax.bench.show import ASCII, COLOUR, CycleTree, cycle_trees, legend, quote, save_trees_png, tree_text
from eagle3_jax.decoding.generate import Output, generate
from eagle3_jax.tree import Tree

WORDS = {0: "Paris", 1: ",", 2: ".", 3: " the", 4: " which", 5: " It", 6: " is"}
#  0 Paris -> 1 ","(node 1) -> 3 " the"(node 3), 4 " which"(node 4);  2 "."(node 2) -> 5 " It"(node 5)
TOKENS, PARENTS = [0, 1, 2, 3, 4, 5], [0, 0, 0, 1, 1, 2]


def test_text_line_for_line() -> None:
    out = Output([[0, 2, 5, 6]], ["length"], [[3]], [[(TOKENS, PARENTS)]])
    (tree,) = cycle_trees(out)
    assert (tree.path, tree.own, tree.kept) == ([0, 2, 5], 6, 3)
    assert tree_text(tree, WORDS.__getitem__).splitlines() == [
        "cycle 1: 3 tokens kept, 2 of 5 drafted",
        '● "Paris"',
        '├─○ ","',
        '│ ├─○ " the"',
        '│ └─○ " which"',
        '└─● "."',
        '  └─● " It"',
        '    └─✚ " is"',
    ]
    assert tree_text(tree, WORDS.__getitem__, ASCII).splitlines()[2:4] == ['|-o ","', '| |-o " the"']


def test_the_own_token_stands_beside_the_refused_ones() -> None:
    out = Output([[0, 1, 6]], ["length"], [[2]], [[(TOKENS, PARENTS)]])
    lines = tree_text(cycle_trees(out)[0], WORDS.__getitem__).splitlines()
    assert lines[2:6] == ['├─● ","', '│ ├─○ " the"', '│ ├─○ " which"', '│ └─✚ " is"']


def test_an_answer_that_ends_on_a_drafted_token_has_no_own_one() -> None:
    out = Output([[0, 1, 3]], ["stop"], [[2]], [[(TOKENS, PARENTS)]])
    (tree,) = cycle_trees(out)
    assert (tree.path, tree.own, tree.kept) == ([0, 1, 3], None, 2)
    assert "✚" not in tree_text(tree)


def test_nothing_accepted() -> None:
    out = Output([[0, 6]], ["length"], [[1]], [[(TOKENS, PARENTS)]])
    (tree,) = cycle_trees(out)
    text = tree_text(tree)
    assert text.startswith("cycle 1: 1 token kept, 0 of 5 drafted")
    assert text.splitlines()[-1] == '└─✚ "6"'


def test_colours_and_awkward_tokens() -> None:
    tree = CycleTree(1, [0, 1], [0, 0], [0, 1], None)
    coloured = tree_text(tree, lambda token: "a\nb", COLOUR)
    assert '\x1b[1;32m● "a\\nb"\x1b[0m' in coloured
    assert len(coloured.splitlines()) == 3
    assert quote("\ufffd", 200) == '"\ufffd"#200'
    assert quote("", 7) == '""#7'
    assert quote('say "é"', 1) == '"say \\"é\\""'
    assert all(mark in legend(ASCII) for mark in "*o+")


def test_every_cycle_of_a_run(golden_target, golden_draft) -> None:
    out = generate(
        golden_target, golden_draft, [[3, 14, 15], [9, 2, 6, 5, 3], [7]], 20, tree=Tree(8, 3, 2), eos_token_ids=[], record_trees=True
    )
    for row in range(3):
        trees = cycle_trees(out, row)
        assert [tree.kept for tree in trees] == out.accept_lengths[row]
        # Reading the trees in order gives the text back.
        text = [out.tokens[row][0]]
        for tree in trees:
            assert tree.tokens[0] == text[-1]
            text += [tree.tokens[m] for m in tree.path[1:]] + ([] if tree.own is None else [tree.own])
        assert text == out.tokens[row]
        for tree in trees:
            lines = tree_text(tree).splitlines()
            assert len(lines) == 1 + len(tree.tokens) + (tree.own is not None)
    with pytest.raises(ValueError, match="record_trees"):
        cycle_trees(Output(out.tokens, out.finish_reasons, out.accept_lengths))


def test_png(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    tree = CycleTree(1, TOKENS, PARENTS, [0, 2, 5], 6)
    path = tmp_path / "tree.png"
    save_trees_png(path, [tree, tree], lambda token: "字" if token == 3 else WORDS[token] + "$x$")
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG")
    width, height = struct.unpack(">II", data[16:24])
    assert width >= 700
    assert height >= 400
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ValueError, match="no cycle"):
        save_trees_png(path, [])
    with pytest.raises(OSError, match="nowhere"):
        save_trees_png(tmp_path / "nowhere" / "tree.png", [tree])


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"pip install 'eagle3-jax\[plots\]'"):
        save_trees_png(tmp_path / "tree.png", [CycleTree(1, [0, 1], [0, 0], [0, 1], None)])
