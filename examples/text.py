"""A small transformer learns to write like Python's documentation, one character at a time.

    python examples/text.py

trains it with two nodes on this machine, for a minute or two, and prints what it wrote. The same
job with more nodes, or other machines, and only the weights in the end:

    w5xde train examples/text.py --nodes 4 --batch-size 16 --batches-per-step 4 --steps 2000
"""

import re

import torch
from torch import nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Dataset

import w5xde
from w5xde.datasets import python_docs

# Newline and printable ASCII, whatever the text: the model must have one shape under every Python, and the
# few typographic quotes and dashes of the documentation may be spaces.
SYMBOLS = "\n" + "".join(map(chr, range(32, 127)))
PLACES = {symbol: place for place, symbol in enumerate(SYMBOLS)}

CONTEXT = 64
WIDTH = 96
HEADS = 4
LAYERS = 2

# In one process: 92 s of one core, 1.21 on what was read and 1.61 on what was held out (guessing: 4.56).
STEPS = 700
WARM_UP_STEPS = 50


def encode(text):
    return torch.tensor([PLACES.get(symbol, PLACES[" "]) for symbol in text])


class Block(nn.Module):
    """Each position looks back at those before it, then thinks for itself."""

    def __init__(self):
        super().__init__()
        self.look_norm = nn.LayerNorm(WIDTH)
        self.look_in = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.look_out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.think_norm = nn.LayerNorm(WIDTH)
        self.think_in = nn.Linear(WIDTH, 4 * WIDTH)
        self.think_out = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        parts = self.look_in(self.look_norm(x)).view(rows, length, 3, HEADS, WIDTH // HEADS)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.look_out(seen.transpose(1, 2).reshape(rows, length, WIDTH))
        return x + self.think_out(gelu(self.think_in(self.think_norm(x))))


class Writer(nn.Module):
    """For each position, how likely each symbol is to come next. About 250,000 parameters."""

    def __init__(self):
        super().__init__()
        self.symbols = nn.Embedding(len(SYMBOLS), WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.guess = nn.Linear(WIDTH, len(SYMBOLS), bias=False)
        # Smaller than PyTorch's default of 1, which would drown what the blocks add.
        nn.init.normal_(self.symbols.weight, std=0.02)
        nn.init.normal_(self.places.weight, std=0.02)

    def forward(self, symbols):
        x = self.symbols(symbols) + self.places.weight[: symbols.shape[1]]
        return self.guess(self.norm(self.blocks(x)))


class Windows(Dataset):
    """Every stretch of CONTEXT + 1 symbols of a text: what is read, and one symbol later what comes next."""

    def __init__(self, symbols):
        self.symbols = symbols

    def __len__(self):
        return len(self.symbols) - CONTEXT

    def __getitem__(self, start):
        return self.symbols[start : start + CONTEXT + 1]


def split():
    """The text for training, and the last tenth, held out to see whether it learns more than by heart."""
    # Rulers and empty cells of tables are cut short: they teach nothing, and a model that has begun to draw
    # one does not stop.
    symbols = encode(re.sub(r"([^\w\n])\1{7,}", r"\1" * 8, python_docs()))
    held_out = len(symbols) // 10
    return symbols[:-held_out], symbols[-held_out:]


def data():
    return Windows(split()[0])


def loss(model, windows):
    guesses = model(windows[:, :-1])
    return cross_entropy(guesses.flatten(0, 1), windows[:, 1:].flatten())


def evaluate(model):
    # 256 windows side by side: 16,000 symbols, enough to settle the second decimal.
    held_out = split()[1][: 256 * (CONTEXT + 1)].view(256, CONTEXT + 1)
    return {"validation_loss": loss(model, held_out).item()}


def optimizer(params):
    return torch.optim.AdamW(params, lr=0.005, betas=(0.9, 0.99), weight_decay=0.01)


def scheduler(optimizer):
    """Up from nothing, down in a line to a tenth; there it stays, for those who train longer."""

    def share(step):
        return min((step + 1) / WARM_UP_STEPS, max(0.1, 1 - step / STEPS))

    return LambdaLR(optimizer, share)


@torch.no_grad()
def write(model, prompt, length, temperature=0.6, seed=0):
    """Continue the prompt by `length` symbols. Lower temperatures dare less."""
    model.eval()
    chance = torch.Generator().manual_seed(seed)
    symbols = encode(prompt)
    for _ in range(length):
        guesses = model(symbols[None, -CONTEXT:])[0, -1]
        chosen = torch.multinomial((guesses / temperature).softmax(0), 1, generator=chance)
        symbols = torch.cat([symbols, chosen])
    return "".join(SYMBOLS[i] for i in symbols.tolist())


job = w5xde.Job(
    model=Writer, data=data, loss=loss, optimizer=optimizer, scheduler=scheduler, evaluate=evaluate
)

if __name__ == "__main__":
    result = w5xde.train(job, nodes=2, steps=STEPS, batch_size=16, batches_per_step=4)
    print(f"\nvalidation loss {result.metrics['validation_loss']:.2f}; it writes:\n")
    print(write(result.model, "The function ", length=500))
