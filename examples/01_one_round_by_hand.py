"""One federated round without any loop of the library: dispatch, train at each client, average, score."""

from befit.adapters.keys import slot
from befit.adapters.state import norm, weighted_mean
from befit.config.experiment import load_experiment
from befit.core.values import Tick
from befit.protocol.method import Deployment
from befit.protocol.registry import build_method
from befit.runs.host import Host
from befit.train.loop import Pass, train

host = Host(load_experiment({"benchmark": {"name": "digits", "clients": 3, "alpha": 10.0}, "method": "fedit"}))
server = host.install(build_method("fedit"))  # puts the slot `shared` on the one backbone
shared = server.initial
at = Tick(stage="federate", round=1, rounds=1, seed=0)

replies = []
for info in host.infos:
    site = host.site(info)  # this client's data, on the model that all of them use
    site.model.reset()
    site.model.load(shared)  # what the server dispatched
    report = train(site, [Pass(trainable=slot("shared"), active=("shared",))], at, steps=20)
    replies.append(site.model.dump(slot("shared")))  # what goes up
    print(f"{info.id}: {info.num_examples} examples, loss {report.losses['train']:.3f}")

shared = weighted_mean(replies, [info.num_examples for info in host.infos])
print(f"the server's adapter now has norm {norm(shared):.3f}, and it was {norm(server.initial):.3f}")

deployed = Deployment(shared, ("shared",))
for info in host.infos:
    with host.model.using(deployed.arrays, *deployed.slots):
        metrics = host.task.evaluate(host.model.backbone, host.examples(info.id, "test"), 256, host.model.device)
    print(f"{info.id}: accuracy {metrics['accuracy']:.3f}")
