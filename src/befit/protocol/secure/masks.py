"""Keys that two clients agree on, the masks made of them, and which clients agree on any."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from functools import cache
from math import ceil, comb, log2

import numpy as np
from numpy.typing import NDArray

from befit.core.errors import PayloadMismatch
from befit.core.shares import rounded_up

Numbers = NDArray[np.uint64]
KEY = 32  # bytes of every key and seed
FEWEST, MOST = 3, 10_000  # clients of a sum: of two, each could subtract its own; of more the graph takes long
_BLOCK = 2**18  # numbers that are masked at once
SPARSE = 20  # clients from which on not everybody has masks with everybody
# The case that a sparse graph is made for: these shares of the clients work with the server, and drop out.
COLLUDING, DROPPING = 0.2, 0.2
PRIVATE_BITS, COMPLETE_BITS = 40, 10  # in which case privacy, and the sum, fail with probability 2^-40 and 2^-10


def public_key(private: bytes) -> bytes:
    """Of X25519."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def agreed_key(private: bytes, public: bytes, *about: str) -> bytes:
    """What two clients derive for one purpose, each from its own private and the other's public key (X25519, HKDF).

    Raises PayloadMismatch for a public key with which any private one agrees on the same.
    """
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

    try:
        shared = X25519PrivateKey.from_private_bytes(private).exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError as error:
        raise PayloadMismatch("secure sums: a client's public key is none that hides anything") from error
    return derived(shared, *about)


def derived(secret: bytes, *about: str) -> bytes:
    """A key for one purpose (HKDF with SHA-256)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = "\0".join(("befit secure sums", *about)).encode()
    return HKDF(SHA256(), KEY, None, info).derive(secret)


def add_mask(into: Numbers, key: bytes, sign: int) -> None:
    """Add or subtract the key's mask, in place and modulo 2^64: the stream of AES-256 in counter mode, as numbers."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import AES
    from cryptography.hazmat.primitives.ciphers.modes import CTR

    stream = Cipher(AES(key), CTR(bytes(16))).encryptor()  # a key makes one mask, so a counter from zero is fresh
    nothing, keystream = bytes(8 * min(len(into), _BLOCK)), bytearray(8 * min(len(into), _BLOCK) + 16)
    for start in range(0, len(into), _BLOCK):
        part = into[start : start + _BLOCK]
        stream.update_into(memoryview(nothing)[: 8 * len(part)], keystream)
        mask = np.frombuffer(keystream, "<u8", len(part))
        (np.add if sign > 0 else np.subtract)(part, mask, out=part)


def sealed(key: bytes, text: bytes) -> bytes:
    """Encrypted with a key that encrypts nothing else (ChaCha20-Poly1305)."""
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    return ChaCha20Poly1305(key).encrypt(bytes(12), text, None)


def unsealed(key: bytes, box: bytes) -> bytes:
    """Raises ValueError for a box that was not sealed with this key."""
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

    try:
        return ChaCha20Poly1305(key).decrypt(bytes(12), box, None)
    except InvalidTag as error:
        raise ValueError("it was not sealed with this key") from error


def neighbours(clients: Sequence[str], seed: bytes, threshold: float) -> dict[str, list[str]]:
    """With whom each client has masks in common and exchanges shares: with everybody, or with the nearest on a circle
    of random order (Bell et al. 2020, section 3, the graph of Harary). Symmetric, and sorted."""
    number, count = degree(len(clients), threshold), len(clients)
    if number == count - 1:
        return {client: sorted({*clients} - {client}) for client in clients}
    order = sorted(clients, key=lambda client: hashlib.sha256(seed + client.encode()).digest())
    steps = [step for step in range(-number // 2, number // 2 + 1) if step]
    return {client: sorted(order[(place + step) % count] for step in steps) for place, client in enumerate(order)}


def fewest_left(clients: int, threshold: float) -> int:
    """How many clients of a round have to stay to the end. More than a sparse graph is made for could cut it in two."""
    sparse = degree(clients, threshold) < clients - 1
    return max(needed(clients, threshold), clients - ceil(DROPPING * clients) if sparse else 0)


def needed(holders: int, threshold: float) -> int:
    """How many of the holders of a secret's shares have to give theirs.

    >>> needed(3, 0.67), needed(10, 0.67), needed(25, 0.56)
    (3, 7, 14)
    """
    return max(FEWEST, rounded_up(threshold, holders))


@cache
def degree(clients: int, threshold: float) -> int:
    """Neighbours of each client: the fewest, an even number, with which none of these is likelier than the bits above
    say; else all others.

    So many neighbours of somebody work with the server that it gets both of its secrets; the honest clients that stay
    are in two parts, whose sums the server would see, for which two runs of half as many neighbours have to be gone
    from the circle; too few stay to give a client's shares back.

    >>> [degree(count, 0.67) for count in (10, 20, 50, 200)]
    [9, 16, 34, 100]
    """
    if clients < SPARSE:
        return clients - 1
    colluding, dropping = ceil(COLLUDING * clients), ceil(DROPPING * clients)
    for number in range(2, clients - 1, 2):
        enough, others = needed(number + 1, threshold), clients - 1
        apart = comb(clients, 2) * _all_of(number, colluding + dropping, clients)
        known = clients * _more(others, colluding, number, enough - 1)
        lost = clients * _more(others, dropping, number, number - enough)
        if max(apart, known) <= 2.0**-PRIVATE_BITS and lost <= 2.0**-COMPLETE_BITS:
            return number
    return clients - 1


def _all_of(chosen: int, marked: int, everybody: int) -> float:
    """The probability that all who are chosen are marked."""
    return comb(marked, chosen) / comb(everybody, chosen)


def _more(everybody: int, marked: int, chosen: int, than: int) -> float:
    """The probability that more than so many of those chosen are marked (hypergeometric)."""
    ways = sum(
        comb(marked, count) * comb(everybody - marked, chosen - count)
        for count in range(max(0, than + 1), min(marked, chosen) + 1)
    )
    return ways / comb(everybody, chosen)


def mask_name(bound: str, download: bytes, first: str, second: str) -> tuple[str, ...]:
    """What the key of a mask that two clients have in common is derived for.

    download  hash of what both were sent: between two models of one round no masks cancel (Pasquini et al. 2022,
              section 7)
    """
    return ("common mask", bound, download.hex(), *sorted((first, second)))


def bytes_for(bits: int, largest: int) -> int:
    """Bytes of a number that is the sum of numbers of so many bits with weights of up to `largest` in all."""
    return ceil((bits + log2(largest + 1)) / 8)
