"""Thresholds, to be filled."""

LEAST = {
    "row_norm": 2**23,
    "cross_entropy": 2**22,
    "group_norm": 2**22,
    "swiglu": 2**20,
    "rotary": 2**20,
    "scaled_softmax": 2**20,
    "focal_loss": 2**20,
    "index_mul_2d": 2**20,
}
