"""The explicit front end and sums across cores."""

import numpy as np
import pytest

from sim_npu import TilePlan, get_chip, simulate
from sim_npu.builder import Builder
from sim_npu.crosscore import atomic_merge, atomic_sum, workspace_merge, workspace_sum
from sim_npu.ir import Copy, CrossCore, Loop, TileProgram

CHIP = get_chip("910b2")


def add(depth=2, tile=4096, steps=64, **kwargs):
    b = Builder("add", grid=(steps,), **kwargs)
    x = b.queue_in("x", (tile,), "float16", depth=depth, array=(tile * steps,))
    y = b.queue_in("y", (tile,), "float16", depth=depth, array=(tile * steps,))
    z = b.queue_out("z", (tile,), "float16", depth=depth, array=(tile * steps,))
    b.data_copy(x)
    b.data_copy(y)
    b.vector("Add", z, x, y)
    b.data_copy(z)
    return b.build()


def test_a_built_program_moves_the_bytes_its_copies_say():
    (k,) = simulate(add(), chip=CHIP).kernels

    assert (k.traffic.reads, k.traffic.writes) == (2 * 64 * 8192, 64 * 8192)
    assert k.instructions == 2 and k.repeats == 2 * 32  # 2 steps on the first of 48 cores, 32 repeats each


def test_the_first_step_of_one_core_takes_the_sum_of_its_parts():
    chip = CHIP.replace(scalar_step=0.0, setup_us=0.0)
    (k,) = simulate(add(steps=1), chip=chip, cache="cold").kernels

    read = 8192 / chip.mte2_bytes_per_cycle + chip.mte2_head  # a cold cache: from HBM
    vector = chip.vec_head_first + 2 * 32  # z is written to the bank and groups that x is read from
    assert k.timeline.cycles == pytest.approx(2 * read + vector + 8192 / chip.l2_write_bytes_per_cycle)  # into L2


def test_double_buffering_hides_work_behind_copies():
    one, two = (simulate(add(depth=d, steps=4800), chip=CHIP).total_us for d in (1, 2))

    assert two < 0.95 * one


def test_a_loop_repeats_its_copies_and_work():
    b = Builder("loop", grid=(1,))
    x, z = b.queue_in("x", (64,), "float32"), b.queue_out("z", (64,), "float32")
    with b.loop(5):
        b.data_copy(x)
        b.vector("Muls", z, x)
        b.data_copy(z)
    program = b.build()

    assert isinstance(program.body[0], Loop) and len(program.body[0].body) == 3
    (k,) = simulate(program).kernels
    assert k.traffic.reads == 5 * 256 and k.instructions == 5
    assert TileProgram.from_json(program.to_json()) == program


def in_place(steps, depth, *, back):
    b = Builder("in place", grid=(1,))
    shape = (4096,)
    x = b.queue_in("x", shape, "float32", depth=depth, back=shape)
    z = b.queue_out("z", shape, "float32", depth=depth)
    with b.loop(steps):
        b.data_copy(x)
        b.vector("Muls", x if back else z, x)
        (b.copy_back if back else b.data_copy)(x if back else z)
    return b.build()


def test_a_tile_copied_back_in_place_is_free_when_that_copy_ends():
    chip = CHIP.replace(scalar_step=0.0, setup_us=0.0, vec_head_first=22.0)
    own = 8192 * 2 / chip.l2_write_bytes_per_cycle
    for depth in (1, 2):
        (k,) = simulate(in_place(100, depth, back=True), chip=chip).kernels
        (other,) = simulate(in_place(100, depth, back=False), chip=chip).kernels
        assert k.traffic.writes == other.traffic.writes == 100 * 16384
        # One buffer: copy in, work and copy out take turns; with a result apart, the next copy in need not wait.
        busy = sum(k.busy_us.values())
        if depth == 1:
            assert chip.us(k.timeline.cycles) == pytest.approx(busy, rel=1e-6)
            assert other.timeline.cycles < k.timeline.cycles - 90 * own
        else:
            assert chip.us(k.timeline.cycles) < 0.7 * busy


def test_a_barrier_drains_the_units_of_its_core():
    def two(barrier):
        b = Builder("two", grid=(1,))
        x = b.queue_in("x", (4096,), "float32", depth=2)
        z = b.queue_out("z", (4096,), "float32", depth=2)
        for _ in range(2):
            b.data_copy(x)
            b.vector("Muls", z, x)
            b.data_copy(z)
            if barrier:
                b.barrier()
        return simulate(b.build(), chip=CHIP.replace(setup_us=0.0, scalar_step=0.0)).kernels[0]

    apart, together = two(True), two(False)
    assert apart.timeline.cycles == pytest.approx(sum(CHIP.clock_mhz * t for t in apart.busy_us.values()))
    assert together.timeline.cycles < apart.timeline.cycles


def test_a_further_piece_of_a_tile_takes_its_own_copy_but_no_buffer():
    b = Builder("pieces", grid=(1,))
    x = b.queue_in("x", (4096,), "float32")  # one buffer
    b.data_copy_pad(x, burst_bytes=8192)
    b.data_copy_pad(x, burst_bytes=8192, more=True)
    b.vector("Muls", x, x)
    chip = CHIP.replace(setup_us=0.0, scalar_step=0.0)
    (k,) = simulate(b.build(), chip=chip).kernels

    assert k.traffic.reads == 16384
    assert chip.clock_mhz * k.busy_us["MTE2"] == pytest.approx(
        2 * (chip.mte2_head + 8192 / chip.l2_read_bytes_per_cycle)
    )


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda b, x, z: b.data_copy(x, burst_bytes=100), "multiple of 32; got 100, of which the hardware copies 96"),
        (lambda b, x, z: b.data_copy(x, bursts=2, burst_bytes=256), "`burst_bytes` x `bursts` = 512 B exceeds tile x"),
        (lambda b, x, z: b.vector("Frobnicate", z, x), "`instruction` must be one of Add.*'Frobnicate'"),
        (lambda b, x, z: b.atomic_add(x), "must belong to an output queue; x is an input"),
        (lambda b, x, z: b.copy_back(z), "must belong to an input queue; z is an output"),
        (lambda b, x, z: b.data_copy_pad(z, more=True), "`more` is for tiles of input queues; z is an output"),
        (lambda b, x, z: b.data_copy(b.buffer("t", (8,), "float32")), "`tile` must belong to a queue.*t does not"),
        (lambda b, x, z: b.queue_in("q", (8,), "float32", depth=9), "`depth` of queue q must be 1 to 8.*got 9"),
        (lambda b, x, z: b.queue_in("x", (8,), "float32"), "`name` of a queue must be new; x exists"),
        (lambda b, x, z: b.loop(-1).__enter__(), "`count` must not be negative; got -1"),
        (lambda b, x, z: Builder("p", grid=()), "`grid` must hold positive sizes"),
        (
            lambda b, x, z: Builder("p", grid=(2,), parallel=(True, False)),
            "`parallel` must have one entry per grid axis",
        ),
    ],
)
def test_mistakes_are_refused_with_what_was_seen(act, message):
    b = Builder("p", grid=(1,))
    x, z = b.queue_in("x", (64,), "float32"), b.queue_out("z", (64,), "float32")
    with pytest.raises(ValueError, match=message):
        act(b, x, z)


def test_copies_of_bytes_use_the_padding_form():
    b = Builder("p", grid=(1,))
    x = b.queue_in("x", (50,), "float16")
    b.data_copy_pad(x, burst_bytes=100)

    assert b.build().body == (Copy("x", "in", 1, 100, pad=True),)


def test_a_chip_without_datacopypad_refuses_odd_pieces():
    b = Builder("odd", grid=(1,))
    x = b.queue_in("x", (50,), "float16")
    b.data_copy_pad(x, burst_bytes=100)

    assert simulate(b.build(), chip="910b2").total_us > 0
    with pytest.raises(ValueError, match="100 B of queue x with DataCopyPad, which 310p does not have"):
        simulate(b.build(), chip="310p")


def test_a_workspace_merge_pays_a_synchronisation_and_atomics_pay_for_their_queue():
    merge, atomic = workspace_merge(256), atomic_merge(256)

    assert any(isinstance(s, CrossCore) for s in merge.body)
    assert simulate(merge).total_us > CHIP.sync_us
    narrow, wide = (simulate(atomic_merge(w)).kernels[0].busy_us["MTE3"] for w in (128, 48 * 128))
    assert narrow * 128 / 128 > wide / 48  # 48 cores queue for one region; 48 regions serve one each
    assert simulate(atomic).kernels[0].traffic.writes == 48 * 256 * 4


def test_a_chip_without_syncall_meets_through_memory():
    hard, soft = (simulate(workspace_merge(64, chip=c), chip=c).total_us for c in ("910b2", "310p"))

    assert hard > 0 and soft > 0 and not get_chip("310p").has_syncall
    assert soft != pytest.approx(hard)


def test_a_workspace_sum_has_one_result_and_atomic_adds_have_several():
    rng = np.random.default_rng(0)
    parts = (rng.normal(size=(48, 300)) * 10.0 ** rng.integers(-3, 4, (48, 1))).astype(np.float32)
    sums = [atomic_sum(parts, seed=s) for s in range(8)]

    in_order = parts[0].copy()
    for row in parts[1:]:
        in_order = in_order + row
    np.testing.assert_array_equal(workspace_sum(parts), in_order)
    assert any((sums[0] != s).any() for s in sums[1:])
    np.testing.assert_array_equal(atomic_sum(parts, seed=3), sums[3])
    for s in sums:
        np.testing.assert_allclose(s, parts.astype(np.float64).sum(0), atol=2e-2)


def test_fewer_cores_take_longer():
    few, many = (simulate(add(steps=480), plan=TilePlan(cores=c)).total_us for c in (4, 48))

    assert many < few
