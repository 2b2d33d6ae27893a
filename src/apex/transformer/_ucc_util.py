"""Whether torch.distributed has the UCC backend."""

import torch

__all__ = ["HAS_UCC"]

HAS_UCC = torch.distributed.is_available() and torch.distributed.is_ucc_available()
