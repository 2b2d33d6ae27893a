"""ResNet's bottleneck block with frozen batch norms.

You can import ``SpatialBottleneck`` and the halo exchangers, but constructing one raises
``NotImplementedError``. The error says why, and what to use instead.
"""

from apex._upstream.missing import explain_attributes
from apex.contrib.bottleneck.bottleneck import (
    REFUSED,
    Bottleneck,
    HaloExchangerAllGather,
    HaloExchangerNoComm,
    HaloExchangerPeer,
    HaloExchangerSendRecv,
    SpatialBottleneck,
)

__all__ = [
    "REFUSED",
    "Bottleneck",
    "HaloExchangerAllGather",
    "HaloExchangerNoComm",
    "HaloExchangerPeer",
    "HaloExchangerSendRecv",
    "SpatialBottleneck",
]

explain_attributes(__name__)
