"""Options of backends: what is refused, and by which message; tilings of chips that share a name."""

import dataclasses

import jax
import jax.export
import jax.numpy as jnp
import pytest

import normlib as nl
import sim_npu
from normlib import kernels
from normlib.passes import tuner

X = jnp.arange(64.0).reshape(4, 16)


@pytest.mark.parametrize(
    ("backend", "option", "has"),
    [("npu", "chips", "chip, precision"), ("pallas", "chip", "platform"), ("xla", "a", "none")],
)
def test_an_option_that_a_backend_lacks_is_named_with_those_it_has(backend, option, has):
    message = f"'{backend}' has no option `{option}`; it has {has}"
    with pytest.raises(TypeError, match=message), nl.use_backend(backend, **{option: 1}):
        pass


def test_options_beside_a_pass_are_refused():
    with pytest.raises(TypeError, match="holds its options already, but `chip`"):
        nl.passes.checked(nl.passes.NpuPass(), chip="310p")


@pytest.mark.parametrize(
    "table", ["[1]", "{", '{"k": 1}', '{"k": {"rows": 1}}', '{"k": {"rows": 0, "chunk": 1, "streamed": true}}',
              '{"k": {"rows": "a", "chunk": 1, "streamed": true}}']
)  # fmt: skip
def test_a_file_that_is_no_table_of_tilings_is_refused_whole(table, tmp_path):
    path = tmp_path / "tilings.json"
    path.write_text(table)
    before = tuner.tuned()
    with pytest.raises(ValueError, match="is no table of tilings"):
        tuner.load(path)
    assert tuner.tuned() == before


def test_a_chip_that_is_no_name_is_refused():
    with pytest.raises(ValueError, match="`chip` must be one of 910b1.*got 910"), nl.use_backend("npu", chip=910):
        pass


@pytest.mark.parametrize("backend", ["npu", "pallas"])
def test_symbolic_shapes_are_refused_with_the_remedy(backend):
    (rows,) = jax.export.symbolic_shape("n")
    shape = jax.ShapeDtypeStruct((rows, 16), jnp.float32)
    exporting = jax.export.export(jax.jit(nl.layer_norm))
    with nl.use_backend(backend), pytest.raises(ValueError, match=r"symbolic shape.*use_backend\('xla'\)"):
        exporting(shape)
    assert exporting(shape).call(X).shape == X.shape


def test_a_tiling_found_for_a_chip_is_not_taken_for_another_of_its_name(monkeypatch):
    monkeypatch.setattr(tuner, "_table", {})
    chip = sim_npu.get_chip("910b2")
    small = dataclasses.replace(chip, ub_bytes=48 * 1024)
    wide = jnp.ones((96, 2048))
    for one in (chip, small):
        with nl.use_backend("npu", chip=one, tune=True):
            jax.jit(nl.rms_norm).lower(wide)
    (first, of_chip), (second, of_small) = tuner.tuned().items()
    assert first.startswith("910b2 ") and second.startswith("910b2-")
    assert of_chip != of_small and of_chip.others == ()


ROW, LANE = jnp.ones(4), jnp.ones(16)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: kernels.layer_norm(X[0], machine="cpu"), r"`x` must be a float array \[N, D\].*float32\[16\]"),
        (lambda: kernels.layer_norm(X[:0], machine="cpu"), r"`x` must be a float array.*float32\[0, 16\]"),
        (lambda: kernels.rms_norm(X.astype(int), machine="cpu"), r"`x` must be a float array.*int"),
        (lambda: kernels.layer_norm(X, ROW, machine="cpu"), r"`scale` must have shape \(16,\).*got \(4,\)"),
        (lambda: kernels.rms_norm(X, ROW, machine="cpu"), "`scale` must have shape"),
        (lambda: kernels.add_rms_norm(X, X[:2], machine="cpu"), "`x2` must have shape"),
        (lambda: kernels.add_layer_norm(X, X, LANE, ROW, machine="cpu"), "`bias` must have shape"),
        (lambda: kernels.layer_norm_grad(X, X, LANE, ROW, machine="cpu"), r"`mean` must have shape \(4,\)"),
        (lambda: kernels.rms_norm_grad(X, X[:2], ROW, machine="cpu"), "`dy` must have shape"),
        (lambda: kernels.channel_sums(X[None], machine="cpu"), "`x` must be a float array"),
        (lambda: kernels.channel_grad_sums(X, X, ROW, LANE, machine="cpu"), "`mean` must have shape"),
        (lambda: kernels.channel_affine(X, LANE, LANE, ROW, machine="cpu"), "`scale` must have shape"),
        (lambda: kernels.channel_grad(X, X, LANE, LANE, None, LANE, ROW, machine="cpu"), "`c0` must have shape"),
        (lambda: kernels.layer_norm(X, machine="abacus"), "`machine` must be one of"),
        (lambda: kernels.layer_norm(X), "is a simulated core.*sim_npu.emulate"),
    ],
)
def test_a_kernel_names_the_argument_that_does_not_fit(call, message):
    with pytest.raises(ValueError, match=message):
        call()
