"""Codes 270 to 279: `w5xde.Pool`, nodes for a loop of the user's own."""

from __future__ import annotations

from w5xde.explanations.explanation import Explanation

POOL = [
    Explanation(
        "W5-270",
        "the losses of a pool are not as they should be, or a pool is used as a job",
        "a pool has losses by name, and pool.backward names one of them; it has no data and no optimizer,"
        " so that w5xde train cannot train it.",
        "give each loss a name, and run the script itself; other machines join with its file.",
        'pool = w5xde.Pool(model, losses={"d": d_loss, "g": g_loss}, nodes=4)\npython gan.py',
    ),
    Explanation(
        "W5-271",
        "a batch cannot be split into parts",
        "a batch is split along the first dimension of its tensors, which must all have a row for each"
        " sample; a list without parts=… is taken as the parts themselves.",
        "say parts=…, or give parts one by one and, if rows do not say it, how many samples each counts for.",
        'pool.backward(batch, "d", parts=8)\npool.backward([part, part], "d", samples=[3, 5])',
    ),
    Explanation(
        "W5-272",
        "a pool cannot use this model",
        "nodes compute on copies of the model, and gradients are added to its parameters here: it must be a"
        " module on the CPU that can be copied, without hooks on its parameters.",
        "leave the model on the CPU of this machine (nodes use the devices that they have), and change"
        " gradients after pool.backward instead of in hooks.",
        "torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)",
    ),
    Explanation(
        "W5-273",
        "the model is another one than when the pool began",
        "a parameter was replaced, or a module was added: nodes have the model as it was, and optimizers"
        " hold the parameters of before.",
        "change weights in place, as load_state_dict does, or make a new pool for the new model.",
        "model.load_state_dict(weights)  # without assign=True",
    ),
    Explanation(
        "W5-274",
        "a call needs something that nodes were not told of",
        "when a pool begins, nodes learn which gradients and which buffers travel; and they do not see an"
        " autocast around the call.",
        "let all parameters that are ever trained require gradients when the pool is entered; use autocast"
        ' inside the loss, or precision="bf16".',
        "model.requires_grad_(True)\nwith w5xde.Pool(model, losses, nodes=4) as pool: ...",
    ),
    Explanation(
        "W5-275",
        "the ticket is for something else than this file",
        "it admits to a pool, and the file has a job or other losses; or the other way round.",
        "join with the file that the script or the run was started with.",
        "w5xde join @ticket gan.py",
    ),
    Explanation(
        "W5-276",
        "a call failed on the nodes",
        "a part of the batch could not be computed, or gave numbers that are not finite, on every node that"
        " tried it. Nothing was added to the gradients.",
        "read the message: it has the node's error, with the line of your code. The pool is still open.",
        "try:\n    pool.backward(batch, parts=8)\nexcept w5xde.TrainingError as error:\n    print(error)",
    ),
    Explanation(
        "W5-277",
        "the pool is not open here",
        "a pool computes between its beginning and its end, in the process that opened it.",
        "enter the pool once around the loop.",
        'pool = w5xde.Pool(model, losses)\nif __name__ == "__main__":\n    with pool:\n        train()',
    ),
    Explanation(
        "W5-278",
        "a loss reads a variable that has changed",
        "nodes have the variables of the script as they were when the pool was entered, so that here and"
        " there the loss would be another one.",
        "pass what changes with the batch: numbers go to every part.",
        'pool.backward({"x": x, "beta": beta}, "vae", parts=8)',
    ),
    Explanation(
        "W5-279",
        "the pool has ended",
        "no local node can stay, or a part of the coordinator failed; the message says which.",
        "make a new pool; what local nodes said is on standard error.",
        "with w5xde.Pool(model, losses, nodes=4) as pool: ...",
    ),
]
