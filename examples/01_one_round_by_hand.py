"""One federated round without any loop of the library: dispatch, train at each client, average, score."""

import befit

config = {"benchmark": {"name": "digits", "clients": 3, "alpha": 10.0}, "method": "fedit"}
host = befit.runs.Host(befit.load_experiment(config))
server = host.install(befit.build_method("fedit"))  # puts the slot `shared` on the one backbone
shared = server.initial
at = befit.Tick(stage="federate", round=1, rounds=1, seed=0)

replies = []
for info in host.infos:
    site = host.site(info)  # this client's data, on the model that all of them use
    site.model.reset()
    site.model.load(shared)  # what the server dispatched
    report = befit.train_client(site, [befit.Pass(trainable=befit.slot("shared"), active=("shared",))], at, steps=20)
    replies.append(site.model.dump(befit.slot("shared")))  # what goes up
    print(f"{info.id}: {info.num_examples} examples, loss {report.losses['train']:.3f}")

shared = befit.weighted_mean(replies, [info.num_examples for info in host.infos])
print(f"the server's adapter now has norm {befit.norm(shared):.3f}, and it was {befit.norm(server.initial):.3f}")

deployed = befit.Deployment(shared, ("shared",))
for info in host.infos:
    with host.model.using(deployed.arrays, *deployed.slots):
        metrics = host.task.evaluate(host.model.backbone, host.examples(info.id, "test"), 256, host.model.device)
    print(f"{info.id}: accuracy {metrics['accuracy']:.3f}")
