"""Weights in panels: the compiled product against numpy, rows that are the same in every pass, models carried over and back, decoding."""

import pickle
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_draft, tiny_target

import eagle3_jax as e3
from eagle3_jax import layout
from eagle3_jax.attention import attend
from eagle3_jax.int8 import Int8, to_int8
from eagle3_jax.large_pages import CHUNK, Room
from eagle3_jax.layers import linear
from eagle3_jax.layout import laid_out, layout_of, plain
from eagle3_jax.native import build
from eagle3_jax.native.build import NoNativeError, compiled, panel_width
from eagle3_jax.panels import Panels, in_panels, in_plain, is_native
from eagle3_jax.params import named_variables
from eagle3_jax.quantize import quantize_int8
from eagle3_jax.sharding import make_mesh, place
from eagle3_jax.weights.heads import save_head

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")

PROMPTS = [[5, 9, 2, 31, 17, 40, 8], [11], [7, 7, 7]]


@pytest.fixture(autouse=True, scope="module")
def registered():
    """Attention is called here without the model that would ask for the custom calls."""
    panel_width()


def random(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@settings(deadline=None, max_examples=15)
@given(rows=st.integers(1, 200), inputs=st.integers(1, 2100), outputs=st.integers(1, 200), whole=st.booleans())
def test_product_is_numpys(rows, inputs, outputs, whole):
    x, w = random(rows, inputs), random(inputs, outputs, seed=1)
    weight = jnp.asarray(w) if whole else to_int8(jnp.asarray(w))
    exact = w if whole else np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)
    got = jax.jit(linear)(jnp.asarray(x), in_panels(weight, panel_width()))
    bound = 1e-6 * np.abs(x).astype(np.float64) @ np.abs(exact) + 1e-6
    assert np.all(np.abs(np.asarray(got, np.float64) - x.astype(np.float64) @ exact) <= bound)


def test_a_room_hands_out_memory_that_jax_takes_over():
    room = Room()
    shapes = [(3, 5), (1,), (CHUNK // 8, 3), (0, 4), (7, 11), (2, CHUNK // 8)]
    arrays = [room.empty(shape, kind) for shape in shapes for kind in (np.float32, np.int8)]
    for number, array in enumerate(arrays):
        array[...] = number
    held = [jax.device_put(array, may_alias=True) for array in arrays]
    for number, (array, device) in enumerate(zip(arrays, held, strict=True)):
        assert array.ctypes.data % 64 == 0 and (array == number).all()
        assert array.size == 0 or device.unsafe_buffer_pointer() == array.ctypes.data


@pytest.mark.parametrize("whole", [True, False])
def test_a_row_has_the_same_bits_in_every_pass(whole):
    """Whatever else is in the pass, however many: what two passes of plain and of speculative decoding are made of."""
    x, w = random(200, 1100), jnp.asarray(random(1100, 150, seed=1))
    weight = in_panels(w if whole else to_int8(w), panel_width())
    product = jax.jit(linear)
    every = np.asarray(product(jnp.asarray(x), weight))
    for rows in (*range(1, 26), 60, 95, 96, 97, 199):
        assert np.array_equal(product(jnp.asarray(x[:rows]), weight), every[:rows]), rows


def test_transformations():
    """As of any other product: mapped, differentiated, and with the numbers cast."""
    x, w = jnp.asarray(random(2, 3, 20)), jnp.asarray(random(20, 70, seed=1))
    for weight in (w, to_int8(w)):
        panels = in_panels(weight, panel_width())
        whole = jnp.asarray(np.asarray(panels))
        assert np.array_equal(jax.vmap(panels.product)(x), panels.product(x))
        slope = jax.jit(jax.grad(lambda x, panels: jnp.sum(jnp.sin(panels.product(x)))))(x, panels)
        np.testing.assert_allclose(slope, jnp.cos(x @ whole) @ whole.T, atol=1e-4)
    cast = jax.tree.map(lambda values: values.astype(jnp.bfloat16), in_panels(w, panel_width()))
    assert not is_native(cast)
    np.testing.assert_allclose(cast.product(x), x @ w.astype(jnp.bfloat16).astype(jnp.float32), atol=1e-4)
    q, k, v = (jnp.asarray(random(2, 1, 3, 2, 8, seed=seed)) for seed in range(3))
    cache = jnp.zeros((1, 2, 8, 4)), jnp.zeros((1, 2, 4, 8)), jnp.asarray([2], jnp.int32)
    mapped = jax.vmap(lambda q, k, v: attend(q, k, v, jnp.ones((1, 3, 3), bool), cache, native=True))(q, k, v)
    for row in range(2):
        np.testing.assert_array_equal(mapped[row], attend(q[row], k[row], v[row], jnp.ones((1, 3, 3), bool), cache, native=True))


def test_panels_from_elsewhere(tmp_path):
    """Unpickled in a process that has not asked for the custom calls yet, with this machine's width and with another's."""
    w, x = jnp.asarray(random(9, 30)), random(2, 9, seed=1)
    (tmp_path / "panels").write_bytes(pickle.dumps([in_panels(w, width) for width in (panel_width(), 24)]))
    program = f"""
import pickle, numpy as np, jax.numpy as jnp
from eagle3_jax.panels import is_native
panels = pickle.load(open({str(tmp_path / "panels")!r}, "rb"))
x = jnp.asarray({x.tolist()}, jnp.float32)
first, second = (np.asarray(one.product(x)) for one in panels)
np.testing.assert_allclose(first, second, atol=1e-5)
print([is_native(one) for one in panels])
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "[True, False]\n", ran.stderr


def test_many_calls_at_once():
    """More callers than the pool has threads: nobody waits for a thread that does not come."""
    x, w = jnp.asarray(random(5, 300)), jnp.asarray(random(300, 4000, seed=1))
    weight, product = in_panels(w, panel_width()), jax.jit(linear)
    want = np.asarray(product(x, weight))
    with ThreadPoolExecutor(32) as pool:
        for got in pool.map(lambda _: np.asarray(product(x, weight)), range(400)):
            assert np.array_equal(got, want)


def test_shapes_rows_and_types():
    table = random(50, 23)
    weight = in_panels(jnp.asarray(table), panel_width(), table=True)
    assert weight.shape == (50, 23) and weight.T.shape == (23, 50) and weight.size == 50 * 23
    ids = jnp.asarray([[3, 49], [0, 3]])
    assert np.array_equal(weight[ids], table[np.asarray(ids)])
    small = to_int8(jnp.asarray(table), 1)
    assert np.array_equal(in_panels(small, panel_width(), table=True)[ids], small[ids])
    # To look at, it is an array.
    assert np.array_equal(weight, table) and np.array_equal(weight[3:5, 2], table[3:5, 2]) and np.array_equal(weight.T[2], table[:, 2])
    assert np.allclose(in_panels(small, panel_width(), table=True), table, atol=0.02)
    split = in_panels(jnp.asarray(random(23, 3, 5)), panel_width())
    got = linear(jnp.asarray(random(2, 4, 23), jnp.bfloat16), split, result=jnp.float32)
    assert got.shape == (2, 4, 3, 5) and got.dtype == jnp.float32
    assert linear(jnp.asarray(random(2, 4, 23), jnp.bfloat16), split).dtype == jnp.bfloat16
    # Where a program is for something else than a CPU, panels are a matrix like any other.
    x = jnp.asarray(random(4, 23))
    for weight in (split, in_panels(to_int8(in_plain(split)), panel_width())):
        np.testing.assert_allclose(weight._as_matrix(x), linear(x, weight).reshape(4, -1), atol=1e-5)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("small", [True, False])
def test_models_there_and_back(tied, small):
    target = tiny_target(tie_embeddings=tied)
    target = quantize_int8(target) if small else target
    panels = laid_out(target, "panels")
    assert (layout_of(target), layout_of(panels), layout_of(plain(panels))) == ("plain", "panels", "plain")
    kinds = {name: isinstance(v.get_value(), Panels) for name, v in named_variables(panels)}
    assert kinds["embed"] and kinds["blocks.1.down"] and not kinds["norm"] and kinds.get("head", True)
    for (name, was), (_, now) in zip(named_variables(target), named_variables(plain(laid_out(panels, "auto"))), strict=True):
        was, now = was.get_value(), now.get_value()
        assert type(was) is type(now), name
        pairs = [(was.values, now.values), (was.scale, now.scale)] if isinstance(was, Int8) else [(was, now)]
        assert all(np.array_equal(a, b) for a, b in pairs), name
    assert isinstance(quantize_int8(panels).embed[...], Int8)


def test_where_there_are_no_panels(monkeypatch):
    half = tiny_target()
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), half)
    assert layout_of(laid_out(half, "auto")) == "plain"
    with pytest.raises(ValueError, match=r"'panels'.*bfloat16"):
        laid_out(half, "panels")
    with pytest.raises(ValueError, match=r"layout 'rows' is unknown.*plain"):
        laid_out(half, "rows")
    mesh = make_mesh(tensor=2, devices=jax.devices()[:2])
    on_mesh = place(laid_out(tiny_target(), "panels"), mesh)
    assert layout_of(on_mesh) == "plain" and layout_of(laid_out(on_mesh, "auto")) == "plain"

    def none():
        raise NoNativeError("no C++ compiler is found")

    monkeypatch.setattr(layout, "panel_width", none)
    assert layout_of(laid_out(tiny_target(), "auto")) == "plain"
    with pytest.raises(ValueError, match=r"no C\+\+ compiler"):
        laid_out(tiny_target(), "panels")


@pytest.mark.slow
def test_compiling(tmp_path, monkeypatch):
    """Once per source, processor and compiler; what goes wrong is said, and leaves no file."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(NoNativeError, match=r"no C\+\+ compiler is found .*nobody\+\+"):
        compiled(("nobody++",))
    (tmp_path / "product.cc").write_text("int f() { return nothing; }\n")
    with monkeypatch.context() as patch:
        patch.setattr(build, "FOLDER", tmp_path)
        with pytest.raises(NoNativeError, match=r"fails: .*product\.cc"):
            compiled()
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".so"]
    path = compiled()
    written = path.stat().st_mtime_ns
    assert compiled() == path and path.stat().st_mtime_ns == written
    path.write_bytes(path.read_bytes()[:5000])  # to load it would kill the process
    again = compiled()
    assert again.stat().st_size > 5000 and [*path.parent.iterdir()] == [again]


def test_no_compiling(tmp_path, monkeypatch):
    """A cache that cannot be written to, a compiler that does not end or is replaced: never a crash, and not asked twice."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert str(tmp_path / "file") in str(build._library_or_reason.__wrapped__())
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compiler = tmp_path / "slow++"
    compiler.write_text("#!/bin/sh\necho >> $0.calls\nexec sleep 60\n")
    compiler.chmod(0o755)
    monkeypatch.setattr(build, "PATIENCE", 0.3)
    with pytest.raises(NoNativeError, match=r"slow\+\+ does not end within 0.3 s"):
        compiled((str(compiler),))
    assert (tmp_path / "slow++.calls").read_text() == "\n" and not [*(tmp_path / "eagle3_jax" / "native").iterdir()]
    copier = tmp_path / "copy++"
    for text in ("one", "two"):
        copier.write_text(f'#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho {text} > "$2"\n')
        copier.chmod(0o755)
        monkeypatch.setattr(build, "PATIENCE", 60)
        assert compiled((str(copier),)).read_text() == f"{text}\n"
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: panel_width(), range(8))) == {panel_width()}


@pytest.mark.slow
@pytest.mark.parametrize("flags", [["-mno-avx512f"], ["-mno-avx"]])
def test_other_processors(flags, tmp_path):
    """The code for processors with narrower vectors, in a process of its own: the name of a custom call is taken once."""
    library = tmp_path / "product.so"
    command = [shutil.which("c++") or "c++", *build.FLAGS, "-Wall", "-Wextra", "-Werror", "-march=native", *flags]
    sources = map(str, build.FOLDER.glob("*.cc"))
    made = subprocess.run([*command, f"-I{jax.ffi.include_dir()}", *sources, "-o", str(library)], capture_output=True, text=True)
    if "unrecognized" in made.stderr:
        pytest.skip("not a processor of this kind")
    assert made.returncode == 0, made.stderr
    program = f"""
import jax.numpy as jnp, numpy as np
from eagle3_jax.int8 import to_int8
from eagle3_jax.attention import attend
from eagle3_jax.native import build
from eagle3_jax.panels import in_panels, is_native
build.compiled = lambda: {str(library)!r}
width = build.panel_width()
random = np.random.default_rng(0).standard_normal
x, w = random((37, 130)).astype(np.float32), jnp.asarray(random((130, 70)).astype(np.float32))
for weight in (w, to_int8(w)):
    exact = np.asarray(w) if weight is w else np.asarray(weight.values, np.float64) * np.asarray(weight.scale, np.float64)
    panels = in_panels(weight, width)
    assert is_native(panels)
    got = np.asarray(panels.product(jnp.asarray(x)))
    np.testing.assert_allclose(got, x @ exact, atol=1e-4)
    assert all(np.array_equal(panels.product(jnp.asarray(x[:n])), got[:n]) for n in range(1, 37))
q, k, v, k_cache, v_cache = (jnp.asarray(random(s).astype(np.float32)) for s in
    ((2, 5, 4, 24), (2, 5, 2, 24), (2, 5, 2, 24), (2, 2, 24, 70), (2, 2, 70, 24)))
operands = q, k, v, jnp.tril(jnp.ones((1, 5, 5), bool)), (k_cache, v_cache, jnp.asarray([0, 67], jnp.int32)), None
np.testing.assert_allclose(attend(*operands, native=True), attend(*operands), atol=1e-5)
print(width)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert int(ran.stdout) == 16


@pytest.mark.parametrize("tree", [pytest.param(e3.Chain(3), marks=pytest.mark.slow), e3.Tree(nodes=9, depth=3, width=3)])
def test_decoding(tree):
    """The same text as plain decoding with panels, greedy and sampled, in a batch, with an int8 head too; and as from plain arrays."""
    target = tiny_target()
    draft, fast = tiny_draft(target), laid_out(target, "panels")
    options = {"max_new_tokens": 17, "temperature": [0.0, 0.9, 0.9], "top_p": [1.0, 1.0, 0.8], "seed": 4, "eos_token_ids": []}
    want = e3.generate(target, None, PROMPTS, **options).tokens
    assert e3.generate(fast, None, PROMPTS, **options).tokens == want
    for head in (laid_out(draft, "panels"), laid_out(quantize_int8(draft), "panels"), draft):
        assert e3.generate(fast, head, PROMPTS, tree=tree, **options).tokens == want


def test_a_head_is_saved_from_panels(tmp_path):
    target = tiny_target(num_layers=3)
    draft = tiny_draft(target, taps=(0, 1, 2))
    save_head(laid_out(draft, "panels"), tmp_path / "head", "float32")
    again = e3.load_draft(tmp_path / "head", target, layout="plain")
    for (name, was), (_, now) in zip(named_variables(draft), named_variables(again), strict=True):
        assert np.array_equal(in_plain(was.get_value()), now.get_value()), name
