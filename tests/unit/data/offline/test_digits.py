"""`digits` and its backbone: disjoint parts, skewed labels, and how good the backbone is."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import befit.zoo
from befit.core.errors import ConfigError, DataError, ModelError
from befit.data.offline import digits as digits_module
from befit.data.offline.digits import digits, load, private_partition, public_digits, shipped
from befit.data.partition import partition_hash
from befit.zoo import zoo_names, zoo_path

SPLITS = ("train", "val", "test")
DRAWN_WITH = "2.4.6"  # the NumPy of the lists that ship


def indices(records):
    return [int(record["id"].removeprefix("digit-")) for record in records]


def shipped_backbone() -> Path:
    folder = zoo_path("digits-vit")
    assert folder is not None
    return folder


def accuracy(model, client):
    pixels = torch.from_numpy(np.stack([record["image"] for record in client.test]))[:, None]
    labels = torch.tensor([record["label"] for record in client.test])
    with torch.no_grad():
        return float((model(pixel_values=pixels).logits.argmax(-1) == labels).float().mean())


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"seed": 4},
        {"clients": 20},
        {"partition": "shards"},
        {"alpha": 5.0},
        {"partition": "balanced"},
        {"partition": "quantity", "alpha": 2.0},
        {"partition": "iid"},
        {"partition": "classes", "classes": 3},
    ],
)
def test_every_private_image_is_held_once_and_no_public_one(arguments):
    federation = digits(**arguments)
    held = {split: [i for client in federation.clients for i in indices(getattr(client, split))] for split in SPLITS}
    assert {split: len(part) for split, part in held.items()} == {"train": 500, "val": 150, "test": 647}
    assert sorted([*held["train"], *held["val"], *held["test"]]) == list(range(500, 1797))
    assert indices(federation.public) == list(range(500))


def test_no_two_images_are_equal_so_no_test_image_was_trained_on():
    images, _ = load()
    assert len({image.tobytes() for image in images}) == len(images) == 1797


def test_records_are_the_images_of_the_file_in_zero_to_one():
    from sklearn.datasets import load_digits

    source: Any = load_digits()
    images, labels = load()
    assert np.array_equal(images, (source.images / 16).astype(np.float32)) and np.array_equal(labels, source.target)
    federation = digits()
    for record in (federation.clients[3].train[0], federation.clients[9].test[-1], federation.public[7]):
        index = indices([record])[0]
        assert record["image"].dtype == np.float32 and record["image"].shape == (8, 8)
        assert (record["image"] * 16).tolist() == source.images[index].tolist()
        assert record["label"] == source.target[index] and type(record["label"]) is int
    assert federation.label_names == tuple("0123456789")


@pytest.mark.parametrize("seed", range(5))
def test_every_client_has_twenty_examples_to_train_on_and_twenty_to_be_tested_on(seed):
    for client in digits(seed=seed).clients:
        assert len(client.train) >= 20 and len(client.test) >= 20, client.id


def test_train_and_test_of_a_client_have_the_same_mix_of_classes():
    """One draw of shares serves both, so each class divides alike: here 500 and 647 images of ten classes."""
    _, labels = load()
    parts = private_partition(labels, 10, 0.5, "dirichlet", 0)
    shares = []
    for split in ("train", "test"):
        counts = np.array([np.bincount(labels[part], minlength=10) for part in parts[split]])
        shares.append(counts / counts.sum(axis=0))
    # Rounding moves less than one image of a class, of which train has the fewer.
    fewest = min(np.bincount(labels[np.concatenate(parts["train"])], minlength=10))
    assert np.abs(shares[0] - shares[1]).max() < 2 / fewest


def test_a_small_alpha_is_more_skewed_than_a_large_one():
    def skew(alpha):
        clients = digits(clients=3, alpha=alpha, seed=1).clients
        return np.mean([max(np.bincount([r["label"] for r in c.train])) / len(c.train) for c in clients])

    assert skew(0.1) > skew(1.0) > skew(100.0)


def test_other_divisions_skew_sizes_or_labels_alone_and_train_and_test_alike():
    def table(split, **arguments):
        """(clients, classes): how many images of each class."""
        labels = [[record["label"] for record in getattr(one, split)] for one in digits(**arguments).clients]
        return np.stack([np.bincount(one, minlength=10) for one in labels])

    def of_labels(counts):
        return counts / counts.sum(1, keepdims=True)

    for arguments in ({"partition": "quantity", "alpha": 0.5}, {"partition": "iid"}):
        train, test = (table(split, **arguments) for split in ("train", "test"))
        assert of_labels(train).max() < 0.4 and of_labels(test).max() < 0.4  # no client has one class mostly
        uneven = train.sum(1).max() / train.sum(1).min()
        assert uneven > 3 if arguments["partition"] == "quantity" else uneven == 1
        np.testing.assert_allclose(train.sum(1) / 500, test.sum(1) / 647, atol=0.02)
    balanced = table("train", partition="balanced", alpha=0.3)
    assert balanced.sum(1).max() <= 50 + balanced.max(1).max() and of_labels(balanced).max(1).mean() > 0.4
    few, few_test = (table(split, partition="classes", classes=3) for split in ("train", "test"))
    assert ((few > 0).sum(1) == 3).all() and ((few > 0) == (few_test > 0)).all() and ((few > 0).sum(0) == 3).all()
    np.testing.assert_allclose(few / few.sum(0), few_test / few_test.sum(0), atol=0.05)
    with pytest.raises(DataError, match="500 examples are too few for 60 clients with 10 each"):
        digits(partition="quantity", clients=60)
    with pytest.raises(DataError, match="partition iid leaves a client 8 training or test images, and 10 is the least"):
        digits(partition="iid", clients=60)


def test_shards_give_a_client_few_classes():
    for client in digits(partition="shards").clients:
        assert len({record["label"] for record in client.train}) <= 4
        assert len(client.train) == 50


@pytest.mark.parametrize(("clients", "seed"), [(10, 0), (10, 1), (10, 2), (10, 3), (10, 4), (20, 0)])
def test_the_default_partitions_ship_and_are_the_ones_that_are_drawn(clients, seed):
    """NumPy does not promise the same draws in every version: another one than drew the lists is reported only."""
    _, labels = load()
    parts = shipped(clients, 0.5, seed)
    assert parts is not None
    drawn = private_partition(labels, clients, 0.5, "dirichlet", seed)
    same = all(partition_hash(parts[split]) == partition_hash(drawn[split]) for split in SPLITS)
    if not same and np.__version__ != DRAWN_WITH:
        pytest.skip(f"NumPy {np.__version__} draws other partitions than the ones that ship")
    assert same


def test_whole_alphas_find_the_shipped_lists_too():
    assert shipped(3, 10, 0) is not None and shipped(3, 10.5, 0) is None


def test_a_shipped_list_that_was_changed_is_refused(tmp_path, monkeypatch):
    stored = json.loads((digits_module.files("befit.data.offline") / "digits_partitions.json").read_text())
    entry = stored["clients=10,alpha=0.5,seed=0"]["indices"]["test"]
    entry[0].append(entry[1].pop())
    (tmp_path / "digits_partitions.json").write_text(json.dumps(stored))
    monkeypatch.setattr(digits_module, "files", lambda package: tmp_path)
    with pytest.raises(DataError, match=r"digits_partitions\.json .* hash"):
        digits()


def test_the_manifest_says_how_the_data_was_divided():
    federation = digits(clients=10, seed=3)
    manifest = federation.manifest
    parts = [indices(getattr(client, split)) for split in SPLITS for client in federation.clients]
    assert manifest["partition"]["sha256"] == partition_hash(parts)
    assert manifest["partition"]["args"] == {"clients": 10, "alpha": 0.5, "partition": "dirichlet", "seed": 3}
    assert manifest["counts"]["client-00"]["test"] == len(federation.clients[0].test)
    assert json.loads(json.dumps(manifest)) == manifest


def test_too_many_clients_are_refused_with_the_best_that_was_found(monkeypatch):
    monkeypatch.setattr("befit.data.partition._ATTEMPTS", 5)
    with pytest.raises(DataError, match=r"no partition of digits .* every client 10 examples; the best had \d"):
        digits(clients=45, alpha=0.1)
    with pytest.raises(DataError, match="at least one client, got 0"):
        digits(clients=0)


def test_the_backbone_that_ships_is_small_and_has_the_shape_that_is_documented():
    folder = shipped_backbone()
    weights = load_file(folder / "model.safetensors")
    assert sum(tensor.numel() for tensor in weights.values()) == 136_138
    assert (folder / "model.safetensors").stat().st_size < 3_000_000
    assert "digits-vit" in zoo_names() and zoo_path("digits-vat") is None


@pytest.fixture(scope="module")
def backbone():
    from transformers import ViTForImageClassification

    return ViTForImageClassification.from_pretrained(shipped_backbone()).eval()


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_backbone_knows_digits_but_not_the_clients_ones(backbone, seed):
    """Zero-shot accuracy of .33 to .51, give or take .05: above chance, and below .55 so that much is left to learn."""
    clients = digits(seed=seed).clients
    assert 0.28 < np.mean([accuracy(backbone, client) for client in clients]) < 0.55


def test_the_backbone_learnt_the_public_digits_rolled_by_one_pixel(backbone):
    """Rolled, it knows them; as they are, it does not: the shift is part of what clients have to learn."""
    images, labels = public_digits()
    right = []
    for shift in (1, 0):
        with torch.no_grad():
            logits = backbone(pixel_values=torch.roll(torch.from_numpy(images)[:, None], shift, dims=-1)).logits
        right.append(float((logits.argmax(-1) == torch.from_numpy(labels)).float().mean()))
    assert right[0] > 0.9 and right[1] < 0.6, right


def test_damaged_or_missing_weights_are_refused_before_they_are_used(tmp_path, monkeypatch):
    shutil.copytree(shipped_backbone(), tmp_path / "digits-vit")
    monkeypatch.setattr(befit.zoo, "FOLDER", tmp_path)
    weights = tmp_path / "digits-vit" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(ModelError, match=r"digits-vit .* hash"):
        zoo_path("digits-vit")
    weights.unlink()
    with pytest.raises(ModelError, match=r"digits-vit .* missing"):
        zoo_path("digits-vit")


def test_an_unknown_partition_is_refused_by_name():
    from befit.data.registry import build

    with pytest.raises(
        ConfigError, match=r'"shard" is not one of dirichlet, balanced, quantity, iid, classes, shards. Did you'
    ):
        build("digits", None, {"partition": "shard"})
