"""Claims of the source articles, each put to the test: `python -m benchmarks.claims --write` fills docs/claims.md.

A topic is a file: it registers its claims when imported. `registry` says what a claim is and how its verdict follows
from its figures, `page` writes the table.
"""

from benchmarks.claims import channels as channels
from benchmarks.claims import fusion as fusion
from benchmarks.claims import memory as memory
from benchmarks.claims import networks as networks
from benchmarks.claims import training as training
from benchmarks.claims import work as work
from benchmarks.claims.registry import CLAIMS as CLAIMS
from benchmarks.claims.registry import Claim as Claim
from benchmarks.claims.registry import Figure as Figure
from benchmarks.claims.registry import Outcome as Outcome
