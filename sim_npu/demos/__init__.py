"""Small Pallas kernels the simulator is tested and validated with; nothing else imports them.

Each function takes `plan=` (a `sim_npu.TilePlan` or None) and `interpret=`, has `example_arrays(shape, dtype)`
to build arguments for the command line, and `plan_space(shape, dtype)` where its tiling can vary.
"""

from sim_npu.demos.channel import channel_stats as channel_stats
from sim_npu.demos.grad import channel_grad as channel_grad
from sim_npu.demos.grad import channel_scale as channel_scale
from sim_npu.demos.group import group_norm as group_norm
from sim_npu.demos.rows import rms_norm as rms_norm
from sim_npu.demos.rows import rms_norm_chunked as rms_norm_chunked
from sim_npu.demos.rows import rms_norm_stream as rms_norm_stream
