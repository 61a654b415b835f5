"""Tile kernels in Pallas: one source for the simulated AI Core, GPUs and TPUs."""

from normlib.kernels.channel_operators import batch_norm as batch_norm
from normlib.kernels.channel_operators import batch_norm_grad as batch_norm_grad
from normlib.kernels.channel_operators import group_norm as group_norm
from normlib.kernels.channel_operators import group_norm_grad as group_norm_grad
from normlib.kernels.machine import MACHINES as MACHINES
from normlib.kernels.machine import Machine as Machine
from normlib.kernels.operators import add_layer_norm as add_layer_norm
from normlib.kernels.operators import add_rms_norm as add_rms_norm
from normlib.kernels.operators import channel_affine as channel_affine
from normlib.kernels.operators import channel_grad as channel_grad
from normlib.kernels.operators import channel_grad_sums as channel_grad_sums
from normlib.kernels.operators import channel_sums as channel_sums
from normlib.kernels.operators import layer_norm as layer_norm
from normlib.kernels.operators import layer_norm_grad as layer_norm_grad
from normlib.kernels.operators import rms_norm as rms_norm
from normlib.kernels.operators import rms_norm_grad as rms_norm_grad
