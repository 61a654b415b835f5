"""Flax nnx layers: `flax.nnx`'s normalization layers by name, argument, attribute and state, computed here.

Changing `from flax import nnx` for these classes is enough: they draw the same keys from `rngs.params` in the same
order, so a whole model starts from the same parameters, and states load in both directions (exchange `nnx.state`, not
graphdefs). Arguments that Flax does not have come last. The layers that Flax has no counterpart of are built from the
same arguments.
"""

from normlib.nnx._adaptive import AdaLayerNorm as AdaLayerNorm
from normlib.nnx._adaptive import AdaLayerNormZero as AdaLayerNormZero
from normlib.nnx._adaptive import ConditionalBatchNorm as ConditionalBatchNorm
from normlib.nnx._adaptive import DynamicTanh as DynamicTanh
from normlib.nnx._adaptive import SwitchableNorm as SwitchableNorm
from normlib.nnx._norms import BatchNorm as BatchNorm
from normlib.nnx._norms import GroupNorm as GroupNorm
from normlib.nnx._norms import InstanceNorm as InstanceNorm
from normlib.nnx._norms import LayerNorm as LayerNorm
from normlib.nnx._norms import RMSNorm as RMSNorm
from normlib.nnx._residual import AddLayerNorm as AddLayerNorm
from normlib.nnx._residual import AddRMSNorm as AddRMSNorm
from normlib.nnx._residual import BatchNormAct as BatchNormAct
from normlib.nnx._residual import GroupNormSiLU as GroupNormSiLU
