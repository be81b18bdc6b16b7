"""2xx: what a person wrote, on the command line, in settings or in the job."""

from __future__ import annotations

from w5xde.explanations.entry import Explanation

JOB = [
    Explanation(
        "W5-201",
        "this node's model is not the run's",
        "model() built other parameters or buffers here: another job file, another argument, or another"
        " version of a library. Their sums would make no sense.",
        "use the coordinator's job file; the message names the first differences.",
        "scp coordinator:train.py .\nw5xde join @ticket train.py",
    ),
    Explanation(
        "W5-202",
        "a factory of the job failed, or returned the wrong thing",
        "model() must return a torch.nn.Module, optimizer(params) a torch.optim.Optimizer,"
        " scheduler(optimizer) a scheduler of torch's, data() a data set.",
        "call it by itself in Python; the message names the line of yours it came from.",
        'python -c "import train; print(train.job.model())"',
    ),
    Explanation(
        "W5-203",
        "the data set, or a sample of it, cannot be used",
        "batches travel as tensors, numbers and strings, or lists, tuples and dicts of them; and a data set"
        " has __len__ and __getitem__, or starts anew each time it is iterated.",
        "convert what a sample holds in __getitem__, and return the data set itself, not a DataLoader.",
        "def __getitem__(self, i):\n    return to_tensor(Image.open(self.paths[i])), self.labels[i]",
    ),
    Explanation(
        "W5-204",
        "the data set is empty, its samples do not fit together, or it does not suit --data local",
        "a batch is made by stacking samples, so all have one shape; and nodes that read their own copy"
        " must be able to read any sample by its number.",
        "pad or crop samples to one shape, use --batch-size 1, or use --data stream.",
        "w5xde train train.py --data stream",
    ),
    Explanation(
        "W5-205",
        "the loss cannot be used",
        "loss(model, batch) is tried on the first batch before any node is asked: it must return one"
        " finite, real number as a tensor that depends on the parameters.",
        "read the message: it names what came back, and the line of yours if one failed.",
        "def loss(model, batch):\n"
        "    images, labels = batch\n"
        "    return cross_entropy(model(images), labels)",
    ),
    Explanation(
        "W5-206",
        "there is no such job",
        "a job is named by its file, by a name in that file, or by a module that Python can import.",
        "check the path and the name; a job stands at the top level of its file.",
        "w5xde train train.py\nw5xde train train.py:small\nw5xde train package.module:job",
    ),
    Explanation(
        "W5-207",
        "the file has several jobs",
        "nothing says which of them is meant.",
        "name one after a colon.",
        "w5xde train train.py:small",
    ),
    Explanation(
        "W5-208",
        "the job file cannot be loaded",
        "Python raised an error while it ran the file: a typing mistake, a package that is missing here, or"
        " code that trains when it is imported.",
        "run the file with python; put what starts training under the guard.",
        'if __name__ == "__main__":\n    w5xde.train(job, nodes=4)',
    ),
    Explanation(
        "W5-209",
        "this node's data is not the run's",
        "with --data local each node reads samples from its own copy, and this copy has another number of"
        " samples, or other ones.",
        "copy the coordinator's data here, or let it send batches.",
        "w5xde serve train.py --data stream",
    ),
    Explanation(
        "W5-210",
        "a command, a flag, a setting or its value is not known",
        "it is misspelt, out of its range, or contradicts another; it may stand on the command line, in a"
        " W5XDE_* variable or in w5xde.toml, and the message says where.",
        "use the nearest name that the message offers, or look it up.",
        "w5xde train --help",
    ),
    Explanation(
        "W5-211",
        "a run that is resumed would become another run",
        "its name, mode, seed, batch size and what else decides its result stay what they were; and an"
        " epoch that has begun cannot be taken back.",
        "leave that setting out, or start a new run without --resume.",
        "w5xde train --resume latest --epochs 20",
    ),
    Explanation(
        "W5-212",
        "a first small batch gives other gradients on this node than on the coordinator",
        "before a node is lent anything it computes four samples on weights that both sides make by one"
        " formula. What it gave differs by more than rounding, most in the layer that is named: the job file"
        " is another one there (a layer, an activation, the loss), it computes in another precision, or the"
        " device or its driver computes wrongly.",
        "use the coordinator's job file and versions of torch; compare with --device cpu on the same machine."
        " If you know that the difference is right, let the coordinator do without: --no-canary.",
        "w5xde doctor\nw5xde join @ticket train.py --device cpu",
    ),
    Explanation(
        "W5-213",
        "the run asks for far more threads than this machine has cores",
        "every node of a run computes with the same number of torch threads, because bits depend on it. This"
        " machine would be drowned in them, so it does not take part.",
        "start the run with fewer --threads, or join with a larger machine.",
        "w5xde serve train.py --threads 8",
    ),
    Explanation(
        "W5-214",
        "the run verifies updates, and this node draws other random numbers than the coordinator",
        "with --verify the coordinator computes a share of the work again and compares. The loss draws random"
        " numbers (dropout, noise), and other kinds of devices draw other ones under the same seed: what this"
        " node computes could not be compared, so that it could cheat unnoticed.",
        "join with a device that draws like the coordinator's (--device cpu), or start the run without"
        " --verify.",
        "w5xde join @ticket train.py --device cpu",
    ),
    Explanation(
        "W5-221",
        "the model's parameters are not all there, or their names are too long",
        "lazy modules make parameters when they are first used, but every machine must know the model"
        " before.",
        "run one batch through the model inside model().",
        "def model():\n    net = Net()\n    net(torch.zeros(1, 3, 32, 32))\n    return net",
    ),
    Explanation(
        "W5-222",
        "the model has nothing to train",
        "it has no parameters, or none of them requires a gradient.",
        "return a module with parameters, and freeze fewer of them.",
        "model.head.requires_grad_(True)",
    ),
    Explanation(
        "W5-223",
        "two parameters or buffers share memory without being one",
        "the model is moved into one flat vector, in which each tensor has its own place; two that overlap"
        " would come apart.",
        "tie weights by assigning the parameter itself; give buffers memory of their own.",
        "decoder.weight = encoder.weight",
    ),
    Explanation(
        "W5-224",
        "the loss changes a parameter itself",
        "all batches of a step are computed on the same parameters, on several machines at once; a change"
        " on one of them would be lost.",
        "leave changing parameters to the optimizer.",
        "job = w5xde.Job(..., optimizer=lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=1e-4))",
    ),
    Explanation(
        "W5-225",
        "a gradient is sparse",
        "gradients travel and are added as one dense vector.",
        "build embeddings with sparse=False.",
        "nn.Embedding(50_000, 128, sparse=False)",
    ),
    Explanation(
        "W5-226",
        "a buffer changes in a way that cannot be shared",
        "buffers move by the mean of what the batches of a step left in them. That needs a fixed shape,"
        " finite numbers to start with, and a buffer that is saved with the model.",
        "register it with a full shape and finite numbers; persistent=False is for caches that never differ.",
        'self.register_buffer("seen", torch.zeros(10))',
    ),
    Explanation(
        "W5-227",
        "this optimizer cannot be used",
        "it evaluates the loss inside its step (LBFGS), wants sparse gradients, or holds parameters that"
        " are not the model's.",
        "use one that takes the gradients as they are, built from the parameters it is given.",
        "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)",
    ),
    Explanation(
        "W5-228",
        "this scheduler cannot be used",
        "it wants a metric at each step, and there is none between two evaluations.",
        "use a schedule over steps.",
        "scheduler=lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10_000)",
    ),
    Explanation(
        "W5-229",
        "evaluate() failed on the untrained model",
        "it is tried once before training, so that it does not fail after hours.",
        "let it take the model and return a number or a dict of numbers.",
        "def evaluate(model):\n"
        '    return {"accuracy": (model(images).argmax(1) == labels).float().mean().item()}',
    ),
    Explanation(
        "W5-230",
        "a tensor of the model has a dtype that cannot be saved",
        "models are kept as safetensors files, which have no such dtype.",
        "use a smaller dtype, or two real tensors.",
        "torch.zeros(8, dtype=torch.complex64)",
    ),
    Explanation(
        "W5-231",
        "the loss differs for the same batch under the same seed",
        "it depends on what was computed before, or draws from a generator of its own; each machine would"
        " train another model.",
        "keep state in a buffer, draw from torch's global generator, or use --mode async without --verify.",
        "w5xde train train.py --mode async",
    ),
    Explanation(
        "W5-232",
        "the optimizer or scheduler holds something a checkpoint cannot keep",
        "a checkpoint keeps numbers, strings, lists, dicts and tensors, and no objects that would have to"
        " be executed to be read.",
        "keep only those in state_dict(), or do without checkpoints.",
        "w5xde train train.py --checkpoint-every off",
    ),
    Explanation(
        "W5-240",
        "a picture needs a package that is not installed",
        "--plot draws with matplotlib, which training does not need.",
        "install the extra.",
        'pip install "w5xde[bench]"',
    ),
    Explanation(
        "W5-241",
        "so many connections need more open files than are allowed",
        "each connection takes up to two file descriptors, and w5xde has raised the limit as far as it may.",
        "raise the limit for this terminal, or start fewer nodes.",
        "ulimit -n 4096\nw5xde train train.py --nodes 1000",
    ),
]
