"""ResNet's bottleneck block with frozen batch norms.

``SpatialBottleneck`` and the halo exchangers can be imported and raise ``NotImplementedError`` when
they are used; ``REFUSED`` says why, and what to use.
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
