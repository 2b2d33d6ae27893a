"""What users rely on, in 54 sentences; how a bug is planted against each, and which test sees it.

A test that was never red proves little. Each of these bugs was planted once and its ``test`` seen
red; ``python -m tests.plant NAME`` does so again, in a copy of the tree. ``plant`` says what the
bug is without naming a file, so that code which has changed can be broken in the same way: write
new ``old`` and ``new`` texts from the sentence, and see the test red. ``old`` occurs exactly once
in ``file``, which ``tests/test_plant.py`` checks.

The tests named here are the fastest cases that were red, most of them in the quick selection.
"""

from typing import NamedTuple


class Behaviour(NamedTuple):
    """One sentence about the code, and a bug that breaks it.

    Attributes:
        name: What ``python -m tests.plant`` calls it.
        users: What they rely on.
        plant: The bug, in words.
        test: A case that is red with the bug.
        file: Where the bug is planted.
        old: The text that is replaced.
        new: What replaces it.
    """

    name: str
    users: str
    plant: str
    test: str
    file: str
    old: str
    new: str


AMP = [
    Behaviour(
        "scale-grows-in-time",
        "After growth_interval steps without an overflow the loss scale grows, not one step later.",
        plant="Let the scale grow when the count of clean steps is above the interval.",
        test="tests/amp/scaling/test_scaler.py::test_defaults",
        file="src/apex/amp/scale.py",
        old="full = (clean >= self._scale_seq_len)",
        new="full = (clean > self._scale_seq_len)",
    ),
    Behaviour(
        "overflow-restarts-count",
        "After an overflow the steps until the scale grows are counted from 0.",
        plant="Keep the count of clean steps when the scale backs off.",
        test="tests/amp/scaling/test_scaler.py::test_an_overflow_starts_the_count_of_clean_steps_anew"
        "[LossScaler]",
        file="src/apex/amp/scale.py",
        old="torch.stack((lower, torch.zeros_like(clean), steps))",
        new="torch.stack((lower, clean, steps))",
    ),
    Behaviour(
        "any-pass-skips",
        "A step for several backward passes is skipped if any of them was not finite.",
        plant="Read the flag of the last pass alone.",
        test="tests/amp/gradients/test_ledger.py::test_rare_sequences_after_a_skip"
        "[('O1', 'dynamic')-the other optimizer's turn]",
        file="src/apex/amp/gradients/overflow.py",
        old="for index, one in enumerate(passes):",
        new="for index, one in [*enumerate(passes)][-1:]:",
    ),
    Behaviour(
        "log-names-scaler",
        "amp's log of a skipped step shows the number of the loss scaler that it belongs to.",
        plant="Log the number of the step's first pass, instead of the one that was not finite.",
        test="tests/amp/legacy/test_surface.py::test_a_skipped_step_names_the_scaler_of_the_pass_that_overflowed"
        "[1]",
        file="src/apex/amp/gradients/overflow.py",
        old="one.index, numbers[",
        new="passes[0].index, numbers[",
    ),
    Behaviour(
        "each-loss-has-its-scale",
        "With num_losses each loss_id has a scale of its own, which other losses do not change.",
        plant="Take the first scaler for every loss_id.",
        test="tests/amp/gradients/test_skipped_steps.py"
        "::test_a_watch_is_told_the_scale_of_the_pass_and_each_step_once",
        file="src/apex/amp/scaling.py",
        old="scaler = training.loss_scalers[loss_id]",
        new="scaler = training.loss_scalers[loss_id] and training.loss_scalers[0]",
    ),
    Behaviour(
        "delayed-passes-share-a-scale",
        "Passes with delay_unscale accumulate at the scale of the first, even if it has changed.",
        plant="Let a pass that continues a delayed one take the scaler's scale now.",
        test="tests/amp/gradients/test_ledger.py::test_rare_sequences"
        "[('O2', 'dynamic')-a pass continues at the scale of the first-None]",
        file="src/apex/amp/gradients/ledger.py",
        old="            before.loss = self.loss\n",
        new="            before.loss = self.loss\n"
        "            before.scale = self.scaler.scale_on(self.loss.device)\n",
    ),
    Behaviour(
        "delayed-check-is-made-up",
        "An overflow in a delay_overflow_check pass lowers the scale at the next check.",
        plant="Forget the flags of unchecked passes at the next check.",
        test="tests/amp/scaling/test_scaler.py::test_flags_of_passes_without_a_check_add_up",
        file="src/apex/amp/scale.py",
        old="found, self._unchecked = torch.maximum(found, self._unchecked), None",
        new="self._unchecked = None",
    ),
    Behaviour(
        "blocks-accumulate",
        "Gradients of several scale_loss blocks add up, unscaled, as those of plain backwards do.",
        plant="Drop the gradients that were there before the block.",
        test="tests/amp/gradients/test_stash.py::test_an_optimizer_of_one_flat_parameter[O0]",
        file="src/apex/amp/gradients/ledger.py",
        old="self.stash.add(params.for_stepped(self.stash))",
        new="pass",
    ),
    Behaviour(
        "zero-grad-forgets-overflow",
        "After an overflow, zero_grad() and a finite pass the step is taken.",
        plant="Let zero_grad() keep the passes that the next step looks at.",
        test="tests/amp/gradients/test_cleared_gradients.py::test_an_overflow_goes_with_the_gradients_that_zero_grad_zeroes"
        "[O2]",
        file="src/apex/amp/gradients/ledger.py",
        old="            self.stash = Stash()\n        self.passes.clear()\n",
        new="            self.stash = Stash()\n",
    ),
    Behaviour(
        "state-dict-has-masters",
        "At O2 and O5 model.state_dict() has the masters' float32 values, not rounded weights.",
        plant="Give the rounded weight, widened, as the entry.",
        test="tests/amp/checkpoint/test_checkpoint.py::test_weights_loaded_in_mid_training_are_respected[O5]",
        file="src/apex/amp/gradients/state_dicts.py",
        old="    return master.tensor.detach()\n",
        new="    return weight.detach().float()\n",
    ),
    Behaviour(
        "master-follows-weight",
        "What a program writes into a 16-bit weight reaches its master, so the step keeps it.",
        plant="Ignore writes to a weight that has a master.",
        test="tests/amp/gradients/test_written_masters.py::test_weights_that_were_given_other_memory_are_taken_over"
        "[O2]",
        file="src/apex/amp/gradients/parameters.py",
        old="master.take_over(weight, both=is_written, may_return=waits)",
        new="pass",
    ),
    Behaviour(
        "grad-scaler-clips-unscaled",
        "GradScaler.clip_grad_norm_ clips 16-bit gradients, and the step divides by the scale too.",
        plant="Hand the optimizer the inverse scale without the clipping coefficient.",
        test="tests/amp/scaling/test_grad_scaler.py::test_clipping_float32[ours-False]",
        file="src/apex/amp/grad_scaler.py",
        old="factor = inverse if factor is None else inverse * factor.to(inverse.device)",
        new="factor = inverse",
    ),
    Behaviour(
        "checkpoint-has-clean-steps",
        "amp.load_state_dict() restores how many clean steps were counted, besides the scale.",
        plant="Load the scale alone.",
        test="tests/amp/checkpoint/test_checkpoint.py"
        "::test_the_scale_goes_from_amp_to_a_grad_scaler_and_back_as_their_errors_say",
        file="src/apex/amp/scale.py",
        old="self.numbers[CLEAN] = float(unskipped)",
        new="pass",
    ),
    Behaviour(
        "float-list",
        "At O1 functions of the float list, such as log_softmax, compute in float32 on a CPU too.",
        plant="Leave log_softmax out of the functions that are cast to float32 on a CPU.",
        test="tests/amp/casting/test_functions.py::test_float[torch.nn.functional.log_softmax]",
        file="src/apex/amp/casting/dispatcher.py",
        old='"softplus softmax.int log_softmax.int layer_norm',
        new='"softplus softmax.int layer_norm',
    ),
    Behaviour(
        "reset-restores-functions",
        "amp.reset() puts every function that O1 has replaced back.",
        plant="Leave the function that was wrapped first as it is.",
        test="tests/amp/casting/test_rules.py::test_reset_restores_every_attribute",
        file="src/apex/amp/casting/rules.py",
        old="        while _patches:\n",
        new="        while len(_patches) > 1:\n",
    ),
    Behaviour(
        "batchnorm-stays-float32",
        "keep_batchnorm_fp32 leaves every batchnorm layer in float32, also one without weights.",
        plant="Convert batchnorm layers that are not affine.",
        test="tests/amp/initialize/test_modules.py::test_which_weights_are_cast[O2-None]",
        file="src/apex/amp/casting/models.py",
        old="(keep_batchnorm and isinstance(module, private.BatchNorm))",
        new="(keep_batchnorm and isinstance(module, private.BatchNorm) and module.affine)",
    ),
    Behaviour(
        "backward-without-casts",
        "Inside of a scale_loss block nothing is cast, so a backward is not cast a second time.",
        plant="Leave casts on in the block.",
        test="tests/amp/casting/test_casts.py::test_backward_functions_written_in_python_are_not_cast",
        file="src/apex/amp/scaling.py",
        old="            this = this.begin()\n            self._off = switches.off()\n"
        "            self._off.__enter__()\n",
        new="            this = this.begin()\n            self._off = contextlib.nullcontext()\n",
    ),
    Behaviour(
        "ranks-skip-together",
        "An overflow on one rank of a process_group or mesh skips the step on all of them.",
        plant="Reduce the flag to the smallest of the ranks.",
        test="tests/amp/ranks/test_agreement.py::test_a_group_takes_or_skips_each_step_together"
        "[no gradients on the other rank]",
        file="src/apex/amp/gradients/agreement.py",
        old="all_reduce(found_inf, torch.distributed.ReduceOp.MAX, group=group)",
        new="all_reduce(found_inf, torch.distributed.ReduceOp.MIN, group=group)",
    ),
    Behaviour(
        "ranks-average",
        "DistributedDataParallel gives each rank the mean; one without a gradient counts as zeros.",
        plant="Send what is in memory where a rank has no gradient.",
        test="tests/parallel/test_distributed.py::test_ranks_are_equal[unused_parameters ()]",
        file="src/apex/parallel/_bucket.py",
        old="self.views[place].zero_()",
        new="self.views[place].fill_(1.0)",
    ),
    Behaviour(
        "fused-step-clips-down-only",
        "With fused_step amp.clip_grad_norm_ leaves gradients below max_norm as they are.",
        plant="Multiply gradients up to max_norm, too.",
        test="tests/amp/optimizer/test_fused_step.py::test_after_a_fused_step_passes_find_no_old_gradients"
        "[O2-inf]",
        file="src/apex/amp/gradients/fused.py",
        old="(max_norm / (norm + 1e-6)).clamp(max=1.0)",
        new="(max_norm / (norm + 1e-6))",
    ),
]

OPTIMIZERS = [
    Behaviour(
        "groups-keep-their-eps",
        "Parameter groups that differ in one number are stepped with their own, never merged.",
        plant="Merge groups that differ in eps alone into one launch.",
        test="tests/optimizers/test_random_programs.py::test_random_programs_equal_torchs"
        "[CPU-Adagrad]",
        file="src/apex/optimizers/_step.py",
        old="map(group.get, numbers)",
        new='map(group.get, [n for n in numbers if n != "eps"])',
    ),
    Behaviour(
        "skipped-step-is-not-counted",
        "A step that is skipped does not count for the bias corrections of the next.",
        plant="Count a step before it is found that it is to be skipped.",
        test="tests/optimizers/test_every_optimizer.py::test_a_skipped_step_changes_nothing"
        "[None-FusedAdam, L2]",
        file="src/apex/optimizers/_base.py",
        old="            if is_skipped:\n                return\n",
        new="            if is_skipped:\n                if self._counts_steps:\n"
        "                    count_steps(self._counted_groups(), None)\n                return\n",
    ),
    Behaviour(
        "weight-decay-mode",
        "adam_w_mode decides whether weight decay is decoupled or a part of the gradient.",
        plant="Put the weight decay into the gradient in both modes.",
        test="tests/optimizers/test_formulas.py::test_formula[FusedLAMB-torch.float64-{}-None]",
        file="src/apex/ops/updates/adam.py",
        old="return (0.0, weight_decay) if decoupled else (weight_decay, 0.0)",
        new="return (weight_decay, 0.0)",
    ),
    Behaviour(
        "adamw-is-not-adam",
        "FusedAdam refuses a state of torch.optim whose weight decay has the other mode.",
        plant="Load it and step with this optimizer's mode.",
        test="tests/optimizers/test_fused_adam.py::test_the_other_optimizers_weight_decay_is_refused"
        "[AdamW-True]",
        file="src/apex/optimizers/fused_adam.py",
        old="if bool(decoupled) != self.adam_w_mode",
        new="if False",
    ),
    Behaviour(
        "lamb-moves-zero-weights",
        "LAMB's trust ratio is 1 for weights of zeros, so that these begin to move.",
        plant="Let the ratio be 0 where the norm of the weights is.",
        test="tests/optimizers/test_fused_lamb.py::test_no_ratio_without_a_norm[param-reference]",
        file="src/apex/ops/updates/lamb.py",
        old="params.logical_and(terms)",
        new="terms != 0",
    ),
    Behaviour(
        "max-grad-norm-clips-down-only",
        "max_grad_norm leaves gradients alone whose norm is below it.",
        plant="Multiply gradients up to max_grad_norm, too.",
        test="tests/optimizers/test_fused_lamb.py::test_clipping_looks_at_unscaled_gradients"
        "[False-None]",
        file="src/apex/ops/lists/clip.py",
        old="factor * (max_norm / size) if size > max_norm else factor",
        new="factor * (max_norm / size)",
    ),
    Behaviour(
        "lion-betas",
        "Lion's first beta is for the sign of the update, the second for the average that is kept.",
        plant="Swap the two betas.",
        test="tests/optimizers/test_fused_lion.py::test_by_hand[reference]",
        file="src/apex/ops/updates/lion.py",
        old="lr, beta1, beta2, decay = self",
        new="lr, beta2, beta1, decay = self",
    ),
    Behaviour(
        "novograd-first-norm",
        "NovoGrad begins with the norm of the first gradient, unless init_zero is set.",
        plant="Begin with 0 in any case.",
        test="tests/optimizers/test_fused_novograd.py::test_parameters_that_come_late_or_pause"
        "[None]",
        file="src/apex/ops/updates/novograd.py",
        old="torch.where(norms < 0, 0.0 if self.init_zero else current, norms)",
        new="torch.where(norms < 0, 0.0, norms)",
    ),
    Behaviour(
        "sgd-first-buffer",
        "SGD's first momentum buffer is the whole gradient, in spite of dampening, as torch's is.",
        plant="Dampen the first gradient, too.",
        test="tests/optimizers/test_fused_sgd.py::test_a_parameter_that_comes_late_starts_its_own_history"
        "[reference]",
        file="src/apex/ops/updates/sgd.py",
        old="torch.where(s.first != 0, total + 0.0, buffer)",
        new="torch.where(s.first != 0, s.one_minus_dampening * total + 0.0, buffer)",
    ),
    Behaviour(
        "low-bits-follow-weight",
        'With storage="low_bits" or "kahan" a weight that a program writes is stepped from there.',
        plant="Keep the low bits of the former weight.",
        test="tests/optimizers/test_written_weights.py::test_a_written_weight_is_stepped_as_it_was_written"
        "[<lambda>-reference-prune-low_bits]",
        file="src/apex/optimizers/_written.py",
        old="            column.zero_()\n",
        new="            pass\n",
    ),
    Behaviour(
        "moments-stay-float32",
        "load_state_dict() keeps float32 moments of 16-bit parameters, which torch would round.",
        plant="Give loaded moments the dtype of the parameter.",
        test="tests/optimizers/test_every_optimizer.py::test_resuming_is_bit_exact"
        "[dtype0-FusedAdam]",
        file="src/apex/optimizers/_checkpoint.py",
        old="dtype = value.dtype if keeps else optimizer._kept_dtype(key, param)",
        new="dtype = value.dtype if keeps else param.dtype",
    ),
    Behaviour(
        "lr-in-a-tensor",
        "A learning rate in a float32 tensor on the CPU steps to the same bits as the number.",
        plant="Widen the float32 number as it is: 0.001 becomes 0.0010000000475.",
        test="tests/optimizers/test_formulas.py::test_formula"
        "[FusedAdam, capturable-torch.float64-{}-None]",
        file="src/apex/optimizers/_step.py",
        old="for digits in (6, 7, 8):",
        new="for digits in ():",
    ),
]

OPS = [
    Behaviour(
        "smoothing-over-all-classes",
        "Label smoothing is spread over all classes, in the gradient of the kernel as well.",
        plant="Spread it over the classes but one.",
        test="tests/contrib/test_xentropy.py::test_other_integer_labels_and_strides",
        file="src/apex/kernels/cross_entropy.py",
        old="smoothing / columns",
        new="smoothing / (columns - 1)",
    ),
    Behaviour(
        "masked-rows-are-zero",
        "A row of which everything is masked gives zeros from a masked softmax, not NaN or 1 / n.",
        plant="Take the softmax of such a row as of any other, in the definition.",
        test="tests/ops/test_scaled_softmax.py::test_rows_of_zeros_where_a_mask_is_given"
        "[reference]",
        file="src/apex/ops/layers/scaled_softmax.py",
        old="y = y.masked_fill(z.amax(-1, keepdim=True) <= MASKED, 0.0)",
        new="pass",
    ),
    Behaviour(
        "mean-of-long-rows",
        "The mean of a row that is wider than a kernel's tile is over all of its elements.",
        plant="Divide by one element less.",
        test="tests/ops/test_row_norms.py::test_rows_wider_than_a_tile"
        "[layer-17000-torch.float32-triton]",
        file="src/apex/kernels/row_norms/kernels.py",
        old="mean = tl.sum(means * counts, axis=0) / n_cols",
        new="mean = tl.sum(means * counts, axis=0) / (n_cols - 1)",
    ),
    Behaviour(
        "norm-eps-in-the-root",
        "A norm adds eps to the variance, below the root.",
        plant="Add eps to the root.",
        test="tests/ops/test_row_norms.py::test_without_weight[layer-torch.float32-triton]",
        file="src/apex/kernels/row_norms/kernels.py",
        old="tl.div_rn(1.0, tl.sqrt_rn(variance + eps))",
        new="tl.div_rn(1.0, tl.sqrt_rn(variance) + eps)",
    ),
    Behaviour(
        "rows-of-any-length",
        "Rows that do not fill a kernel's block are normalized by their own elements alone.",
        plant="Count the elements of the block beyond the row.",
        test="tests/ops/test_row_norms.py::test_without_weight[layer-torch.float32-triton]",
        file="src/apex/kernels/row_norms/kernels.py",
        old="x = tl.where(inside, x - mean[:, None], 0.0)",
        new="x = x - mean[:, None]",
    ),
    Behaviour(
        "clip-grad-clips-down-only",
        "contrib's clip_grad_norm_ leaves gradients alone whose norm is below max_norm.",
        plant="Multiply gradients up to max_norm, too.",
        test="tests/contrib/test_clip_grad.py::test_like_torch",
        file="src/apex/ops/lists/clip.py",
        old="return (max_norm / (norm + 1e-6)).clamp(max=1.0).reshape(())",
        new="return (max_norm / (norm + 1e-6)).reshape(())",
    ),
    Behaviour(
        "clip-grad-refuses-inf",
        "clip_grad_norm_(error_if_nonfinite=True) raises for an inf as for a NaN.",
        plant="Raise for NaN alone.",
        test="tests/contrib/test_clip_grad.py::test_what_is_not_finite[None-inf]",
        file="src/apex/ops/lists/clip.py",
        old="not norm.isfinite()",
        new="norm.isnan()",
    ),
    Behaviour(
        "op-backward-without-autocast",
        "The backward of an operation computes in the dtypes of its forward, under autocast too.",
        plant="Let autocast cast what the backward computes.",
        test="tests/ops/test_op.py::test_autocast_does_not_change_a_backward",
        file="src/apex/ops/_op.py",
        old="if _autocasts() and _runtime.autocasts(dy.device.type):",
        new="if False:",
    ),
    Behaviour(
        "synced-statistics-by-count",
        "SyncBatchNorm's statistics are those of all samples, however many each rank has.",
        plant="Give every rank that has samples the same weight.",
        test="tests/ops/test_batch_norm.py::test_processes_together"
        "[functions-False-(8, 24)-torch.float32]",
        file="src/apex/ops/norms/batch_norm.py",
        old="share = counts / total.clamp(min=1)",
        new="share = (counts > 0).to(counts.dtype) / (counts > 0).sum(0).clamp(min=1)",
    ),
    Behaviour(
        "kernel-flags-inf",
        "A kernel over lists of gradients sets its flag for inf as well as for NaN.",
        plant="Set the flag for NaN alone.",
        test="tests/multi_tensor_apply/test_norms.py::test_what_is_not_finite_is_seen_anywhere"
        "[triton-sizes2-inf]",
        file="src/apex/kernels/multi_tensor.py",
        old='bad = tl.where(tl.abs(new[FLAGS[i]]) < float("inf"), bad, 1.0)',
        new="bad = tl.where(new[FLAGS[i]] == new[FLAGS[i]], bad, 1.0)",
    ),
]

DEBUG = [
    Behaviour(
        "first-operation-is-named",
        "The report names the first operation whose result was not finite, not a later one.",
        plant="Name the last one.",
        test="tests/debug/test_causes.py::test_cause[range-power]",
        file="src/apex/debug/explain.py",
        old="            return min(inside, key=_order)\n",
        new="            return max(inside, key=_order)\n",
    ),
    Behaviour(
        "scale-that-is-finite",
        "Where the loss scale is too high, the report says the highest scale that is finite.",
        plant="Say twice that scale.",
        test="tests/debug/test_causes.py"
        "::test_the_scale_that_is_named_is_the_highest_power_of_two_that_is_finite",
        file="src/apex/debug/explain.py",
        old="return float(scale * 0.5 ** (fewer + 1))",
        new="return float(scale * 0.5**fewer)",
    ),
    Behaviour(
        "bad-step-changes-nothing",
        "A watch skips a step whose gradients are not finite: weights and moments stay.",
        plant="Let the optimizer take the step.",
        test="tests/debug/test_watch.py::test_gradients_are_there_after_a_skipped_step",
        file="src/apex/debug/watch.py",
        old="            for p, _ in self._hidden:\n                p.grad = None\n",
        new="            pass\n",
    ),
    Behaviour(
        "random-numbers-go-on",
        "After a report the program draws the random numbers that it would have drawn without, of "
        "Python, NumPy and torch.",
        plant="Leave NumPy's random state where the replays have brought it.",
        test="tests/debug/test_watch.py::test_python_and_numpy_draw_on_as_without_a_report",
        file="src/apex/debug/undisturbed.py",
        old="numpy.random.set_state(legacy)",
        new="pass",
    ),
    Behaviour(
        "nan-is-told-at-once",
        "Under a dynamic loss scale a NaN in an output is reported at the first step.",
        plant="Wait for it as for an overflow that a lower scale may cure.",
        test="tests/debug/test_watch.py"
        "::test_a_forward_that_gives_nan_is_explained_at_the_first_skipped_step",
        file="src/apex/debug/watch.py",
        old="if any(call.had_nan() for call in self._calls):",
        new="if False:",
    ),
    Behaviour(
        "growth-names-the-update",
        "Where a weight exploded, the report names the update that did it and both norms.",
        plant="Name all updates since the first step that is remembered.",
        test="tests/debug/test_growth.py::test_the_growth_the_step_and_the_remedy_are_said[O0]",
        file="src/apex/debug/growth.py",
        old="first, smaller = before[-1]",
        new="first, smaller = before[0]",
    ),
]

REPORT = [
    Behaviour(
        "uneven-steps-have-no-verdict",
        "A level whose step times are uneven gets no verdict on speed.",
        plant="Look at the width of the interval alone.",
        test="tests/commands/bench/test_verdict.py"
        "::test_uneven_steps_have_no_verdict_on_speed_in_any_sentence",
        file="src/apex/commands/bench/training/verdict.py",
        old="elif row.unsteady or other.unsteady or (speed",
        new="elif (speed",
    ),
    Behaviour(
        "more-comparisons-wider-intervals",
        "With more comparisons on a page the intervals of accuracy are wider: all hold together.",
        plant="Give each level an interval of 95 %.",
        test="tests/commands/bench/test_verdict.py"
        "::test_the_interval_is_wider_the_more_comparisons_there_are",
        file="src/apex/commands/bench/intervals.py",
        old="0.05 / comparisons, len(pairs)",
        new="0.05, len(pairs)",
    ),
    Behaviour(
        "first-turn-does-not-count",
        "The first turn of a training, which warms up, is not part of its times.",
        plant="Count all turns.",
        test="tests/commands/bench/test_verdict.py"
        "::test_the_first_round_and_the_first_step_of_a_turn_do_not_count",
        file="src/apex/commands/bench/training/results.py",
        old="return tuple(turns[1:] if len(turns) > 1 else turns)",
        new="return tuple(turns)",
    ),
    Behaviour(
        "quality-of-equal-lengths",
        "Accuracy and loss are compared of trainings that took the same number of steps.",
        plant="Compare a training that a budget cut with a whole one.",
        test="tests/commands/bench/test_verdict.py"
        "::test_a_training_that_a_budget_cut_earlier_is_not_judged_beside_a_longer_one",
        file="src/apex/commands/bench/training/verdict.py",
        old="mine.finished and theirs.finished and len(mine.losses) == len(theirs.losses)",
        new="mine.finished and theirs.finished",
    ),
    Behaviour(
        "diverged-level-is-not-taken",
        "The answer never says to take a level that diverged at one of the seeds.",
        plant="Ask for no bad verdict on quality alone.",
        test="tests/commands/bench/test_verdict.py"
        "::test_a_level_that_diverged_at_one_seed_is_not_taken_nor_its_loss_judged",
        file="src/apex/commands/bench/training/answer.py",
        old="right = [v for v in of if _trained(v) and not _bad(v)]",
        new="right = [v for v in of if not _bad(v)]",
    ),
    Behaviour(
        "edited-task-is-trained-anew",
        "Trainings of a user's task that was edited since are not taken from the folder.",
        plant="Name the kept files without the text of the task.",
        test="tests/commands/bench/test_command.py"
        "::test_what_is_kept_depends_on_the_text_of_a_task_and_on_its_data",
        file="src/apex/commands/bench/training/plan.py",
        old="(FORMAT, words, self._depends, self._source(cell.task))",
        new="(FORMAT, words, self._depends)",
    ),
]

AREAS = {"amp": AMP, "optimizers": OPTIMIZERS, "ops": OPS, "debug": DEBUG, "report": REPORT}
BEHAVIOURS = [one for area in AREAS.values() for one in area]
