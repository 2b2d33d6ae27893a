"""State dicts of the sharded optimizers.

``state[number of a parameter]`` has ``param``, ``exp_avg`` and ``exp_avg_sq`` on the CPU: whole in
format 2, which any number of ranks can load, and this rank's fragments, flat, in format 1. Their
``param`` is the weight as it is stepped, with ``store_param_remainders`` in float32. Moments before
the first step are zeros, and groups have a step: ``torch.distributed.checkpoint`` loads what is
there. Its ``get_state_dict`` replaces numbers by names, and takes no other keys of ``state``.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from apex.contrib.optimizers._scaled_moments import narrow, widen
from apex.contrib.optimizers._sharded import ShardedOptimizer
from apex.ops.lists.collectives import all_gather, wait
from apex.ops.lists.shards import Piece, ShardBucket
from apex.ops.lists.storage import join_bits, split_bits


class SavedShards(ShardedOptimizer):
    """A sharded optimizer with state dicts."""

    @torch.no_grad()
    def state_dict(
        self, *, state_dict_format: int | None = None, gather_on_root: bool | None = None
    ) -> dict[str, Any]:
        """Return the state. All ranks must call it.

        Args:
            state_dict_format: 2 (the default) gathers whole tensors, which any number of ranks can
                load. 1 is this rank's part. Only the same rank of as many ranks can load it.
            gather_on_root: With format 2, whether only rank 0 receives the tensors; by default all
                ranks do.

        Returns:
            A dict with ``"state"``, ``"param_groups"`` and ``"format"``, and with ``"shards"`` in
            format 1.

        Raises:
            ValueError: The format is unknown, or you passed ``gather_on_root`` with format 1.
        """
        form = 2 if state_dict_format is None else state_dict_format
        if form not in (1, 2) or (form == 1 and gather_on_root):
            raise ValueError(
                f"{self._name}.state_dict: state_dict_format was {state_dict_format} and "
                f"gather_on_root {gather_on_root}; allowed are 2, with or without gather_on_root, "
                "and 1 without it."
            )
        self.param_sync()
        self._prepare_buckets()
        groups = [{"step": 0, **group} for group in super().state_dict()["param_groups"]]
        numbers, state = self._numbering(), dict[int, Any]()
        keeps = not gather_on_root or torch.distributed.get_rank(self._groups.all) == 0
        for bucket in self._buckets:
            places = self._own_part(bucket) if form == 1 else self._gathered(bucket)
            if keeps:
                state |= {numbers[id(bucket.params[n])]: one for n, one in places.items()}
        layout = {"shards": self._layout()} if form == 1 else {}
        return {"state": state, "param_groups": groups, "format": form, **layout}

    def _numbering(self) -> dict[int, int]:
        return {id(param): number for number, param in enumerate(self._params())}

    def _layout(self) -> dict[str, Any]:
        group, numbers = self._groups.shards, self._numbering()
        return {
            "rank": torch.distributed.get_rank(group),
            "ranks": torch.distributed.get_world_size(group),
            "buckets": [[numbers[id(param)] for param in b.params] for b in self._buckets],
        }

    def _saved(self, bucket: ShardBucket, piece: Piece) -> dict[str, torch.Tensor]:
        """The state of a fragment."""
        state = self._shard.state.get(piece.tensor, {})
        weight = piece.tensor if bucket.main is not None else bucket.part_of_param(piece)
        if self._options.store_param_remainders:
            low = state.get("low_bits")
            weight = weight.float() if low is None else join_bits(weight.contiguous(), low)
        new = functools.partial(torch.zeros_like, weight, dtype=self._saved_dtype(bucket))
        kept = functools.partial(widen, state) if self._options.with_scaled_states else state.get
        slots = {slot: kept(slot) if slot in state else new() for slot in self.slots}
        return {"param": weight, **slots}

    def _saved_dtype(self, bucket: ShardBucket) -> torch.dtype:
        """Of moments in state dicts."""
        return torch.float32 if self._options.with_scaled_states else bucket.kinds.state

    def _own_part(self, bucket: ShardBucket) -> dict[int, dict[str, torch.Tensor]]:
        return {
            piece.place: {key: x.cpu().clone() for key, x in self._saved(bucket, piece).items()}
            for piece in bucket.pieces
        }

    def _gathered(self, bucket: ShardBucket) -> dict[int, dict[str, torch.Tensor]]:
        """The state of whole parameters, by place."""
        assert self._own is not None
        saved = [(piece, self._saved(bucket, piece)) for piece in bucket.pieces]
        device, wide = bucket.params[0].device, bucket.kinds.state
        whole: dict[int, dict[str, torch.Tensor]] = {n: {} for n in range(len(bucket.params))}
        is_stored = bucket.main is not None or self._options.store_param_remainders
        dtypes = {"param": wide if is_stored else bucket.params[0].dtype}
        wide = self._saved_dtype(bucket)
        for slot in ("param", *self.slots):
            flat = torch.zeros(bucket.size, dtype=dtypes.get(slot, wide), device=device)
            own = flat[bucket.own]
            for piece, one in saved:
                own[piece.here].copy_(one[slot])
            wait(all_gather(flat, own, self._own.shards), self._name)
            for place, view in enumerate(bucket.views(flat)):
                whole[place][slot] = view.cpu().clone()
        return whole

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state of either format, or of torch's ``set_state_dict``, on every rank.

        It does not load the model's weights. Load them before or afterwards.

        Raises:
            ValueError: The state does not match this optimizer. Nothing changes.
        """
        self.param_sync()
        self._prepare_buckets()
        state, form = state_dict.get("state"), state_dict.get("format", 2)
        problem, layout, saved = "", self._layout(), state_dict.get("shards") or {}
        if not isinstance(state, Mapping) or "param_groups" not in state_dict or form not in (1, 2):
            has = f"the keys {', '.join(map(str, state_dict))}" if state_dict else "no keys"
            problem = (
                f"the dict has format {form!r} and {has}. Pass the dict that state_dict() returned"
            )
        elif form == 1 and saved != layout:
            problem = (
                f"the state is the part of rank {saved.get('rank')} of {saved.get('ranks')}, and "
                f"this is rank {layout['rank']} of {layout['ranks']}; format 1 needs the same "
                "ranks and buckets. Save with state_dict_format=2"
            )
        if problem:
            raise ValueError(f"{self._name}.load_state_dict: {problem}.")
        assert state is not None
        groups = _with_steps(state_dict["param_groups"], state)
        names = [name for group in groups for name in group["params"]]
        by_number = {number: state[name] for number, name in enumerate(names) if name in state}
        found = [
            (b, piece, self._part(by_number, form, b, piece))
            for b, piece in self._fragments.values()
        ]
        super().load_state_dict({"state": {}, "param_groups": groups})
        self._seem_to_have_state()
        for bucket, piece, parts in found:
            weight = parts.pop("param")
            kept: dict[str, torch.Tensor] = self._shard.state[piece.tensor]
            kept.clear()
            for key, x in parts.items():
                kept[key] = x.to(weight.device, bucket.kinds.state, copy=True)
                if self._options.with_scaled_states:
                    narrow(kept, key, x.to(weight.device, torch.float32))
            if bucket.main is not None:
                piece.tensor.copy_(weight)
            elif self._options.store_param_remainders:
                kept["low_bits"] = split_bits(weight.float())[1]
        for bucket in self._buckets:
            bucket.versions = None  # model and optimizer are loaded in any order

    def _part(
        self, state: Mapping[int, Any], form: int, bucket: ShardBucket, piece: Piece
    ) -> dict[str, torch.Tensor]:
        """What was saved of a fragment, checked."""
        param = bucket.params[piece.place]
        number = self._numbering()[id(param)]
        saved = state.get(number, {})
        size = (piece.part.stop - piece.part.start,) if form == 1 else tuple(param.shape)
        parts = {}
        for key in ("param", *(self.slots if {*self.slots} & {*saved} else ())):
            x = saved.get(key)
            if x is None or tuple(x.shape) != size:
                has = f"has shape {tuple(x.shape)}" if x is not None else "is missing"
                raise ValueError(
                    f"{self._name}.load_state_dict: the saved {key} of parameter {number} {has}, "
                    f"and this optimizer needs {size}. Load the state into the model that it was "
                    "saved with. With gather_on_root=True only the state of rank 0 contains "
                    "tensors."
                )
            part = x if form == 1 else x.reshape(-1)[piece.part]
            parts[key] = part.detach().to(param.device)
        return parts


def _with_steps(groups: Sequence[dict[str, Any]], state: Mapping[Any, Any]) -> list[dict[str, Any]]:
    """Saved groups with a step each; NVIDIA's Apex saved one for all, in the state."""
    has_steps = any("step" in group for group in groups)  # then one without was never stepped
    step = 0 if has_steps else int(state.get("step", 0))
    return [{"step": step, **group} for group in groups]
