"""Normalization for JAX: accurate, synchronised across devices, drop-in for Flax.

The functions are here; Flax layers are in `normlib.linen` and `normlib.nnx`.
"""

from normlib.batch import BatchNormOutput as BatchNormOutput
from normlib.batch import batch_norm as batch_norm
from normlib.batch import batch_norm_inference as batch_norm_inference
from normlib.diagnose import BatchStatsReport as BatchStatsReport
from normlib.diagnose import Finding as Finding
from normlib.diagnose import batch_stats_report as batch_stats_report
from normlib.domains import domain_batch_stats as domain_batch_stats
from normlib.domains import mix_batch_stats as mix_batch_stats
from normlib.domains import put_domain as put_domain
from normlib.domains import take_domain as take_domain
from normlib.engine import Normalized as Normalized
from normlib.engine import affine as affine
from normlib.engine import normalize as normalize
from normlib.fold_network import FoldedNetwork as FoldedNetwork
from normlib.fold_network import FoldPair as FoldPair
from normlib.fold_network import fold as fold
from normlib.folding import Folded as Folded
from normlib.folding import FoldedAffine as FoldedAffine
from normlib.folding import fold_affine as fold_affine
from normlib.folding import fold_batch_norm_conv as fold_batch_norm_conv
from normlib.folding import fold_batch_norm_dense as fold_batch_norm_dense
from normlib.folding import fold_conv_batch_norm as fold_conv_batch_norm
from normlib.folding import fold_dense_batch_norm as fold_dense_batch_norm
from normlib.folding import fold_rms_norm_dense as fold_rms_norm_dense
from normlib.group import group_norm as group_norm
from normlib.group import instance_norm as instance_norm
from normlib.interop import TorchLayer as TorchLayer
from normlib.interop import convert_batch_norm as convert_batch_norm
from normlib.interop import from_torch as from_torch
from normlib.interop import layer_arguments as layer_arguments
from normlib.interop import to_torch as to_torch
from normlib.layer import layer_norm as layer_norm
from normlib.moments import Moments as Moments
from normlib.moments import welford_scan as welford_scan
from normlib.passes import use_backend as use_backend
from normlib.population import adapt_batch_stats as adapt_batch_stats
from normlib.population import batch_moments as batch_moments
from normlib.population import commit_moments as commit_moments
from normlib.population import merge_devices as merge_devices
from normlib.population import merge_moments as merge_moments
from normlib.population import precise_batch_stats as precise_batch_stats
from normlib.precision import recommended_eps as recommended_eps
from normlib.quantize import MX as MX
from normlib.quantize import Asymmetric as Asymmetric
from normlib.quantize import Dual as Dual
from normlib.quantize import DualQuantized as DualQuantized
from normlib.quantize import Dynamic as Dynamic
from normlib.quantize import Quantized as Quantized
from normlib.quantize import Static as Static
from normlib.quantize import StraightThrough as StraightThrough
from normlib.quantize import dequantize as dequantize
from normlib.quantize import fake_quantize as fake_quantize
from normlib.quantize import pack as pack
from normlib.quantize import unpack as unpack
from normlib.rms import RmsNormGradients as RmsNormGradients
from normlib.rms import rms_norm as rms_norm
from normlib.rms import rms_norm_backward as rms_norm_backward
from normlib.running import running_weight as running_weight
from normlib.running import update_running as update_running
from normlib.scope import Scope as Scope
from normlib.tuning import affine_mask as affine_mask
from normlib.tuning import residual_scale_init as residual_scale_init
from normlib.tuning import train_affine_only as train_affine_only

__version__ = "0.1.0"
