"""Whether torch.distributed has the UCC backend."""

import torch

HAS_UCC = torch.distributed.is_available() and torch.distributed.is_ucc_available()
