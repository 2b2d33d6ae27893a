"""RNN transducer: the joint network's sum, and the loss."""

from apex.contrib.transducer import _transducer_ref
from apex.contrib.transducer.transducer import TransducerJoint, TransducerLoss

__all__ = ["TransducerJoint", "TransducerLoss", "_transducer_ref"]
