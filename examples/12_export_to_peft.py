"""Take one client's adapter out of a run and use it with PEFT alone, without befit."""

import tempfile
from pathlib import Path

import torch
from peft import PeftModel
from transformers import ViTForImageClassification

import befit

config = {
    "benchmark": {"name": "digits", "clients": 3, "alpha": 10.0},
    "method": "potara",
    "baselines": [],
    "federation": {"rounds": 5},
}

with tempfile.TemporaryDirectory() as folder:
    run = befit.run(config, out=Path(folder) / "run")
    adapter = befit.export(run.path, "client-00", Path(folder) / "for-the-hospital")
    print("exported:", ", ".join(sorted(path.name for path in adapter.iterdir())))

    backbone = ViTForImageClassification.from_pretrained(befit.zoo.zoo_path("digits-vit"))
    model = PeftModel.from_pretrained(backbone, str(adapter)).eval()

client = befit.load_federation(befit.load_experiment(config)).clients[0]
pixels = torch.stack([torch.from_numpy(record["image"]) for record in client.test])[:, None]
labels = torch.tensor([record["label"] for record in client.test])
with torch.no_grad():
    right = int((model(pixel_values=pixels).logits.argmax(-1) == labels).sum())
said = run.results["clients"][client.id]["accuracy"]
print(f"{client.id} with PEFT: {right} of {len(labels)} right; befit said {said:.3f}")
assert abs(right / len(labels) - said) < 1e-9
