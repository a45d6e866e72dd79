"""The same FedIT run as a user of PEFT writes it: a loop of one's own, and a usual app for Flower's simulation.

Nothing of befit trains, sends or aggregates here; befit only provides the backbone and the examples.
"""

from __future__ import annotations

import copy
from functools import lru_cache
from typing import Any

import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import Tensor, nn

from befit.core.values import Tick
from befit.protocol.site import shuffled_batches
from befit.runs.host import Host
from common import host

State = dict[str, Tensor]


@lru_cache(maxsize=1)
def made(clients: int, rounds: int, steps: int, batch_size: int) -> Host:
    """Backbone and examples, once a process."""
    train = {"max_steps": steps, "batch_size": batch_size}
    where = host("digits", clients, "fedit", train=train, federation={"rounds": rounds})
    for info in where.infos:
        where.examples(info.id, "train")
    return where


@lru_cache(maxsize=1)
def backbone(where: Host) -> nn.Module:
    return copy.deepcopy(where.model).unwrap()


def fresh(where: Host) -> Any:
    """A new model with an adapter, as most apps make one for every message."""
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=16, target_modules=["query", "value"], modules_to_save=["classifier"])
    config.target_modules = sorted(path for path in where.model.paths.values() if path != "classifier")
    return get_peft_model(copy.deepcopy(backbone(where)), config)  # type: ignore[arg-type]


def train_client(where: Host, model: Any, number: int, round_: int, steps: int, batch_size: int) -> float:
    """The client's steps on the batches that befit draws for it; the mean loss."""
    info = where.infos[number]
    at = Tick("federate", round_, where.experiment.federation.rounds, where.experiment.federation.seed)
    generator = torch.Generator().manual_seed(at.seed_for(info.id, "batches"))
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimiser, total = torch.optim.AdamW(parameters, lr=where.experiment.train.lr, weight_decay=0.0), 0.0
    examples = where.examples(info.id, "train")
    model.train()
    for indices in shuffled_batches(len(examples), batch_size, steps, generator):
        batch = examples.batch(indices)
        loss = model(pixel_values=batch["pixel_values"], labels=batch["labels"]).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        total += loss.item()
    return total / steps


def loop(where: Host, rounds: int, steps: int, batch_size: int, kept: bool) -> tuple[State, Any]:
    """Client after client, with a fresh model for each, or one that all take over."""
    model = fresh(where)
    shared = {key: value.detach().clone() for key, value in get_peft_model_state_dict(model).items()}
    for round_ in range(1, rounds + 1):
        total: State = {}
        weight = 0
        for number, info in enumerate(where.infos):
            own = model if kept else fresh(where)
            set_peft_model_state_dict(own, shared)
            train_client(where, own, number, round_, steps, batch_size)
            for key, value in get_peft_model_state_dict(own).items():
                total[key] = total.get(key, torch.zeros_like(value)) + info.num_examples * value.detach()
            weight += info.num_examples
        shared = {key: value / weight for key, value in total.items()}
    return shared, model


def accuracy(where: Host, shared: State, model: Any) -> float:
    set_peft_model_state_dict(model, shared)
    return where.task.evaluate(model, where.examples(where.infos[0].id, "test"), 256, "cpu")["accuracy"]


def flower_apps(clients: int, rounds: int, steps: int, batch_size: int, results: list[State]) -> tuple[Any, Any]:
    """A ServerApp with FedAvg and a ClientApp, as Flower's examples of fine-tuning with PEFT have them."""
    from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp
    from flwr.serverapp.strategy import FedAvg

    client, server = ClientApp(), ServerApp()

    @client.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        where = made(clients, rounds, steps, batch_size)
        number = int(context.node_config["partition-id"])
        model = fresh(where)
        set_peft_model_state_dict(model, message.content["arrays"].to_torch_state_dict())  # type: ignore[union-attr]
        round_ = int(message.content["config"]["server-round"])  # type: ignore[index, arg-type, call-overload]
        loss = train_client(where, model, number, round_, steps, batch_size)
        metrics = MetricRecord({"train_loss": loss, "num-examples": where.infos[number].num_examples})
        arrays = ArrayRecord(get_peft_model_state_dict(model))  # type: ignore[arg-type]
        return Message(content=RecordDict({"arrays": arrays, "metrics": metrics}), reply_to=message)

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        where = made(clients, rounds, steps, batch_size)
        initial = ArrayRecord(get_peft_model_state_dict(fresh(where)))  # type: ignore[arg-type]
        strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=clients, min_available_nodes=clients)
        done = strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds)
        results.append(dict(done.arrays.to_torch_state_dict()))

    return server, client


def run_pfl(where: Host, rounds: int, steps: int, batch_size: int) -> tuple[State, Any]:
    """The same in `pfl`: one model that clients take over, and their batches as the data of the round's users."""
    from pfl.aggregate.simulate import SimulatedBackend  # type: ignore[import-not-found]
    from pfl.algorithm.base import NNAlgorithmParams  # type: ignore[import-not-found]
    from pfl.algorithm.federated_averaging import FederatedAveraging  # type: ignore[import-not-found]
    from pfl.data.dataset import Dataset  # type: ignore[import-not-found]
    from pfl.data.federated_dataset import FederatedDataset  # type: ignore[import-not-found]
    from pfl.hyperparam import NNTrainHyperParams  # type: ignore[import-not-found]
    from pfl.metrics import Weighted  # type: ignore[import-not-found]
    from pfl.model.pytorch import PyTorchModel  # type: ignore[import-not-found]

    clients, served = len(where.infos), iter(range(rounds * len(where.infos)))

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = fresh(where)

        def loss(self, pixels: Tensor, labels: Tensor, eval: bool = False) -> Tensor:
            self.train(not eval)
            return self.inner(pixel_values=pixels, labels=labels).loss

        def metrics(self, pixels: Tensor, labels: Tensor, eval: bool = False) -> dict[str, Any]:
            with torch.no_grad():
                loss = self.loss(pixels, labels, eval)
            return {"loss": Weighted(float(loss) * len(labels), len(labels))}

    def users(number: int) -> Any:
        info, at = where.infos[number], Tick("federate", next(served) // clients + 1, rounds, 0)
        examples = where.examples(info.id, "train")
        generator = torch.Generator().manual_seed(at.seed_for(info.id, "batches"))
        rows = torch.cat(list(shuffled_batches(len(examples), batch_size, steps, generator)))
        batch = examples.batch(rows)
        return Dataset([batch["pixel_values"], batch["labels"]], user_id=str(number))

    turn = iter(list(range(clients)) * rounds)
    trained = Trained()
    parameters = [parameter for parameter in trained.parameters() if parameter.requires_grad]
    model = PyTorchModel(
        trained,
        lambda _, lr: torch.optim.AdamW(parameters, lr=lr, weight_decay=0.0),
        torch.optim.SGD(parameters, lr=1.0),
    )
    data = FederatedDataset(users, lambda: next(turn))
    FederatedAveraging().run(
        NNAlgorithmParams(rounds, 10**6, clients, None),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=where.experiment.train.lr, local_batch_size=batch_size
        ),
        send_metrics_to_platform=False,
    )
    return dict(get_peft_model_state_dict(trained.inner)), trained.inner
