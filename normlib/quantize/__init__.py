"""Quantised outputs: one epilogue for every norm, instead of a fused function for each pair.

An operator that takes `quant=` hands its unrounded float32 value to `finish`; codes and scales are bit-equal to NumPy
float32 on that value (CPU, both supported JAX versions).
"""

from normlib.quantize._apply import apply as apply
from normlib.quantize._apply import fake_quantize as fake_quantize
from normlib.quantize._apply import finish as finish
from normlib.quantize._apply import out_dtype as out_dtype
from normlib.quantize._codes import DualQuantized as DualQuantized
from normlib.quantize._codes import Quantized as Quantized
from normlib.quantize._codes import dequantize as dequantize
from normlib.quantize._codes import pack as pack
from normlib.quantize._codes import unpack as unpack
from normlib.quantize._kinds import MX as MX
from normlib.quantize._kinds import Asymmetric as Asymmetric
from normlib.quantize._kinds import Dual as Dual
from normlib.quantize._kinds import Dynamic as Dynamic
from normlib.quantize._kinds import Static as Static
from normlib.quantize._kinds import StraightThrough as StraightThrough
