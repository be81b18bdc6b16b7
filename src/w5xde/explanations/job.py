"""Codes 2xx: the command line, settings and the job."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

JOB = [
    Explanation(
        "W5-245",
        "--resume auto does not say which run",
        "it begins the run of a name, or goes on with it, so that the same command is right every time;"
        " without --name every start would begin another run.",
        "add a name.",
        "w5xde serve train.py --name tuesday --resume auto",
    ),
    Explanation(
        "W5-246",
        "--resume auto is combined with a flag for one start",
        "an engine starts that command again and again: --override would change the learning rate at each"
        " start, and --new-identity would turn all nodes out.",
        "stop the run, use the flag once with --resume NAME, and leave it out of the command.",
        "w5xde train --resume tuesday --override lr=x0.1",
    ),
    Explanation(
        "W5-201",
        "this node's model is not the run's",
        "model() built other parameters or buffers here: another job file, another argument, or another"
        " version of a library. Gradients of different models cannot be added.",
        "use the coordinator's job file; the message names the first differences.",
        "scp coordinator:train.py .\nw5xde join @ticket train.py",
    ),
    Explanation(
        "W5-202",
        "a factory of the job failed, or returned the wrong thing",
        "model() must return a torch.nn.Module, optimizer(params) a torch.optim.Optimizer,"
        " scheduler(optimizer) a scheduler of torch's, data() a data set.",
        "call it by itself in Python; the message names the line of your code that failed.",
        'python -c "import train; print(train.job.model())"',
    ),
    Explanation(
        "W5-203",
        "the data set, or a sample of it, cannot be used",
        "batches travel as tensors, numbers and strings, or lists, tuples, dicts and dataclasses of them; and"
        " a data set has __len__ and __getitem__, or can be iterated from the start again and again.",
        "convert the parts of a sample in __getitem__ or in Job(collate=…).",
        "def __getitem__(self, i):\n    return to_tensor(Image.open(self.paths[i])), self.labels[i]",
    ),
    Explanation(
        "W5-204",
        "the data set is empty, its samples cannot be stacked, or have no numbers for --data local or cached",
        "a batch is made by stacking samples, so all must have one shape; and nodes that read their own"
        " copy, or keep samples, must be able to find any sample by its number.",
        "pad samples in Job(collate=…), crop them to one shape, or use --data stream.",
        "w5xde train train.py --data stream",
    ),
    Explanation(
        "W5-205",
        "the loss cannot be used",
        "loss(model, batch) is tried on the first batch before any node is used: it must return one"
        " finite, real number as a tensor that depends on the parameters.",
        "read the message: it says what the loss returned, or which line of your code failed.",
        "def loss(model, batch):\n"
        "    images, labels = batch\n"
        "    return cross_entropy(model(images), labels)",
    ),
    Explanation(
        "W5-206",
        "there is no such job",
        "a job is named by its file, by a name in that file, or by a module that Python can import.",
        "check the path and the name; a job must be at the top level of its file.",
        "w5xde train train.py\nw5xde train train.py:small\nw5xde train package.module:job",
    ),
    Explanation(
        "W5-207",
        "the file has several jobs",
        "the command does not say which of them it means.",
        "name one after a colon.",
        "w5xde train train.py:small",
    ),
    Explanation(
        "W5-208",
        "the job file cannot be loaded",
        "Python raised an error while it ran the file: a syntax error, a package that is missing here, or"
        " code that trains when it is imported.",
        "run the file with python; put the code that starts training under the guard.",
        'if __name__ == "__main__":\n    w5xde.train(job, nodes=4)',
    ),
    Explanation(
        "W5-209",
        "this node's data is not the run's",
        "with --data local each node reads samples from its own copy, and this copy has another number of"
        " samples, or other samples.",
        "copy the coordinator's data here, or let it send batches.",
        "w5xde serve train.py --data stream",
    ),
    Explanation(
        "W5-210",
        "a command, a flag, a setting or its value is not known",
        "it is misspelt, out of range, or contradicts another; it may be on the command line, in a"
        " W5XDE_* variable or in w5xde.toml, and the message says where.",
        "use the nearest name that the message offers, or look it up.",
        "w5xde train --help",
    ),
    Explanation(
        "W5-211",
        "a resumed run would become another run",
        "its name, mode, seed, batch size and all other settings that decide its result must stay the"
        " same; and an epoch that has begun cannot be undone.",
        "leave that setting out, or start a new run without --resume.",
        "w5xde train --resume latest --epochs 20",
    ),
    Explanation(
        "W5-212",
        "a first small batch gives other gradients on this node than on the coordinator",
        "before a node gets work, it computes four samples on weights that both sides make by one"
        " formula. Its gradients differ by more than rounding, most in the layer that is named: its job"
        " file is another one (a layer, an activation, the loss), it computes in another precision, or"
        " the device or its driver computes wrongly.",
        "use the coordinator's job file and version of torch; compare with --devices cpu on the same"
        " machine. If you know that the difference is right, start the coordinator with --no-canary.",
        "w5xde doctor\nw5xde join @ticket --devices cpu",
    ),
    Explanation(
        "W5-213",
        "the run asks for far more threads than this machine has cores",
        "every node of a run computes with the same number of torch threads, because the bits of a result"
        " depend on it. So many threads would only slow this machine down, so it does not take part.",
        "start the run with fewer --threads, or join with a larger machine.",
        "w5xde serve train.py --threads 8",
    ),
    Explanation(
        "W5-214",
        "the run verifies updates, and this node draws other random numbers than the coordinator",
        "with --verify the coordinator computes a share of the work again and compares. The loss draws random"
        " numbers (dropout, noise), and other kinds of devices draw other ones under the same seed: what this"
        " node computes could not be compared, so that it could cheat unnoticed.",
        "join with a device that draws like the coordinator's (--devices cpu), or start the run without"
        " --verify.",
        "w5xde join @ticket --devices cpu",
    ),
    Explanation(
        "W5-216",
        "rounds of so many steps do not fit into an epoch, or into the run",
        "in rounds mode a round ends with its epoch and with the run. A constant number of local steps that"
        " is larger would never be reached.",
        "use fewer local steps or smaller batches, or let rounds grow as far as there is room (the default).",
        "w5xde train train.py --mode rounds --local-steps 10",
    ),
    Explanation(
        "W5-221",
        "the model has parameters without a shape, or with names that are too long",
        "lazy modules make parameters when they are first used, but every machine must know the model"
        " before that.",
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
        "the model is moved into one flat vector, in which each tensor has its own place; two that"
        " overlap would be separated.",
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
        "a buffer changes by the mean of what the batches of a step changed in it. That needs a fixed"
        " shape, finite numbers at the start, and a buffer that is saved with the model.",
        "register it with a full shape and finite numbers; persistent=False is for caches that never differ.",
        'self.register_buffer("seen", torch.zeros(10))',
    ),
    Explanation(
        "W5-227",
        "this optimizer cannot be used",
        "it evaluates the loss inside its step (LBFGS), wants sparse gradients, or holds parameters that"
        " are not the model's.",
        "use an optimizer that takes the gradients as they are, and build it from the parameters that it"
        " is given.",
        "optimizer=lambda params: torch.optim.AdamW(params, lr=3e-4)",
    ),
    Explanation(
        "W5-228",
        "this scheduler cannot be used",
        "ReduceLROnPlateau is stepped by the result of each evaluation, and the job has none.",
        "let the job evaluate, or use a schedule over steps.",
        "w5xde.Job(…, evaluate=evaluate, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)",
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
        "keep state in a buffer, draw from torch's global generator, read w5xde.current() in place of a"
        " counter of your own, or use --mode async without --verify.",
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
        "W5-233",
        "--scale-for-batch cannot scale this optimizer or schedule",
        "the rule was measured for torch's Adam and AdamW up to 8 batches a step and for SGD up to 16, with"
        " rates and betas that are numbers. Other optimizers follow other rules, more batches train worse by"
        " it, and some schedules set the rate themselves.",
        "leave the flag out and write the rate for the whole step into the job, or use fewer batches a step.",
        "w5xde train train.py --batches-per-step 8 --scale-for-batch",
    ),
    Explanation(
        "W5-234",
        "the delay correction cannot scale this optimizer's learning rate",
        "in async mode a late update makes a smaller step: the learning rate is divided by up to 1 + t/2, if"
        " it is t updates late. Some optimizers, such as Adafactor with relative steps, have no learning rate"
        " in their groups (lr=None), and would make whole steps with late updates.",
        "turn the correction off, use sync mode, or give the optimizer a learning rate.",
        "w5xde train train.py --mode async --no-delay-correction",
    ),
    Explanation(
        "W5-235",
        "rounds cannot hand this optimizer's state over from one round to the next",
        "in rounds mode any node may continue where another one stopped, so that all must know the state of"
        " the optimizer. How to hand it over is known of torch's SGD, Adam, AdamW, RMSprop, Adagrad,"
        " Adadelta, Adamax and RAdam.",
        "use one of these, or sync mode.",
        "w5xde train train.py --mode sync",
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
    Explanation(
        "W5-242",
        "the job file trains while it is being loaded",
        "w5xde executes the whole file to find its job, on the coordinator and on every node. A call of"
        " w5xde.train, serve or join, or a loop of a w5xde.Pool, at the top level would then start a run"
        " of its own, and a loop of torch, trainer.fit() or trainer.train() would train again in each"
        " of these processes.",
        "put the call under the guard, where only  python train.py  reaches it.",
        'if __name__ == "__main__":\n    w5xde.train(job, nodes=4)',
    ),
    Explanation(
        "W5-243",
        "the model or the loss counts or remembers batches in Python",
        "a number or a tensor that is neither a parameter nor a buffer changes each time the same batch is"
        " computed: in an attribute of the model or of an object that it holds (self.calls += 1), in a"
        " variable that the loss reads from outside, or in an attribute of a loss that is an object. Nodes do"
        " not share it: each would count its own batches alone, and the weights would depend on which nodes"
        " helped.",
        "register a buffer for what must be remembered: every batch of a step gets that of the step. For a"
        " schedule, read the step: it is the same on every node.",
        "def loss(model, batch):\n"
        "    weight = min(1.0, w5xde.current().step / 1000)\n"
        "    return reconstruction(model, batch) + weight * divergence(model, batch)",
    ),
    Explanation(
        "W5-244",
        "w5xde.current() was called outside of a loss",
        "it says for which step, epoch and batch a loss is computed, and only a loss is computed for any:"
        " not the model's construction, the data set, evaluate() or a callback.",
        "call it inside loss(model, batch), or in the forward pass that the loss calls.",
        "def loss(model, batch):\n    step = w5xde.current().step",
    ),
    Explanation(
        "W5-280",
        "no node of this machine could go on",
        "w5xde join runs several nodes here, and each of them was killed, or could not be started: memory ran"
        " out, a limit of the system was reached, or the job crashes the interpreter.",
        "start fewer nodes, or one, which shows what happens to it; look for the killer in the system's log.",
        "w5xde join @ticket --nodes 1\ndmesg | tail",
    ),
]
