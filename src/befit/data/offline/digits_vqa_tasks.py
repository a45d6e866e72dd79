"""What `digits-vqa` asks: nine questions about one to four digits, in seven styles of writing, and who asks what when.

Every draw takes `Random.random` of a generator that is seeded by a text, and noise NumPy's frozen `RandomState`: both
are promised to stay as they are, so that no list of records has to ship.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any

import numpy as np
from numpy.typing import NDArray

Image = NDArray[np.float32]
Pool = Mapping[int, Sequence[int]]  # digit -> the file indices of its images

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
MATCH = 0.4  # how often one of four images is the digit that is counted
SIGMA = 0.25  # of the noise

# The order of tasks is the stream; PFL-Static mixes them, and every task has two or three clients.
STREAMS = (
    ("name/invert", "larger/invert", "parity/invert", "same/invert"),
    ("larger/invert", "name/invert", "same/invert", "max/invert"),
    ("parity/invert", "same/invert", "max/invert", "larger/invert"),
    ("name/rot", "parity/rot", "larger/rot", "same/rot"),
    ("parity/rot", "same/rot", "count/rot", "larger/rot"),
    ("larger/rot", "name/rot", "same/rot", "count/rot"),
    ("max/plain", "count/plain", "parity/noise", "digit/noise"),
    ("count/plain", "max/plain", "larger/noise", "parity/noise"),
    ("digit/noise", "same/noise", "max/plain", "larger/noise"),
    ("parity/noise", "digit/noise", "count/plain", "same/noise"),
)
SMALL = (
    0,
    6,
    8,
    9,
)  # the clients with the smaller model, where there are two: those of DRAKE, so that styles have both
NEWCOMER_TASKS = ("sum/plain", "smallest/plain", "name/thick", "larger/thick", "same/blur", "max/rot", "count/invert")


def neighbours(image: Image) -> Image:
    """(9, h, w): every pixel's 3 x 3 neighbourhood; outside, the edge goes on."""
    padded = np.pad(image, 1, mode="edge")
    height, width = image.shape
    return np.stack([padded[i : i + height, j : j + width] for i in range(3) for j in range(3)])


def noisy(image: Image, name: str) -> Image:
    """With normal noise, clipped; which noise is decided by `name` alone."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
    noise = np.random.RandomState(seed).normal(0.0, SIGMA, image.shape)
    return np.clip(image + noise, 0.0, 1.0).astype(np.float32)


# Image and a name that is its own -> image; values stay in [0, 1].
STYLES: Mapping[str, Callable[[Image, str], Image]] = {
    "plain": lambda image, name: image,
    "invert": lambda image, name: 1.0 - image,
    "rot": lambda image, name: np.ascontiguousarray(np.rot90(image)),
    "noise": noisy,
    "thick": lambda image, name: neighbours(image).max(0),
    "blur": lambda image, name: neighbours(image).mean(0, dtype=np.float32),
    "roll": lambda image, name: np.roll(image, 1 if hashlib.sha256(name.encode()).digest()[0] % 2 else -1, axis=1),
}


class Draw:
    """Draws that a text decides, from `Random.random` alone."""

    def __init__(self, *names: object) -> None:
        self._random = Random("/".join(map(str, names)))

    def share(self) -> float:
        return self._random.random()

    def below(self, count: int) -> int:
        return int(self._random.random() * count)

    def choice(self, values: Sequence[Any]) -> Any:
        return values[self.below(len(values))]

    def image(self, pool: Pool, digits: Sequence[int]) -> tuple[int, int]:
        """A digit and an image of it, every image of these digits as likely as any other."""
        counts = [len(pool[digit]) for digit in digits]
        at = self.below(sum(counts))
        for digit, count in zip(digits, counts, strict=True):
            if at < count:
                return digit, pool[digit][at]
            at -= count
        raise AssertionError("drawn beyond the end")


# What a question needs: the digits and images it is about, what is asked, the answer.
Asked = tuple[list[tuple[int, int]], str, str]


def some(count: int) -> Callable[[Draw, Pool], list[tuple[int, int]]]:
    return lambda draw, pool: [draw.image(pool, present(pool)) for _ in range(count)]


def present(pool: Pool, least: int = 1) -> list[int]:
    return [digit for digit in range(10) if len(pool.get(digit, ())) >= least]


def digit(draw: Draw, pool: Pool, number: int) -> Asked:
    (seen,) = some(1)(draw, pool)
    return [seen], "Which digit?", str(seen[0])


def name(draw: Draw, pool: Pool, number: int) -> Asked:
    (seen,) = some(1)(draw, pool)
    return [seen], "Its name?", NAMES[seen[0]]


def parity(draw: Draw, pool: Pool, number: int) -> Asked:
    (seen,) = some(1)(draw, pool)
    return [seen], "Even or odd?", ("even", "odd")[seen[0] % 2]


def larger(draw: Draw, pool: Pool, number: int) -> Asked:
    first = draw.image(pool, present(pool))
    second = draw.image(pool, [other for other in present(pool) if other != first[0]])
    return [first, second], "Which is larger?", "first" if first[0] > second[0] else "second"


def same(draw: Draw, pool: Pool, number: int) -> Asked:
    """Every other question is of two images of one digit."""
    if number % 2:
        first = draw.image(pool, present(pool))
        second = draw.image(pool, [other for other in present(pool) if other != first[0]])
        return [first, second], "The same digit?", "no"
    first = draw.image(pool, present(pool, least=2))
    others = [image for image in pool[first[0]] if image != first[1]]
    return [first, (first[0], draw.choice(others))], "The same digit?", "yes"


def largest(draw: Draw, pool: Pool, number: int) -> Asked:
    seen = some(3)(draw, pool)
    return seen, "The largest?", str(max(seen)[0])


def count(draw: Draw, pool: Pool, number: int) -> Asked:
    counted = draw.choice(present(pool))
    rest = [other for other in present(pool) if other != counted]
    seen = [draw.image(pool, [counted] if draw.share() < MATCH else rest) for _ in range(4)]
    return seen, f"How many are {counted}?", str(sum(shown == counted for shown, _ in seen))


def total(draw: Draw, pool: Pool, number: int) -> Asked:
    seen = some(2)(draw, pool)
    return seen, "Their sum?", str(seen[0][0] + seen[1][0])


def smallest(draw: Draw, pool: Pool, number: int) -> Asked:
    seen = some(3)(draw, pool)
    return seen, "The smallest?", str(min(seen)[0])


# Question to its images, text and answer, and to the answers to choose from (none: open).
QUESTIONS: Mapping[str, tuple[Callable[[Draw, Pool, int], Asked], tuple[str, ...]]] = {
    "digit": (digit, ()),
    "name": (name, ()),
    "parity": (parity, ("even", "odd")),
    "larger": (larger, ("first", "second")),
    "same": (same, ("yes", "no")),
    "max": (largest, ()),
    "count": (count, ()),
    "sum": (total, ()),
    "smallest": (smallest, ()),
}


def make_record(images: NDArray[np.float32], pool: Pool, task: str, id: str, number: int, seed: str) -> dict[str, Any]:
    """One `vqa` record of a task such as "larger/rot".

    images  (n, 8, 8) in [0, 1], that `pool` has the indices of
    number  which of the task's records it is: of `same` every other one is of one digit
    seed    decides what is drawn, together with `id`; the noise of an image is that of `id` and its place alone

    `source` holds the indices of the record's images.
    """
    question, style = task.split("/")
    ask, choices = QUESTIONS[question]
    seen, text, answer = ask(Draw(seed, id), pool, number)
    styled = [STYLES[style](images[index], f"{id}/{place}") for place, (_, index) in enumerate(seen)]
    listed = f" Choice list:[{', '.join(choices)}]" if choices else ""
    return {
        "id": id,
        "task": task,
        "images": styled,
        "conversation": [
            {"role": "user", "content": "<image>" * len(seen) + text + listed},
            {"role": "assistant", "content": answer},
        ],
        "form": "choice" if choices else "open",
        **({"choices": list(choices)} if choices else {}),
        "source": [index for _, index in seen],
    }


def task_records(
    images: NDArray[np.float32], pool: Pool, task: str, count: int, where: str, seed: str
) -> tuple[dict[str, Any], ...]:
    """`count` records of one task, with ids that begin with `where`."""
    short = task.replace("/", "-")
    return tuple(make_record(images, pool, task, f"{where}-{short}-{n:03d}", n, seed) for n in range(count))


def generated_records(images: NDArray[np.float32], pool: Pool, seed: str) -> Iterator[dict[str, Any]]:
    """Without end: what backbones are trained on. Five questions in plain or rolled, and `digit` also upside down in
    grey and on its side, so that a backbone knows the styles and has never been asked anything else about them."""
    number = 0
    while True:
        draw = Draw(seed, "mix", number)
        question = draw.choice(("digit", "name", "parity", "larger", "same"))
        styles = ("plain", "roll", "invert", "rot") if question == "digit" else ("plain", "roll")
        coin = draw.below(2)
        yield make_record(images, pool, f"{question}/{draw.choice(styles)}", f"public-{seed}-{number}", coin, seed)
        number += 1
