"""Errors about evaluations, and about what follows from their results."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

EVALUATING = [
    Explanation(
        "W5-260",
        "a callback cannot be made, or given, like this",
        "callbacks are objects in a list. A ready-made one must know whether its metric is better the smaller"
        " or the larger it is, and after how many"
        " evaluations it loses patience.",
        'put the objects in a list; say mode="min" or mode="max" if the name of the metric does not, and a'
        " patience of 1 or more.",
        'callbacks=[w5xde.EarlyStopping("wer", patience=3, mode="min")]',
    ),
    Explanation(
        "W5-261",
        "a callback follows a metric that no evaluation returns",
        "it would do nothing for the whole run.",
        "use one of the names in the message, or let the evaluation of the job return this one.",
        "def evaluate(model):\n"
        '    return {"accuracy": accuracy(model)}\n'
        'w5xde.train(job, callbacks=[w5xde.SaveBest("accuracy")])',
    ),
    Explanation(
        "W5-262",
        "two SaveBest callbacks",
        "both would write best.safetensors, each by another metric.",
        "use one of them; write the weights for the other metric in a callback of your own.",
        "def on_evaluate(self, run, metrics):\n"
        '    safetensors.torch.save_file(dict(metrics.weights()), "fastest.safetensors")',
    ),
    Explanation(
        "W5-263",
        "the run has no best weights",
        "they are kept only if a SaveBest callback was given, and after the first evaluation.",
        "start runs with SaveBest, or export the newest weights.",
        'w5xde.train(job, callbacks=[w5xde.SaveBest("loss")])',
    ),
    Explanation(
        "W5-264",
        "ReduceLROnPlateau cannot be stepped by a metric",
        "it must be clear which metric it is, every evaluation must count, and a crash must not lose one:"
        " else the learning rate, and with it the weights, would depend on timing.",
        "name the metric with --plateau-metric, and leave out --evaluate skip and --durability step.",
        "w5xde train job.py --plateau-metric accuracy",
    ),
    Explanation(
        "W5-265",
        "the learning rate cannot be changed",
        "--override lr=… multiplies the rates of the optimizer and of its schedule. That needs a rate, and"
        " one that the schedule has not brought down to 0.",
        "start a new run from the weights, with another optimizer or schedule.",
        "w5xde train job.py --resume latest --override lr=x0.1",
    ),
    Explanation(
        "W5-266",
        "a job evaluates in two ways, or in half of one",
        "nodes measure the batches of validation= with measure=, and need both; evaluate= is a function that"
        " runs at the coordinator instead.",
        "give validation= and measure=, or evaluate= alone.",
        "w5xde.Job(…, validation=held_out, measure=lambda model, batch: {'loss': loss(model, batch)})",
    ),
    Explanation(
        "W5-267",
        "the validation set cannot be measured",
        "its batches are lent by their numbers, perhaps twice, so that it needs a length; and measure() must"
        " return numbers for a batch of it, which was tried with the first one.",
        "return a map-style data set or a DataLoader of one, and from measure() a number or a dict of"
        " numbers: means over the samples of the batch.",
        "def measure(model, batch):\n"
        "    scores = model(batch[0])\n"
        "    return {'accuracy': (scores.argmax(1) == batch[1]).float().mean()}",
    ),
]
