"""Normalization for JAX: accurate, synchronised across devices, drop-in for Flax.

The functions are here; Flax layers are in `normlib.linen` and `normlib.nnx`.
"""

from normlib.batch import BatchNormOutput as BatchNormOutput
from normlib.batch import batch_norm as batch_norm
from normlib.batch import batch_norm_inference as batch_norm_inference
from normlib.engine import Normalized as Normalized
from normlib.engine import affine as affine
from normlib.engine import normalize as normalize
from normlib.group import group_norm as group_norm
from normlib.group import instance_norm as instance_norm
from normlib.layer import layer_norm as layer_norm
from normlib.moments import Moments as Moments
from normlib.moments import welford_scan as welford_scan
from normlib.passes import use_backend as use_backend
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
from normlib.running import update_running as update_running
from normlib.scope import Scope as Scope

__version__ = "0.1.0"
