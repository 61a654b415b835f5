"""Statistics of whole models: exact over streams and devices, adapted, mixed, committed, per domain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx as flax_nnx
from jax.sharding import PartitionSpec as P

import normlib as nl
from normlib import linen, nnx
from normlib.linen_tools import apply_with_moments
from normlib.nnx_tools import call_with_moments
from tests.distributed import mesh

pytestmark = pytest.mark.family

SIZES = (5, 1, 9, 3)


def stream(sizes=SIZES, mean=3.0, channels=4, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, 2, channels)) + mean + i).astype(np.float32) for i, n in enumerate(sizes)]


def whole(batches, unbiased=False):
    """Mean and variance of all entries, in float64."""
    x = np.concatenate([np.asarray(b, np.float64).reshape(-1, b.shape[-1]) for b in batches])
    return x.mean(0), x.var(0, ddof=int(unbiased))


def stats(channels=4):
    return {"bn": {"mean": jnp.zeros(channels), "var": jnp.ones(channels)}}


measure = jax.jit(lambda x: {"bn": nl.batch_moments(x)})


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("mean", [3.0, 1e4])
def test_precise_statistics_are_those_of_all_entries(unbiased, mean):  # CASES: A16
    batches = stream(mean=mean)
    new = nl.precise_batch_stats(measure, iter(batches), stats(), unbiased=unbiased)["bn"]
    expected = whole(batches, unbiased)
    np.testing.assert_allclose(new["mean"], expected[0], rtol=2e-7)
    np.testing.assert_allclose(new["var"], expected[1], rtol=1e-6)


@pytest.mark.parametrize("vma", [True, False])
def test_precise_statistics_over_uneven_shards_by_one_collective(vma):  # CASES: A16, A1, A3
    """4 / 0 / 2 / 3 valid rows on four devices in each of two batches: all devices equal, exact, one all-gather."""
    rng = np.random.default_rng(1)
    x = (rng.normal(size=(2, 16, 4)) + np.arange(16)[:, None]).astype(np.float32)
    valid = np.zeros((2, 16, 1), bool)
    for device, n in enumerate((4, 0, 2, 3)):
        valid[:, 4 * device :][:, :n] = True
    x = np.where(valid, x, np.nan)

    def precise(x, valid):
        local = lambda batch: {"a": nl.batch_moments(batch[0], where=batch[1]), "b": nl.batch_moments(batch[1] * 1.0)}  # noqa: E731
        empty = {"a": stats()["bn"], "b": stats(1)["bn"]}
        return nl.precise_batch_stats(local, list(zip(x, valid)), empty, axis_name="d")

    out = P() if vma else P("d")
    run = jax.jit(
        jax.shard_map(precise, mesh=mesh(), in_specs=(P(None, "d"), P(None, "d")), out_specs=out, check_vma=vma)
    )
    new = jax.tree.map(np.asarray, run(x, valid))
    expected = whole([x[valid[..., 0]]])
    for device in range(1 if vma else 4):
        np.testing.assert_allclose(new["a"]["mean"].reshape(-1, 4)[device], expected[0], rtol=3e-7)
        np.testing.assert_allclose(new["a"]["var"].reshape(-1, 4)[device], expected[1], rtol=1e-6)
        np.testing.assert_array_equal(new["a"]["var"].reshape(-1, 4)[device], new["a"]["var"].reshape(-1, 4)[0])
    text = run.lower(x, valid).as_text()
    assert text.count("stablehlo.all_gather") == 1
    assert "all_reduce" not in text


def test_devices_without_any_entry_leave_the_statistics():  # CASES: B3, J21
    def f(x):
        return nl.commit_moments(
            stats(), nl.merge_devices({"bn": nl.batch_moments(x, where=jnp.zeros(x.shape, bool))}, "d")
        )

    new = jax.vmap(f, axis_name="d")(jnp.full((3, 2, 4), jnp.nan))["bn"]
    assert new["mean"].tolist() == np.zeros((3, 4)).tolist()
    assert new["var"].tolist() == np.ones((3, 4)).tolist()


@pytest.mark.parametrize("unbiased", [False, True])
def test_micro_batches_committed_once_equal_one_batch(unbiased):  # CASES: B13
    x = np.concatenate(stream((4, 4, 4)))
    moments = jax.tree.map(jnp.zeros_like, measure(x[:4]))

    def add(moments, micro):
        return nl.merge_moments(moments, {"bn": nl.batch_moments(micro)}), None

    moments, _ = jax.jit(lambda m, x: jax.lax.scan(add, m, x))(moments, x.reshape(3, 4, 2, 4))
    new = nl.commit_moments(stats(), moments, momentum=0.9, unbiased=unbiased)["bn"]
    mean, var = whole([x], unbiased)
    np.testing.assert_allclose(new["mean"], 0.1 * mean, rtol=1e-6)
    np.testing.assert_allclose(new["var"], 0.9 + 0.1 * var, rtol=1e-6)


def test_commit_skips_what_is_not_finite():  # CASES: B20
    x = np.ones((3, 4), np.float32)
    x[0, 2] = np.inf
    new = nl.commit_moments(stats(), measure(x), momentum=0.5, skip_nonfinite=True)["bn"]
    assert new["mean"].tolist() == [0.5, 0.5, 0.0, 0.5]
    assert new["var"].tolist() == [0.5, 0.5, 1.0, 0.5]


@pytest.mark.parametrize("momentum", [None, 0.9])
def test_running_weights_average_without_a_start(momentum):
    means = np.array([3.0, -1.0, 4.0, 1.5])
    mean, var = jnp.full(1, 77.0), jnp.full(1, 99.0)
    for t, m in enumerate(means, 1):
        moments = nl.batch_moments(jnp.array([[m - 1], [m + 1]], jnp.float32))
        mean, var = nl.update_running(mean, var, moments, weight=nl.running_weight(t, momentum))
    weights = np.ones(4) if momentum is None else momentum ** np.arange(3, -1, -1.0)
    np.testing.assert_allclose(mean, [(weights * means).sum() / weights.sum()], rtol=1e-6)
    np.testing.assert_allclose(var, [1.0], rtol=1e-6)


@pytest.mark.parametrize("weight", [0.0, 0.25])
def test_adaptation_averages_source_and_target(weight):
    batches = stream()
    source = {"bn": {"mean": jnp.arange(4.0), "var": jnp.full(4, 2.0)}}
    new = nl.adapt_batch_stats(measure, batches, source, source_weight=weight)["bn"]
    mean, var = whole(batches)
    np.testing.assert_allclose(new["mean"], weight * np.arange(4) + (1 - weight) * mean, rtol=1e-6)
    np.testing.assert_allclose(new["var"], weight * 2 + (1 - weight) * var, rtol=1e-6)


def test_a_mixture_weighted_by_counts_is_the_whole():
    batches = stream()
    parts = [nl.precise_batch_stats(measure, [b], stats()) for b in batches]
    mixed = nl.mix_batch_stats(parts, [len(b) for b in batches])["bn"]
    mean, var = whole(batches)
    np.testing.assert_allclose(mixed["mean"], mean, rtol=1e-6)
    np.testing.assert_allclose(mixed["var"], var, rtol=1e-6)


def test_a_mixture_of_equal_statistics_is_the_same_to_the_bit():
    one = {"bn": {"mean": jnp.float32([1e4 + 0.3, -7.1]), "var": jnp.zeros(2), "num_batches": jnp.int32(4)}}
    mixed = nl.mix_batch_stats([one, one, one], [1, 1, 1])["bn"]
    np.testing.assert_array_equal(mixed["mean"], one["bn"]["mean"])
    assert mixed["var"].tolist() == [0, 0]
    assert mixed["num_batches"] == 4


def test_domains_keep_their_own_statistics():
    table = nl.domain_batch_stats(stats(), 3)
    batches = stream((4, 6))

    @jax.jit
    def step(table, domain, x):
        own = nl.commit_moments(nl.take_domain(table, domain), measure(x), momentum=0.0)
        return nl.put_domain(table, domain, own)

    for domain, x in ((2, batches[0]), (0, batches[1])):
        table = step(table, domain, x)
    for domain, x in ((2, batches[0]), (0, batches[1])):
        np.testing.assert_allclose(table["bn"]["mean"][domain], whole([x])[0], rtol=1e-6)
        np.testing.assert_allclose(table["bn"]["var"][domain], whole([x])[1], rtol=1e-6)
    assert table["bn"]["mean"][1].tolist() == [0] * 4
    outside = step(table, 3, batches[0])
    np.testing.assert_array_equal(outside["bn"]["mean"], table["bn"]["mean"])
    assert np.isnan(jax.jit(nl.take_domain)(table, 3)["bn"]["mean"]).all()


class Net(nn.Module):
    kind: type = linen.BatchNorm
    train: bool = True

    @nn.compact
    def __call__(self, x, mask=None):
        x = self.kind(use_running_average=not self.train, name="first")(x, mask=mask)
        shared = self.kind(use_running_average=not self.train, name="shared")
        return shared(nn.Dense(3)(shared(nn.Dense(3)(x))))


class NnxNet(flax_nnx.Module):
    def __init__(self, kind, rngs):
        self.layers = flax_nnx.List([kind(4, rngs=rngs), flax_nnx.Linear(4, 3, rngs=rngs)])
        self.shared = kind(3, rngs=rngs)

    def __call__(self, x, mask=None):
        x = self.layers[1](self.layers[0](x, mask=mask))
        return self.shared(self.shared(x))


@pytest.mark.parametrize("kind", [nn.BatchNorm, linen.BatchNorm])
def test_a_linen_model_is_measured_where_its_batch_norms_are(kind):  # CASES: B16
    model, x = Net(kind), stream((6,))[0]
    mask = np.arange(6)[:, None, None] < 4
    variables = jax.jit(model.init)(jax.random.key(0), x)

    @jax.jit
    def run(variables, x, mask):
        return apply_with_moments(model, variables, x, mask, mutable="batch_stats")

    (y, updates), moments = run(variables, x, mask)
    plain, expected = model.apply(variables, x, mask, mutable="batch_stats")
    np.testing.assert_allclose(y, plain, atol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), updates, expected)
    mean, var = whole([x[:4]])
    np.testing.assert_allclose(moments["first"].mean, mean, rtol=1e-6)
    np.testing.assert_allclose(moments["first"].var, var, rtol=1e-6)
    assert moments["first"].count.tolist() == [8] * 4
    assert moments["shared"].count.tolist() == [24] * 3  # both calls
    new = nl.commit_moments(variables["batch_stats"], moments, momentum=0.0)
    np.testing.assert_allclose(new["first"]["mean"], mean, rtol=1e-6)
    assert jax.tree.structure(new) == jax.tree.structure(variables["batch_stats"])


def test_precise_statistics_of_a_linen_model_make_evaluation_match_training():
    """One batch as the stream: evaluation by its precise statistics gives training's y."""
    x = stream((6,))[0]

    class First(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            return linen.BatchNorm(use_running_average=not train)(nn.Dense(3)(x))

    first = First()
    variables = jax.jit(first.init, static_argnums=2)(jax.random.key(0), x, True)
    measured = jax.jit(lambda b: apply_with_moments(first, variables, b, True)[1])
    new = nl.precise_batch_stats(measured, [x[:2], x[2:]], variables["batch_stats"])
    evaluated = first.apply({**variables, "batch_stats": new}, x, False)
    trained, _ = first.apply(variables, x, True, mutable="batch_stats")
    np.testing.assert_allclose(evaluated, trained, atol=2e-6)


@pytest.mark.parametrize("kind", [flax_nnx.BatchNorm, nnx.BatchNorm])
def test_an_nnx_model_is_measured_where_its_batch_norms_are(kind):
    model, x = NnxNet(kind, flax_nnx.Rngs(0)), stream((6,))[0]
    mask = np.arange(6)[:, None, None] < 4
    graph, state = flax_nnx.split(model)
    y, moments = jax.jit(lambda s, x, m: call_with_moments(flax_nnx.merge(graph, s), x, m))(state, x, mask)
    mean, var = whole([x[:4]])
    np.testing.assert_allclose(moments["layers"][0].mean, mean, rtol=1e-6)
    np.testing.assert_allclose(moments["layers"][0].var, var, rtol=1e-6)
    assert moments["shared"].count.tolist() == [24] * 3
    np.testing.assert_allclose(y, model(x, mask), atol=1e-6)
    call_with_moments(model, x, mask)
    assert type(model.shared) is kind
    assert not hasattr(model.shared, "moments")
    old = flax_nnx.state(model, flax_nnx.BatchStat)
    flax_nnx.update(model, nl.commit_moments(old, moments, momentum=0.0))
    np.testing.assert_allclose(model.layers[0].mean[...], mean, rtol=1e-6)


def test_moments_pass_through_rematerialisation_and_gradients():  # CASES: B11
    class Block(nn.Module):
        @nn.compact
        def __call__(self, x):
            return linen.BatchNorm(use_running_average=False)(nn.Dense(4)(x))

    model, x = nn.remat(Block)(), stream((6,))[0]
    variables = jax.jit(Block().init)(jax.random.key(0), x)

    def loss(params):
        y, moments = apply_with_moments(model, {**variables, "params": params}, x)
        return (y**3).sum(), moments

    grads, moments = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    plain = jax.grad(lambda p: (Block().apply({**variables, "params": p}, x, mutable="batch_stats")[0] ** 3).sum())
    expected = plain(variables["params"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), grads, expected)
    assert moments["BatchNorm_0"].count.tolist() == [12] * 4


def test_an_empty_stream():
    with pytest.raises(ValueError, match="`batches` is empty"):
        nl.precise_batch_stats(measure, [], stats())


def test_statistics_without_moments():
    with pytest.raises(ValueError, match=r"has none for the statistics of bn.*\['other'\].*batch_moments"):
        nl.precise_batch_stats(lambda x: {"other": nl.batch_moments(x)}, stream(), stats())


def test_moments_of_another_size():
    with pytest.raises(ValueError, match=r"`moments` of bn have shape \(4,\), its mean has \(3,\)"):
        nl.commit_moments(stats(3), measure(stream()[0]))


def test_a_tree_without_statistics():
    with pytest.raises(ValueError, match="no node with `mean` and `var`"):
        nl.commit_moments({"kernel": jnp.ones(3)}, {})


def test_counts_past_int32_are_refused_and_never_silent():
    big = {"bn": nl.Moments(jnp.full(4, 2**30, jnp.int32), jnp.ones(4), jnp.zeros(4), jnp.ones(4))}
    twice = nl.merge_moments(big, big)
    again = nl.merge_moments(twice, twice)
    for moments in (twice, again, jax.vmap(lambda m: nl.merge_devices(m, "d"), axis_name="d", axis_size=2)):
        if callable(moments):
            stacked = moments(jax.tree.map(lambda t: jnp.stack([t, t]), big))
            moments = jax.tree.map(lambda t: t[0], stacked)
        assert (moments["bn"].count == -1).all()
        assert np.isnan(moments["bn"].mean).all()
        with pytest.raises(ValueError, match=r"counted 2\*\*31 entries or more"):
            nl.commit_moments(stats(), moments)


@pytest.mark.parametrize("weight", [-0.1, 1.5])
def test_a_source_weight_out_of_range(weight):
    with pytest.raises(ValueError, match=rf"`source_weight`.*\[0, 1\]; got {weight}"):
        nl.adapt_batch_stats(measure, stream(), stats(), source_weight=weight)


@pytest.mark.parametrize(
    ("weights", "match"),
    [([1.0], "for each of the 2"), ([0, 0], "finite positive"), ([1, -1], "not be negative"), ([1, np.nan], "finite")],
)
def test_mixture_weights_that_do_not_fit(weights, match):
    with pytest.raises(ValueError, match=match):
        nl.mix_batch_stats([stats(), stats()], weights)


def test_mixtures_of_other_structure():
    with pytest.raises(ValueError, match="differ in structure"):
        nl.mix_batch_stats([stats(), {"other": stats()["bn"]}], [1, 1])


@pytest.mark.parametrize("number", [0, -1, 2.0])
def test_a_number_of_domains_that_is_none(number):
    with pytest.raises(ValueError, match="`num_domains` must be a positive integer"):
        nl.domain_batch_stats(stats(), number)


@pytest.mark.parametrize("domain", [-1, 3])
def test_a_domain_out_of_range(domain):
    table = nl.domain_batch_stats(stats(), 3)
    with pytest.raises(ValueError, match=f"`domain` must be between 0 and 2; got {domain}"):
        nl.take_domain(table, domain)
    with pytest.raises(ValueError, match=f"`domain` must be between 0 and 2; got {domain}"):
        nl.put_domain(table, domain, stats())


@pytest.mark.parametrize("momentum", [-0.1, 1.0])
def test_a_debiased_momentum_out_of_range(momentum):
    with pytest.raises(ValueError, match=r"`momentum` of a debiased average must lie in \[0, 1\)"):
        nl.running_weight(1, momentum)


def test_devices_of_an_unbound_axis():
    with pytest.raises(NameError, match="`axis_name`"):
        nl.merge_devices(measure(stream()[0]), "d")


def test_collections_that_are_not_names():
    with pytest.raises(TypeError, match="`mutable` must be a collection's name"):
        apply_with_moments(linen.BatchNorm(), {}, jnp.ones((2, 2)), mutable=3)


@pytest.mark.parametrize("package", ["linen", "nnx"])
def test_frozen_statistics_let_the_affine_train(package):  # CASES: B8
    x = stream((6,))[0]
    if package == "linen":
        layer = linen.BatchNorm(frozen="statistics")
        variables = jax.jit(layer.init)(jax.random.key(0), x)
        loss = lambda p: (layer.apply({**variables, "params": p}, x) ** 2).sum()  # noqa: E731
        grads = jax.jit(jax.grad(loss))(variables["params"])
    else:
        layer = nnx.BatchNorm(4, frozen="statistics", rngs=flax_nnx.Rngs(0))
        grads = flax_nnx.to_pure_dict(flax_nnx.grad(lambda m: (m(x) ** 2).sum())(layer))
        assert layer.mean[...].tolist() == [0] * 4
    rows = np.float64(x).reshape(-1, 4) / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(grads["scale"], 2 * (rows**2).sum(0), rtol=1e-5)
    np.testing.assert_allclose(grads["bias"], 2 * rows.sum(0), rtol=1e-5)


def test_frozen_takes_nothing_else():
    with pytest.raises(ValueError, match="`frozen` must be False, True or 'statistics'"):
        linen.BatchNorm(frozen="affine").init(jax.random.key(0), jnp.ones((2, 2)))
