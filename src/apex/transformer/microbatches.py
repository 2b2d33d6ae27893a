"""Number of micro-batches in a global batch, which is constant or grows."""

from abc import ABC, abstractmethod
from collections.abc import Sequence

from apex.ops._check import ArgumentError
from apex.transformer.log_util import get_transformer_logger

__all__ = [
    "ConstantNumMicroBatches",
    "NumMicroBatchesCalculator",
    "RampupBatchsizeNumMicroBatches",
    "build_num_microbatches_calculator",
]

_LOGGER = get_transformer_logger(__name__)


class NumMicroBatchesCalculator(ABC):
    """Base class of the calculators, with their common arguments and errors.

    Args:
        micro_batch_size: Number of samples of one rank in one forward.
        data_parallel_size: Number of ranks with different samples.
        global_batch_size: Number of samples of all ranks in one step.
        decrease_batch_size_if_needed: Reduce a global batch size that is not a whole number of
            micro-batches until it is.

    Raises:
        ArgumentError: A number is not positive, or the global batch is not a whole number of
            micro-batches on each rank. It is a RuntimeError, TypeError and ValueError.
    """

    def __init__(
        self,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
    ) -> None:
        _check_positive(micro_batch_size=micro_batch_size, data_parallel_size=data_parallel_size)
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.micro_batch_size = micro_batch_size
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        self.num_micro_batches = 0
        self.current_global_batch_size = 0

    def get(self) -> int:
        """Return the number of micro-batches."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        """Return the number of samples of all ranks in one step."""
        return self.current_global_batch_size

    @abstractmethod
    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Set the number of micro-batches and the global batch size for the next step."""

    def _set(self, global_batch_size: int, check: bool) -> None:
        count, rest = divmod(global_batch_size, self.micro_batch_times_data_parallel_size)
        if self.decrease_batch_size_if_needed and count:
            global_batch_size, rest = global_batch_size - rest, 0
        if check and rest:
            raise ArgumentError(
                f"the global batch size {global_batch_size} is not divisible by micro_batch_size x "
                f"data_parallel_size = {self.micro_batch_times_data_parallel_size}"
            )
        self.num_micro_batches, self.current_global_batch_size = count, global_batch_size


class ConstantNumMicroBatches(NumMicroBatchesCalculator):
    """A constant number of micro-batches.

    The number is ``global_batch_size / (micro_batch_size * data_parallel_size)``.

    Example:
        >>> ConstantNumMicroBatches(512, 4, 16).get()
        8
    """

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
    ) -> None:
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
        _check_positive(global_batch_size=global_batch_size)
        self._set(global_batch_size, check=True)

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Do nothing: the number of micro-batches is constant."""


class RampupBatchsizeNumMicroBatches(NumMicroBatchesCalculator):
    """A global batch that grows from ``start_batch_size`` to ``global_batch_size`` in equal steps.

    Args:
        start_batch_size: The first global batch size.
        batch_size_increment: Increase of the global batch size in each step.
        ramup_samples: Number of samples until the last step. The name is spelled as in Megatron.

    Raises:
        ArgumentError: Steps of this size do not reach ``global_batch_size`` exactly.

    Example:
        >>> calculator = RampupBatchsizeNumMicroBatches(8, 8, 1000, 32, 2, 4)
        >>> calculator.update(500, True)
        >>> calculator.get_current_global_batch_size(), calculator.get()
        (16, 2)
    """

    def __init__(
        self,
        start_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool = False,
    ) -> None:
        super().__init__(micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
        _check_positive(
            start_batch_size=start_batch_size,
            batch_size_increment=batch_size_increment,
            global_batch_size=global_batch_size,
        )
        growth = global_batch_size - start_batch_size
        if growth < 0 or growth % batch_size_increment or ramup_samples < 0:
            raise ArgumentError(
                f"cannot ramp up batches from {start_batch_size} to {global_batch_size} by "
                f"{batch_size_increment} over {ramup_samples} samples; the difference must be a "
                "multiple of the increment, and no number negative"
            )
        self.start_batch_size = start_batch_size
        self.batch_size_increment = batch_size_increment
        self.ramup_samples = ramup_samples
        self.global_batch_size = global_batch_size
        self.rampup_samples_per_increment = ramup_samples / max(1, growth // batch_size_increment)
        self.update(0, False)

    def update(self, consumed_samples: int, consistency_check: bool) -> None:
        """Set the sizes for the next step.

        Args:
            consumed_samples: Number of samples that all steps have used so far.
            consistency_check: Raise an error if the global batch is not a whole number of
                micro-batches. Otherwise the number is rounded down.
        """
        size = self.global_batch_size
        if consumed_samples <= self.ramup_samples and self.rampup_samples_per_increment:
            steps = int(consumed_samples / self.rampup_samples_per_increment)
            size = min(size, self.start_batch_size + steps * self.batch_size_increment)
        self._set(size, consistency_check)


def build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> ConstantNumMicroBatches | RampupBatchsizeNumMicroBatches:
    """Make a calculator. Rank 0 logs its kind at level INFO.

    If the global batch grows, pass ``(start_batch_size, batch_size_increment, ramup_samples)`` as
    ``rampup_batch_size``. The classes describe the other arguments.
    """
    sizes = (global_batch_size, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed)
    if rampup_batch_size is None:
        constant = ConstantNumMicroBatches(*sizes)
        if rank == 0:
            _LOGGER.info("number of micro-batches: %d", constant.get())
        return constant
    if len(rampup_batch_size) != 3:
        raise ArgumentError(
            f"rampup_batch_size is {rampup_batch_size}; pass (start_batch_size, "
            "batch_size_increment, ramup_samples)."
        )
    start, increment, samples = map(int, rampup_batch_size)
    if rank == 0:
        _LOGGER.info(
            "global batch size: from %d to %d by %d over %d samples",
            start, global_batch_size, increment, samples,
        )  # fmt: skip
    return RampupBatchsizeNumMicroBatches(start, increment, samples, *sizes)


def _check_positive(**numbers: int) -> None:
    for name, number in numbers.items():
        if number <= 0:
            raise ArgumentError(f"{name} is {number}; pass a positive number.")
