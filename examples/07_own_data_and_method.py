"""A method of one's own on files of one's own: three hotels' notes, for the department that each is meant for.

Every client has a CSV file. The method shares the adapters of the model's first blocks; the last block's
and the head stay at the client. How good such few notes make a model differs from seed to seed.
"""

import csv
import random
import tempfile
from pathlib import Path

import befit
from befit import Pass, Recipe, Use, block, lora, register, slot

WORDS = {
    "kitchen": ("soup", "breakfast", "coffee", "salt"),
    "rooms": ("towel", "pillow", "window", "heating"),
    "desk": ("invoice", "key", "taxi", "luggage"),
}
COLUMNS = {"text": "note", "label": "department"}  # befit's name: yours
NOTES = ("the {} was cold", "please bring another {}", "where is my {}", "{}: again nobody came")


@register("first_blocks", title="First blocks shared")
def first_blocks(blocks: int = 2, rank: int = 4, alpha: float = 8.0) -> Recipe:
    """One adapter, of which the first blocks are averaged (up = down = r(d_in + d_out) per module there).

    blocks  how many are shared
    rank    of the adapter
    alpha   its scaling
    """
    passes = (Pass(slot("shared"), active=("shared",)),)
    share = slot("shared") & block(0, blocks)
    return Recipe(layout=lora(rank, alpha), passes=passes, share=share, use=Use(("shared",)))


def write(path: Path, seed: int) -> str:
    """80 notes of rooms of the client's own; returns the path."""
    draw, rows = random.Random(seed), [("note", "department")]
    for room in range(100 * seed, 100 * seed + 80):
        department = draw.choice(list(WORDS))
        note = draw.choice(NOTES).format(draw.choice(WORDS[department]))
        rows.append((f"{room}, {note}", department))
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(rows)
    return str(path)


with tempfile.TemporaryDirectory() as folder:
    files = {f"client-{number:02}": write(Path(folder) / f"{number}.csv", number) for number in range(3)}
    config = {
        "data": {"task": "text-classification", "clients": files, "columns": COLUMNS},
        "model": {"id": "names-bert-mlm", "max_length": 48},
        "method": "first_blocks",
        "baselines": ["local"],
        "train": {"max_steps": 5, "batch_size": 8, "lr": 1e-2},
        "federation": {"rounds": 10},
    }
    for client, row in befit.run(config, out=Path(folder) / "run").results["clients"].items():
        print(f"{client}: alone {row['baselines']['local']:.3f}, sharing blocks {row['accuracy']:.3f}")
