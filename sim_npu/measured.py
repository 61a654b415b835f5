"""Public device times and pipe times of Ascend kernels, restated as data.

Sources: device times of RmsNorm, GroupNorm and BatchNormGradV3 cases published with the ops-nn operator library
(910B2 and 950PR, µs); the A2 add sample of the AscendC manual in six variants (its totals and unit times, µs;
8192 x 8192 float16 elements, inferred from the instruction counts); the 910B4 profiler samples of the same manual.
Kernels are named by what they compute; `attrs` holds what changes the work.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Measured:
    """One measured operator call: chip, operator, case number, shape, dtype, device time in µs, attributes."""

    chip: str
    op: str
    case: int
    shape: tuple[int, ...]
    dtype: str
    us: float
    attrs: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True)
class AddCase:
    """One variant of a vector add: how it was run, and measured times in µs (None where not given).

    Attributes:
      label, chip: which sample.
      cores, elements, tile, depth, adds: cores, elements in all, per tile, buffers per queue, adds per tile.
      bypass, bank_free: inputs kept out of L2; operands in different banks.
      total, core, mte2, v, mte3: task time, time of the core, busy time of each unit.
    """

    label: str
    chip: str
    cores: int
    elements: int
    tile: int
    depth: int
    adds: int
    bypass: bool
    bank_free: bool
    total: float
    core: float | None
    mte2: float
    v: float
    mte3: float


OPERATORS = (
    Measured("910b2", "rms_norm", 1, (32, 128, 768), "float16", 21.16),
    Measured("910b2", "rms_norm", 2, (32, 128, 1024), "float32", 31.9),
    Measured("910b2", "rms_norm", 3, (32, 128, 2048), "bfloat16", 64.6),
    Measured("910b2", "rms_norm", 4, (16, 256, 4096), "float16", 75.66),
    Measured("910b2", "rms_norm", 5, (8, 512, 8192), "float32", 145.76),
    Measured("910b2", "rms_norm", 6, (4, 1023, 4097), "bfloat16", 81.26),
    Measured("910b2", "rms_norm", 7, (63, 67, 1023), "float16", 26.58),
    Measured("910b2", "rms_norm", 8, (16, 511, 2049), "float32", 132.02),
    Measured("910b2", "rms_norm", 9, (8, 1021, 4099), "bfloat16", 154.34),
    Measured("910b2", "rms_norm", 10, (33, 127, 769), "float16", 24.56),
    Measured("910b2", "rms_norm", 11, (31, 129, 2049), "float32", 69.0),
    Measured("910b2", "rms_norm", 12, (17, 255, 4097), "bfloat16", 85.42),
    Measured("910b2", "rms_norm", 13, (7, 1009, 1021), "float16", 35.02),
    Measured("910b2", "rms_norm", 14, (11, 367, 373), "float32", 24.82),
    Measured("910b2", "rms_norm", 17, (3, 7, 11, 4096), "float32", 11.1),
    Measured("910b2", "rms_norm", 18, (2, 511, 8192), "bfloat16", 30.4),
    Measured("910b2", "rms_norm", 19, (4, 255, 4096), "float16", 24.34),
    Measured("910b2", "rms_norm", 20, (2, 3, 17, 1024, 128), "float32", 67.78),
    Measured("910b2", "group_norm", 1, (8, 32, 64, 64), "float16", 11.02, (("groups", 8),)),
    Measured("910b2", "group_norm", 3, (2, 128, 256, 256), "bfloat16", 62.51, (("groups", 32),)),
    Measured("910b2", "group_norm", 7, (2, 256, 128, 128), "float16", 33.05, (("groups", 16),)),
    Measured("910b2", "group_norm", 9, (3, 64, 64, 64), "bfloat16", 10.44, (("groups", 8),)),
    Measured("910b2", "group_norm", 11, (3, 64, 127, 129), "float32", 23.39, (("groups", 8),)),
    Measured("910b2", "group_norm", 19, (4, 128, 255, 257), "float16", 95.67, (("groups", 32),)),
    Measured("950", "rms_norm", 1, (32, 128, 768), "float16", 9.885),
    Measured("950", "rms_norm", 2, (32, 128, 1024), "float32", 15.61),
    Measured("950", "rms_norm", 3, (32, 128, 2048), "bfloat16", 17.06),
    Measured("950", "rms_norm", 4, (16, 256, 4096), "float16", 30.04),
    Measured("950", "rms_norm", 5, (8, 512, 8192), "float32", 170.84),
    Measured("950", "rms_norm", 6, (4, 1023, 4097), "bfloat16", 31.145),
    Measured("950", "rms_norm", 7, (63, 67, 1023), "float16", 11.455),
    Measured("950", "rms_norm", 8, (16, 511, 2049), "float32", 64.78),
    Measured("950", "rms_norm", 9, (8, 1021, 4099), "bfloat16", 67.08),
    Measured("950", "rms_norm", 10, (33, 127, 769), "float16", 10.18),
    Measured("950", "rms_norm", 11, (31, 129, 2049), "float32", 28.335),
    Measured("950", "rms_norm", 12, (17, 255, 4097), "bfloat16", 32.62),
    Measured("950", "rms_norm", 13, (7, 1009, 1021), "float16", 15.53),
    Measured("950", "rms_norm", 14, (11, 367, 373), "float32", 8.0),
    Measured("950", "rms_norm", 16, (11, 13, 17, 67), "float16", 3.3),
    Measured("950", "rms_norm", 17, (3, 7, 11, 4096), "float32", 5.83),
    Measured("950", "rms_norm", 18, (2, 511, 8192), "bfloat16", 16.56),
    Measured("950", "rms_norm", 19, (4, 255, 4096), "float16", 10.19),
    Measured("950", "rms_norm", 20, (2, 3, 17, 1024, 128), "float32", 47.89),
    Measured("950", "group_norm", 1, (8, 32, 64, 64), "float16", 9.48, (("groups", 8),)),
    Measured("950", "group_norm", 3, (2, 128, 256, 256), "bfloat16", 60.16, (("groups", 32),)),
    Measured("950", "group_norm", 5, (8, 512, 17, 15), "float32", 13.54, (("groups", 2),)),
    Measured("950", "group_norm", 7, (2, 256, 128, 128), "float16", 31.68, (("groups", 16),)),
    Measured("950", "group_norm", 11, (3, 64, 127, 129), "float32", 24.36, (("groups", 8),)),
    Measured("950", "group_norm", 13, (1023, 257), "float16", 7.19, (("groups", 1),)),
    Measured("950", "group_norm", 17, (8, 127, 33, 31), "float32", 19.23, (("groups", 1),)),
    Measured("950", "group_norm", 19, (4, 128, 255, 257), "float16", 103.03, (("groups", 32),)),
    Measured("950", "batch_norm_grad_v3", 1, (2, 8, 32, 32), "float16", 3.71, (("training", 1),)),
    Measured("950", "batch_norm_grad_v3", 3, (1, 23, 127, 127), "bfloat16", 3.96, (("training", 0),)),
    Measured("950", "batch_norm_grad_v3", 5, (2, 64, 256, 256), "float32", 143.0, (("training", 0),)),
    Measured("950", "batch_norm_grad_v3", 7, (2048, 1023), "float32", 46.06, (("training", 0),)),
    Measured("950", "batch_norm_grad_v3", 9, (32, 128, 509), "float16", 5.26, (("training", 0),)),
    Measured("950", "batch_norm_grad_v3", 11, (1, 16, 32, 32, 32), "float32", 11.7, (("training", 1),)),
    Measured("950", "batch_norm_grad_v3", 13, (2, 3, 4, 5, 6, 7, 8), "float32", 3.19, (("training", 0),)),
    Measured("950", "batch_norm_grad_v3", 15, (1, 1, 1024, 1024), "float16", 163.92, (("training", 1),)),
    Measured("950", "batch_norm_grad_v3", 17, (16, 256, 7, 7), "bfloat16", 3.82, (("training", 0),)),
    Measured("950", "batch_norm_grad_v3", 19, (2, 64, 16, 16, 16), "bfloat16", 3.89, (("training", 0),)),
)

_ALL = 8192 * 8192
A2_ADD = (
    AddCase("1 core, 8 KiB", "910b1", 1, _ALL, 4096, 1, 1, False, False, 6909.6, None, 6208.8, 761.7, 2613.0),
    AddCase("48 cores, 8 KiB", "910b1", 48, _ALL, 4096, 1, 1, False, False, 306.58, None, 215.5, 15.9, 54.3),
    AddCase("48 cores, 32 KiB", "910b1", 48, _ALL, 16384, 1, 1, False, False, 268.5, None, 184.4, 12.8, 57.4),
    AddCase("+ double buffer", "910b1", 48, _ALL, 16384, 2, 1, False, False, 264.02, None, 250.5, 12.8, 85.0),
    AddCase("+ L2 bypass", "910b1", 48, _ALL, 16384, 2, 1, True, False, 187.68, None, 176.0, 12.8, 160.3),
    AddCase("+ bank-free", "910b1", 48, _ALL, 16384, 2, 1, True, True, 184.52, None, 171.6, 6.95, 121.4),
)

_MANY = 80 * (1 << 20)
B4_ADD = (  # where the sample gives a range over cores, its middle
    AddCase("5120 elements", "910b4", 1, 5120, 512, 1, 1, False, False, 5.18, 4.60, 2.51, 0.284, 1.62),
    AddCase("1 core", "910b4", 1, _MANY, 2048, 1, 1, False, False, 14975.22, 14974.34, 12734.0, 1664.0, 5924.0),
    AddCase("8 cores", "910b4", 8, _MANY, 2048, 1, 1, False, False, 2041.4, 2023.0, 1743.0, 208.0, 767.0),
    AddCase("8 cores, 40 KiB", "910b4", 8, _MANY, 20480, 1, 1, False, False, 892.02, 831.0, 713.0, 110.5, 226.5),
    AddCase("8 adds, 1 buffer", "910b4", 8, _MANY, 20480, 1, 8, False, False, 1378.09, 1370.0, 509.0, 844.04, 204.0),
    AddCase("8 adds, 2 buffers", "910b4", 8, _MANY, 10240, 2, 8, False, False, 959.62, 946.0, 793.5, 888.5, 249.5),
)
