"""Normalization for JAX: accurate, synchronised across devices, drop-in for Flax.

The functions are here; Flax layers are in `normlib.linen` and `normlib.nnx`.
"""

from normlib.activated import ConvBatchNormOutput as ConvBatchNormOutput
from normlib.activated import conv_batch_norm_relu as conv_batch_norm_relu
from normlib.activated import group_norm_silu as group_norm_silu
from normlib.adaptive import AdaNormZeroOutput as AdaNormZeroOutput
from normlib.adaptive import ada_layer_norm as ada_layer_norm
from normlib.adaptive import ada_layer_norm_zero as ada_layer_norm_zero
from normlib.adaptive import gate_residual as gate_residual
from normlib.adaptive import modulate as modulate
from normlib.batch import BatchNormOutput as BatchNormOutput
from normlib.batch import batch_norm as batch_norm
from normlib.batch import batch_norm_inference as batch_norm_inference
from normlib.conditional import ConditionalBatchNormOutput as ConditionalBatchNormOutput
from normlib.conditional import adaptive_instance_norm as adaptive_instance_norm
from normlib.conditional import conditional_batch_norm as conditional_batch_norm
from normlib.conditional import modulated_group_norm as modulated_group_norm
from normlib.dynamic import BatchRenormOutput as BatchRenormOutput
from normlib.dynamic import SwitchableNormOutput as SwitchableNormOutput
from normlib.dynamic import batch_renorm as batch_renorm
from normlib.dynamic import dynamic_tanh as dynamic_tanh
from normlib.dynamic import switchable_norm as switchable_norm
from normlib.engine import Normalized as Normalized
from normlib.engine import affine as affine
from normlib.engine import normalize as normalize
from normlib.fused import AddNormCastOutput as AddNormCastOutput
from normlib.fused import AddNormOutput as AddNormOutput
from normlib.fused import add_layer_norm as add_layer_norm
from normlib.fused import add_rms_norm as add_rms_norm
from normlib.fused import add_rms_norm_cast as add_rms_norm_cast
from normlib.fused import deep_norm as deep_norm
from normlib.fused import multi_add_rms_norm as multi_add_rms_norm
from normlib.group import group_norm as group_norm
from normlib.group import instance_norm as instance_norm
from normlib.group import st_group_norm as st_group_norm
from normlib.layer import layer_norm as layer_norm
from normlib.lp import clip_by_foreach_norm as clip_by_foreach_norm
from normlib.lp import euclidean_norm as euclidean_norm
from normlib.lp import foreach_norm as foreach_norm
from normlib.lp import l2_normalize as l2_normalize
from normlib.lp import lp_norm as lp_norm
from normlib.lp import mean_variance_norm as mean_variance_norm
from normlib.lp import renorm as renorm
from normlib.moments import Moments as Moments
from normlib.moments import welford_scan as welford_scan
from normlib.passes import use_backend as use_backend
from normlib.precision import recommended_eps as recommended_eps
from normlib.rms import rms_norm as rms_norm
from normlib.running import update_running as update_running
from normlib.scope import Scope as Scope
from normlib.sparse import sparse_layer_norm as sparse_layer_norm
from normlib.sparse import sparse_rms_norm as sparse_rms_norm
from normlib.weight import SpectralNormOutput as SpectralNormOutput
from normlib.weight import spectral_norm as spectral_norm
from normlib.weight import weight_norm as weight_norm

__version__ = "0.1.0"
