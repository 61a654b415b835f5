"""Flax linen layers: `flax.linen`'s normalization layers by name, argument, parameter and collection, computed here.

Changing `from flax import linen as nn` for these classes is enough: parameters, running statistics and initial values
stay the same, and checkpoints load in both directions. Arguments that Flax does not have come last. The layers that
Flax has no counterpart of are built from the same arguments.
"""

from normlib.linen._adaptive import AdaLayerNorm as AdaLayerNorm
from normlib.linen._adaptive import AdaLayerNormZero as AdaLayerNormZero
from normlib.linen._adaptive import ConditionalBatchNorm as ConditionalBatchNorm
from normlib.linen._adaptive import DynamicTanh as DynamicTanh
from normlib.linen._adaptive import SwitchableNorm as SwitchableNorm
from normlib.linen._norms import BatchNorm as BatchNorm
from normlib.linen._norms import GroupNorm as GroupNorm
from normlib.linen._norms import InstanceNorm as InstanceNorm
from normlib.linen._norms import LayerNorm as LayerNorm
from normlib.linen._norms import RMSNorm as RMSNorm
from normlib.linen._residual import AddLayerNorm as AddLayerNorm
from normlib.linen._residual import AddRMSNorm as AddRMSNorm
from normlib.linen._residual import BatchNormAct as BatchNormAct
from normlib.linen._residual import GroupNormSiLU as GroupNormSiLU
