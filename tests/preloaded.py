"""Everything that a command imports, so that `tests.processes` pays for it once."""

import peft
import transformers.models.bert.modeling_bert
import transformers.models.llama.modeling_llama
import transformers.models.vit.modeling_vit

import befit.ablations.ablate
import befit.cli.main
import befit.compare.write
import befit.cost.estimate
import befit.deployed
import befit.report.page
import befit.runner
from befit.registry import method_names

method_names()  # imports every method

__all__ = ["befit", "peft", "transformers"]
