"""Functions of attention layers: softmaxes with scale and mask, rotary position embeddings."""

__all__: list[str] = []
