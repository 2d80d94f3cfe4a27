"""#2983 and #3111: logged numbers of whole sequences are taken from a rank's part of them.

Under context parallelism torchtitan 0.2.2 counts the tokens of a sequence on each of its ranks, so
that `n_tokens_seen` is too large by the degree (#2983), and divides the loss of a rank's part by
the tokens of all, so that `global_max_loss` is too small by the degree (#3111).

Applies: torchtitan 0.2.2, context_parallel_degree > 1, every attention.

Delete: when https://github.com/pytorch/torchtitan/issues/2983 is fixed in the required
torchtitan, the lines of `n_tokens_seen`; when it contains
https://github.com/pytorch/torchtitan/pull/3111, the line of `maximum`; after both, this file and
`context_parallel_metrics.count_once` in train_spec.py.
"""

import functools

from torchtitan.components.metrics import MetricsProcessor


def count_once(processor: MetricsProcessor, degree: int) -> None:
    """Makes `processor.log` log the tokens of each sequence once, and the largest loss per token.

    Labels are taken to be spread evenly over the ranks.
    """
    log = processor.log

    @functools.wraps(log)
    def repaired(step, global_avg_loss, global_max_loss, *args, extra_metrics=None, **kwargs):
        extra_metrics = dict(extra_metrics or {})
        if "n_tokens_seen" in extra_metrics:
            extra_metrics["n_tokens_seen"] /= degree
        maximum = global_max_loss * degree
        log(step, global_avg_loss, maximum, *args, extra_metrics=extra_metrics, **kwargs)

    processor.log = repaired
