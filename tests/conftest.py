"""Shared settings: two threads would share this machine's cores with whatever else runs."""

import torch

torch.set_num_threads(min(2, torch.get_num_threads()))
