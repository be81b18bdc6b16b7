"""Codes 25x: the data of a job, how it is read, and what its batches weigh."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

DATA = [
    Explanation(
        "W5-250",
        "nodes cannot keep the samples of this data set",
        "with --data cached a sample is sent once and used again in later epochs. So it must be the same"
        " whenever it is read (no random augmentation, no data that changes), and hold tensors and numbers"
        " alone. Some samples are read twice before training, and the first batch of each epoch again.",
        "send batches in every epoch; or augment in the loss: there torch is seeded for each batch.",
        "w5xde train train.py --data stream",
    ),
    Explanation(
        "W5-251",
        "not even one sample fits into the cache",
        "nodes keep at most --cache-bytes of samples in a file.",
        "make it larger, or send batches in every epoch.",
        "w5xde train train.py --data cached --cache-bytes 4000000000",
    ),
    Explanation(
        "W5-252",
        "collate() failed",
        "Job(collate=…), or the collate_fn of the job's DataLoader, gets a list of samples and returns their"
        " batch. It raised an error.",
        "call it by itself on a few samples; the message names the line of your code that failed.",
        "def collate(samples):\n"
        "    return pad_sequence([torch.tensor(sample) for sample in samples], batch_first=True)",
    ),
    Explanation(
        "W5-253",
        "a DataLoader contradicts the settings or the job, or reads in a way of its own",
        "of a DataLoader that data() returns, the data set, batch size, sampler, collate function, drop_last"
        " and workers are used. A flag replaces what the loader says, and the run says so. But two samplers"
        " or two collate functions, --shuffle beside a sampler, or --batch-size for batches that a sampler"
        " makes leave no way to tell what is meant. A loader with an __iter__ of its own may do anything.",
        "leave out one of the two that the message names.",
        "def data():\n    return DataLoader(dataset, batch_size=64, sampler=sampler, collate_fn=collate)",
    ),
    Explanation(
        "W5-254",
        "this sampler cannot be used",
        "a sampler gives the samples of an epoch by number, in order, or lists of numbers, each of which is a"
        " batch. The order must be a function of the epoch and the seed alone: it is the same in every"
        " process, and drawn again when a run is resumed. Before it draws, a torch Sampler is told the epoch"
        " (set_epoch) and gets a new generator; one that keeps other state gives other numbers each time. A"
        " DistributedSampler would give each process a part of the data, which the coordinator does here.",
        "write a function of the data set, the epoch and a seed.",
        "def order(dataset, epoch, seed):\n"
        "    return torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed))[:1000]\n"
        "\n"
        "job = w5xde.Job(..., sampler=order)",
    ),
    Explanation(
        "W5-255",
        "weight() failed, or gave no weight",
        "Job(weight=…) gets a batch as the loss gets it, and returns what it counts in its step: a finite"
        " number that is not negative, and the same whenever it is asked. It is tried on the first batch;"
        " later a batch without a weight counts as one that failed.",
        "return a number that depends on the batch alone.",
        'def weight(batch):\n    return (batch["labels"] != -100).sum()',
    ),
    Explanation(
        "W5-256",
        "this node's job weighs its batches and the run's does not, or the other way round",
        "a node says what its batches weigh only if both jobs have a weight=, so this is another job file.",
        "use the coordinator's job file.",
        "scp coordinator:train.py .\nw5xde join @ticket train.py",
    ),
    Explanation(
        "W5-257",
        "a job with weight= cannot be trained in rounds",
        "in rounds mode a node makes each of its steps with one batch, which is the mean of that step"
        " whatever it weighs; only the columns are averaged, by their samples.",
        "use sync or async mode, or leave weight= out.",
        "w5xde train train.py --mode sync",
    ),
    Explanation(
        "W5-258",
        "a batch holds a type that the job does not know",
        "named tuples and dataclasses travel as their names and their fields. A node makes only those types"
        " that its own job file, or a module that the file imports, has at its top level: a stranger must not"
        " be able to choose which objects are made.",
        "define the type at the top level of the job file, or import it there; or return a dict.",
        "class Batch(NamedTuple):\n    images: Tensor\n    labels: Tensor",
    ),
]
