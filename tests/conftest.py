"""Shared settings: one torch thread.

The models of the tests are so small that a second thread costs more than it brings, and when anything else runs on
the same cores two OpenMP teams slow each other down tenfold. `make invariance` probes other thread counts.
"""

import torch

torch.set_num_threads(1)
