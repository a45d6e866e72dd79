"""Epsilons and noise multipliers of 20 settings, by Opacus and by dp-accounting, into accountants.json.

Run once, in an environment with `opacus==1.6.0` and `dp-accounting==0.6.0`: python make.py
"""

import json
import warnings
from pathlib import Path

import dp_accounting
from dp_accounting import pld, rdp
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.accountants.utils import get_noise_multiplier

# rate, noise multiplier, steps, delta; the first are those of usual papers: MNIST with batches of 256 of 60,000.
SETTINGS = [
    (256 / 60000, 1.1, 14063, 1e-5),
    (256 / 60000, 0.7, 10547, 1e-5),
    (256 / 60000, 1.3, 3516, 1e-5),
    (0.01, 1.0, 1000, 1e-5),
    (0.01, 4.0, 10000, 1e-5),
    (0.001, 0.8, 20000, 1e-6),
    (0.02, 1.5, 500, 1e-6),
    (0.05, 1.0, 200, 1e-4),
    (0.05, 2.0, 2000, 1e-5),
    (0.1, 1.0, 50, 1e-4),
    (0.1, 1.5, 50, 1e-5),
    (0.1, 3.0, 1000, 1e-3),
    (0.25, 1.0, 20, 1e-3),
    (0.25, 4.0, 100, 1e-5),
    (0.5, 2.0, 30, 1e-3),
    (0.5, 8.0, 400, 1e-5),
    (1.0, 1.0, 1, 1e-5),
    (1.0, 5.0, 10, 1e-5),
    (1.0, 10.0, 100, 1e-6),
    (1.0, 50.0, 1000, 1e-5),
]


def counted(accountant, rate: float, noise: float, steps: int):
    gaussian = dp_accounting.GaussianDpEvent(noise)
    event = gaussian if rate == 1 else dp_accounting.PoissonSampledDpEvent(rate, gaussian)
    return accountant.compose(dp_accounting.SelfComposedDpEvent(event, steps))


rows = []
for rate, noise, steps, delta in SETTINGS:
    row = {"rate": rate, "noise": noise, "steps": steps, "delta": delta}
    row["dp_accounting_pld"] = counted(
        pld.PLDAccountant(value_discretization_interval=1e-4), rate, noise, steps
    ).get_epsilon(delta)
    row["dp_accounting_rdp"] = counted(rdp.RdpAccountant(), rate, noise, steps).get_epsilon(delta)
    for name, kind in (("opacus_rdp", RDPAccountant), ("opacus_prv", PRVAccountant)):
        accountant = kind()
        accountant.history = [(noise, rate, steps)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            row[name] = float(accountant.get_epsilon(delta))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in ("rdp", "prv"):
            row[f"opacus_{kind}_noise"] = get_noise_multiplier(
                target_epsilon=row[f"opacus_{kind}"],
                target_delta=delta,
                sample_rate=rate,
                steps=steps,
                accountant=kind,
                epsilon_tolerance=0.001,
            )
    rows.append(row)
    print(row)
Path(__file__).with_name("accountants.json").write_text(json.dumps(rows, indent=1) + "\n")
