"""Which parameters of a model are hidden matrices, by what its modules are and never by shape."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

# Last or only part of a module's name that stands for an output layer, and any part of one that
# stands for an embedding, as transformers, timm, torchtune and nanoGPT call them.
_OUTPUTS = {
    "lm_head", "head", "output", "output_layer", "classifier", "cls_head", "score", "embed_out",
    "fc_out", "out_head", "prediction_head", "unembed", "generator", "logits",
}  # fmt: skip
_EMBEDDINGS = re.compile(r"(^|[._])(w[tp]e|embed\w*|\w*embedding\w*|pos_embed|positions?)([._]|$)")


def is_outer(name: str) -> bool:
    """Whether the name of a parameter is that of an embedding or an output layer."""
    parts = name.split(".")
    return bool(_EMBEDDINGS.search(name)) or (len(parts) > 1 and parts[-2] in _OUTPUTS)


def groups_for(
    model: nn.Module, *, outputs: Iterable[str] | None = None, matrices: Iterable[str] = ()
) -> list[dict[str, Any]]:
    """Make groups; see :meth:`apex.optimizers.FusedMuon.groups_for`.

    Hidden matrices are the weights of ``Linear`` and of its subclasses, of layers of apex, of
    ``Conv1D`` of transformers (not split: its blocks are columns), of ``MultiheadAttention``, whose
    joint weight of query, key and value is three matrices, and of recurrent layers, which have one
    for each gate. Output layers, embeddings, biases, norms, convolutions and parameters of other
    modules are Adam's, and so is a weight that a hidden layer shares with one of these.
    """
    outer = _outer(model, outputs)
    patterns = dict.fromkeys(matrices, False)
    splits = {id(weight): split for weight, split in _weights(model)}
    groups: dict[tuple[str, int], list[tuple[str, nn.Parameter]]] = {}
    for name, param in model.named_parameters():
        if not param.requires_grad:
            continue
        fits = [pattern for pattern in patterns if fnmatchcase(name, pattern)]
        patterns.update(dict.fromkeys(fits, True))
        is_hidden = bool(fits) or (id(param) in splits and id(param) not in outer)
        kind = ("muon", splits.get(id(param), 1)) if is_hidden else ("adam", 1)
        groups.setdefault(kind, []).append((name, param))
    unused = [pattern for pattern, used in patterns.items() if not used]
    if unused:
        raise ValueError(f"FusedMuon.groups_for: no parameter is called {', '.join(unused)}.")
    order = sorted(groups, key=lambda kind: (kind[0] == "adam", kind[1]))
    return [
        {
            "params": groups[kind],
            "algorithm": kind[0],
            **({"split": kind[1]} if kind[1] > 1 else {}),
        }
        for kind in order
    ]


def _weights(model: nn.Module) -> Iterator[tuple[nn.Parameter, int]]:
    """Weights that are matrices, and how many blocks of rows each has."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
            found = [(name, gates) for name, _ in module.named_parameters(recurse=False)]
        elif isinstance(module, nn.MultiheadAttention):
            found = [("in_proj_weight", 3)]
            found += [(f"{one}_proj_weight", 1) for one in "qkv"]
        elif isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            found = [("weight", 1)]
        elif type(module).__module__.startswith("apex."):
            named = module.named_parameters(recurse=False)
            found = [(name, 1) for name, _ in named if not is_outer(name)]
        else:
            continue
        for name, split in found:
            weight = getattr(module, name, None)
            if isinstance(weight, nn.Parameter) and weight.dim() == 2:
                yield weight, split


def _outer(model: nn.Module, outputs: Iterable[str] | None) -> set[int]:
    """The weights of embeddings and output layers."""
    modules = dict(model.named_modules())
    found = {
        id(weight)
        for one in modules.values()
        if type(one).__name__.endswith(("Embedding", "EmbeddingBag"))  # also of other libraries
        for weight in one.parameters(recurse=False)
    }
    tied = any(id(one.weight) in found for one in modules.values() if isinstance(one, nn.Linear))
    if outputs is not None:
        unknown = [name for name in outputs if name not in modules]
        if unknown:
            raise ValueError(f"FusedMuon.groups_for: no module is called {', '.join(unknown)}.")
        layers: list[nn.Module] = [modules[name] for name in outputs]
    else:
        layers = [m for m in modules.values() if type(m).__name__ == "LinearCrossEntropyLoss"]
        for name, one in modules.items():
            if name.rpartition(".")[2] in _OUTPUTS:
                linear = [part for part in one.modules() if isinstance(part, nn.Linear)]
                layers += linear[-1:] if one in linear or not name.endswith("output") else []
        named = getattr(model, "get_output_embeddings", lambda: None)()
        layers += [named] if isinstance(named, nn.Module) else []
        if not layers and not tied:
            warnings.warn(
                "FusedMuon.groups_for: no output layer was found. Pass outputs=[its name], or "
                "outputs=[] if all linear layers are hidden layers.",
                stacklevel=3,
            )
    return found | {id(weight) for one in layers for weight in one.parameters()}
