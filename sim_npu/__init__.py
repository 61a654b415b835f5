"""A model of an Ascend AI Core that runs Pallas-style tile kernels.

It is a model, never a measurement: every constant has a source and a confidence (`sim_npu.chips`).
"""

from sim_npu.chips import ChipSpec as ChipSpec
from sim_npu.chips import get_chip as get_chip
from sim_npu.emulation import emulate as emulate
from sim_npu.footprint import CapacityError as CapacityError
from sim_npu.hints import Hint as Hint
from sim_npu.hints import hints as hints
from sim_npu.ir import TileProgram as TileProgram
from sim_npu.lowering import lower_check as lower_check
from sim_npu.pallas_adapter import UnsupportedKernel as UnsupportedKernel
from sim_npu.plan import TilePlan as TilePlan
from sim_npu.precision import PrecisionPolicy as PrecisionPolicy
from sim_npu.result import SimReport as SimReport
from sim_npu.rounding import round_to as round_to
from sim_npu.search import PlanSearch as PlanSearch
from sim_npu.search import best_plan as best_plan
from sim_npu.search import compare as compare
from sim_npu.search import explain as explain
from sim_npu.search import rank_plans as rank_plans
from sim_npu.simulate import programs_of as programs_of
from sim_npu.simulate import simulate as simulate
from sim_npu.step_report import StepReport as StepReport
from sim_npu.step_report import compare_steps as compare_steps
from sim_npu.steps import simulate_step as simulate_step
