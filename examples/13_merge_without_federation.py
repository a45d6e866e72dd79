"""The merging mathematics alone: three updates of one weight, every rule, and what an adapter of rank 4 keeps of each.

No array here is as large as the weight. `befit merge` does the same with PEFT checkpoints on a disk.
"""

import torch

from befit import adapters, merge

D_OUT, D_IN = 512, 384
random = torch.Generator().manual_seed(0)
shared_B, shared_A = torch.randn(D_OUT, 2, generator=random), torch.randn(2, D_IN, generator=random)


def client(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What all clients learnt, in two directions, and what this one learnt besides."""
    own_B, own_A = torch.randn(D_OUT, rank, generator=random), torch.randn(rank, D_IN, generator=random)
    return torch.cat([shared_B, own_B], dim=1), torch.cat([shared_A, own_A])


updates = [merge.ModuleUpdates("q_proj", [client(2), client(3), client(2)], scales=[2.0, 1.0, 2.0])]
for k, (pair, scale) in enumerate(zip(updates[0].pairs, updates[0].scales, strict=True)):
    print(f"client-{k:02d}: rank {len(pair[1])}, norm {scale * adapters.inner(pair, pair) ** 0.5:.1f}")
shared = (shared_B, shared_A)
print(f"{'rule':<16}{'space':<8}{'rank':>5}{'norm':>9}{'kept at 4':>11}{'cosine with what is shared':>28}")
cosines = {}
for how in (
    merge.Merge(space="delta", rule="mean"),
    merge.Merge(space="delta", rule="iso-c"),
    merge.Merge(space="knots", rule="ties"),
    merge.Merge(space="knots", rule="dare-ties"),
):
    draw = lambda k, name: torch.Generator().manual_seed(k)  # noqa: E731  (for DARE)
    [(module, update)] = merge.merge_updates(lambda: updates, how.coordinates, how.rule_value, [1.0, 1.0, 1.0], draw)
    whole = update.pair()
    adapter = merge.finish(update, rank=4, scale=2.0, generator=random)
    cosine = adapters.inner(whole, shared) / (adapters.inner(whole, whole) * adapters.inner(shared, shared)) ** 0.5
    cosines[how.rule] = cosine
    print(f"{how.rule:<16}{how.space:<8}{len(whole[1]):>5}{adapter.norm:>9.1f}{adapter.energy:>11.1%}{cosine:>28.3f}")

assert adapter.B.shape == (D_OUT, 4) and adapter.A.shape == (4, D_IN)
assert cosines["mean"] > 0.7  # what the clients have in common outweighs what each has alone
