"""Rounds that are exact because one thing alone moves in them: RoLoRA, FedSVD.

Every round by dense weights, `torch.optim` and a loop.
"""

from __future__ import annotations

import torch

from tests.golden.play import CLIENTS, EXAMPLES, LORA, Played, of
from tests.golden.reference import HEAD, MODULES, assert_near, change, logits, loss, mean, only, trained

CHECKED = {"rolora": "by hand", "fedsvd": "by hand"}


def test_rolora() -> None:
    """Chen et al. 2025: odd rounds train and average B, even ones A; the other factor is everybody's and stays. The
    mean of the products is then the product of the means."""
    played = Played({"name": "rolora", **LORA}, rounds=3)
    common = played.start("shared")
    for round_, factor in ((1, "B"), (2, "A"), (3, "B")):
        each = []
        for client in CLIENTS:
            still = {key: value for key, value in common.items() if key not in only(common, factor, *HEAD)}
            start = only(common, factor, *HEAD)
            each.append(trained(start, lambda own: loss(played.data(client), change({**still, **own}))))
            assert_near(played.sent(round_, client), each[-1], atol=1e-4)
        common = {**common, **mean(each, EXAMPLES)}
    assert_near(of(played.server.arrays, "shared"), common, atol=1e-4)
    for client in CLIENTS:
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, change(common)), rtol=1e-3, atol=1e-3)


def test_fedsvd() -> None:
    """Lee et al. 2025b: B alone is trained and averaged; with `B A = U S V^T`, `B <- U S` and `A <- V^T`, as
    `reinit_lora` of the released code. Signs of U and V are nobody's: they are taken from what befit sends out."""
    played = Played({"name": "fedsvd", **LORA}, rounds=2)
    common, sent = played.start("shared"), of(Played({"name": "fedsvd", **LORA}, rounds=1).server.arrays, "shared")
    for round_ in (1, 2):
        each = []
        for client in CLIENTS:
            still = only(common, "A")
            start = only(common, "B", *HEAD)
            each.append(trained(start, lambda own: loss(played.data(client), change({**still, **own}))))
            assert_near(played.sent(round_, client), each[-1], rtol=2e-3, atol=1e-4)
        common = {**common, **mean(each, EXAMPLES)}
        after = sent if round_ == 1 else of(played.server.arrays, "shared")
        for name in MODULES:
            U, S, Vh = torch.linalg.svd((common[f"{name}/B"] @ common[f"{name}/A"]).double())
            signs = torch.sign((after[f"{name}/A"].double() * Vh[:2]).sum(1))
            common[f"{name}/B"], common[f"{name}/A"] = (U[:, :2] * S[:2] * signs).float(), (Vh[:2].T * signs).T.float()
        assert_near(after, common, rtol=5e-3, atol=2e-4)
    for client in CLIENTS:
        pixels, _ = played.data(client, "test")
        torch.testing.assert_close(played.answers(client), logits(pixels, change(common)), rtol=5e-3, atol=2e-3)
