"""All kinds of mistakes: what each does, why it hurts, the number you see, the lines that end it.

One table. The rules take sentence and fix from here, ``--ignore`` its names, and the tests compare
it with the table of ``docs/check.md`` and with the planted programs.
"""

from __future__ import annotations

from typing import NamedTuple


class Kind(NamedTuple):
    """One kind of mistake.

    Attributes:
        name: As ``--ignore`` and ``# apex: ignore`` take it.
        does: What the line does; the line is the subject of the sentence.
        hurts: Why that hurts.
        number: What is measured.
        fix: The lines that end it.
    """

    name: str
    does: str
    hurts: str
    number: str
    fix: tuple[str, str]


_TABLE = (
    # -- scales -------------------------------------------------------------------------------------
    Kind(
        "clip-before-unscale",
        "clips gradients that are still multiplied by the loss scale",
        "the limit is too small by the scale: every step has the same tiny length",
        "the norm that was clipped, the norm of the gradients, and the limit that resulted",
        ("scaler.unscale_(optimizer)", "before this line"),
    ),
    Kind(
        "step-without-scale",
        "steps gradients that are divided by the loss scale and were never multiplied by it",
        "updates are too small by the scale",
        "the factor",
        ("scaler.scale(loss).backward()", "instead of loss.backward()"),
    ),
    Kind(
        "one-loss-unscaled",
        "calls backward() of a loss that is not scaled; other losses of the same step are",
        "this loss has no weight in the step",
        "the factor, and in how many parameters",
        ("scaler.scale(loss).backward()", "for this loss, too"),
    ),
    Kind(
        "scaled-step",
        "steps gradients that are still multiplied by the loss scale, without the scaler",
        "updates are too large by the scale, and overflows are stepped",
        "the factor, and in how many parameters",
        ("scaler.step(optimizer)", "scaler.update()"),
    ),
    Kind(
        "added-after-unscale",
        "adds scaled gradients to gradients that unscale_() has divided already",
        "the batches of one accumulated step have weights that differ by the scale",
        "the factor, and in how many parameters",
        ("scaler.unscale_(optimizer) once,", "after the last backward() of the step"),
    ),
    Kind(
        "update-before-step",
        "divides gradients by another loss scale than they were multiplied by: scaler.update() "
        "came between backward() and this step",
        "gradients are wrong by the factor by which the scale changes",
        "both scales",
        ("scaler.update() once,", "after the step of the last optimizer"),
    ),
    Kind(
        "float16-weights-under-scaler",
        "makes float16 weights; a GradScaler needs float32 weights, which autocast casts",
        "unscale_() raises",
        "how many parameters are float16, and the error",
        ("leave the weights in float32 under torch.autocast,", "or amp.initialize(opt_level='O2')"),
    ),
    Kind(
        "backward-outside-scale-loss",
        "calls backward() outside of every amp.scale_loss block",
        "gradients in float16 are not scaled: small ones are 0, and no overflow skips a step",
        "the share of elements that are 0 and are not at the loss scale",
        ("with amp.scale_loss(loss, optimizer) as scaled_loss:", "    scaled_loss.backward()"),
    ),
    Kind(
        "clip-of-model-gradients",
        "clips gradients of 16-bit weights; the optimizer steps those of their float32 masters",
        "nothing is clipped",
        "the norm of what is stepped",
        ("amp.clip_grad_norm_(optimizer, max_norm)", "instead of this line"),
    ),
    # -- steps and weights --------------------------------------------------------------------------
    Kind(
        "not-finite-step",
        "steps gradients that are not finite; nothing checks them",
        "the weights are not finite from then on",
        "the step, and how many elements",
        ("a torch.amp.GradScaler, which skips such steps;", "apex debug names the operation"),
    ),
    Kind(
        "update-not-finite",
        "makes weights NaN or inf of finite gradients: the update overflows in the weights' type",
        "the model is lost",
        "the step, and how many weights",
        ("float32 weights under torch.autocast,", "or float32 masters (amp O2), or a larger eps"),
    ),
    Kind(
        "update-lost",
        "writes updates into 16-bit weights, where small ones round away",
        "most weights stand still, and the loss stops early",
        "the share of weights with a gradient that did not move at a step (from 20 % on)",
        ("float32 weights under torch.autocast, or float32 masters (amp O5),",
         "or an optimizer that keeps what is rounded away: FusedAdam(storage='low_bits')"),
    ),
    Kind(
        "moments-lost",
        "keeps the average of squared gradients in 16 bits, where small changes round away",
        "Adam's step sizes are those of the first steps",
        "the share of its elements with a gradient that did not move at a step (from 20 % on)",
        ("keep second moments in float32", "(beta2 = 0.999 needs 10 bits, bfloat16 has 8)"),
    ),
    # -- schedules and checkpoints ------------------------------------------------------------------
    Kind(
        "scheduler-counts-skipped",
        "counts steps that were skipped because of an overflow",
        "warm-up and decay end early",
        "how many steps were skipped, and the learning rate beside the one that was meant",
        ("before = scaler.get_scale() ahead of scaler.update(), then",
         "if scaler.get_scale() >= before: scheduler.step()"),
    ),
    Kind(
        "scheduler-before-optimizer",
        "calls scheduler.step() before the first optimizer.step()",
        "the first learning rate is never used",
        "both learning rates",
        ("optimizer.step()", "scheduler.step()"),
    ),
    Kind(
        "scaler-not-saved",
        "saves an optimizer and not the GradScaler's state",
        "a run that resumes searches for the scale again",
        "the scale now, and that of a run that resumes",
        ('"scaler": scaler.state_dict()', 'scaler.load_state_dict(checkpoint["scaler"]) at resume'),
    ),
    Kind(
        "scheduler-not-saved",
        "saves an optimizer and not the scheduler's state",
        "a run that resumes begins the schedule again",
        "the learning rate now, and that of a run that resumes",
        ('"scheduler": scheduler.state_dict()',
         'scheduler.load_state_dict(checkpoint["scheduler"]) at resume'),
    ),
    Kind(
        "scaler-not-loaded",
        "loads the optimizer's state and not the GradScaler's, which the checkpoint has",
        "the run searches for the scale again",
        "the scale of the checkpoint, and that of this run",
        ('scaler.load_state_dict(checkpoint["scaler"])', "after this line"),
    ),
    Kind(
        "scheduler-not-loaded",
        "loads the optimizer's state and not the scheduler's, which the checkpoint has",
        "the schedule begins again",
        "how many calls the checkpoint's schedule has counted, and this run's",
        ('scheduler.load_state_dict(checkpoint["scheduler"])', "after this line"),
    ),
    # -- autocast -----------------------------------------------------------------------------------
    Kind(
        "stale-autocast-cache",
        "runs with 16-bit copies of weights that were made before the last steps: autocast keeps "
        "them until its block ends",
        "steps have no effect until then",
        "how many steps had no effect",
        ("open the block for each forward,", "or torch.autocast(..., cache_enabled=False)"),
    ),
    Kind(
        "backward-in-autocast",
        "calls backward() inside of the autocast block, which casts float32 parts of it",
        "gradients are rounded where the forward was not",
        "the difference of the gradients from those of a backward outside (from 0.1 % on)",
        ("call backward() after the block,", "one indentation to the left"),
    ),
    Kind(
        "autocast-around-nothing",
        "opens an autocast block without an operation that it casts: the model is called outside",
        "all runs in float32",
        "how many forwards ran in float32",
        ("call the model", "inside of the block"),
    ),
    Kind(
        "float16-without-scaler",
        "computes in float16 under autocast, and the loss is not scaled",
        "small gradients are 0",
        "the share of elements that are 0 and are not at a scale of 1024 (from 1 % on)",
        ("scaler.scale(loss).backward(); scaler.step(optimizer); scaler.update()",
         "or dtype=torch.bfloat16"),
    ),
    # -- loss ---------------------------------------------------------------------------------------
    Kind(
        "loss-in-16-bits",
        "computes the loss in 16 bits from here on",
        "the gradient that enters the network is wrong",
        "its difference from that of the loss in float32 (from 1 % on), and both losses",
        (".float() on the output of the model,", "before this line"),
    ),
    # -- sums ---------------------------------------------------------------------------------------
    Kind(
        "sum-in-16-bits",
        "adds small steps to a 16-bit tensor that goes from step to step, where they round away",
        "averages and sums stand still",
        "the share of elements that did not move at an update (from 25 % on), or where a sum stops",
        ("keep it in float32,", "and cast what is read from it"),
    ),
    Kind(
        "batchnorm-in-16-bits",
        "puts running statistics of BatchNorm into 16 bits",
        "evaluation uses wrong statistics",
        "how many are inf, or the largest error (from 1 % on)",
        ("for BatchNorm modules afterwards:", "module.float()"),
    ),
    Kind(
        "whole-numbers-in-16-bits",
        "has whole numbers in 16 bits: bfloat16 has all of them up to 256, float16 up to 2048",
        "different positions, steps or ids become one",
        "how many different numbers there were, and how many are left",
        ("compute them in float32 (or as integers),", "and cast what is made of them"),
    ),
    Kind(
        "overflow-in-16-bits",
        "overflows in 16 bits; in float32 its result is finite",
        "inf, and what is computed from it 0 or NaN",
        "how many values are inf, and the largest in float32",
        ("compute this line on x.float(),", "and cast the result back"),
    ),
)  # fmt: skip

KINDS = {kind.name: kind for kind in _TABLE}
