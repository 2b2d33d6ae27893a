"""ResNet's bottleneck block with frozen batch norms."""

from apex._missing import explain_attributes
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
