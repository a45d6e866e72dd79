"""Everything that a command imports, and what libraries make of themselves when they are first asked, so that
`tests.processes` pays for it once."""

import sys

import rich.progress
import transformers.models.bert.modeling_bert
import transformers.models.llama.modeling_llama
import transformers.models.vit.modeling_vit
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import befit.cli.main
import befit.report.page
import befit.report.run_plots
import befit.runs.artifacts
import befit.runs.estimate
import befit.runs.runner
import befit.studies.ablations.measure
import befit.studies.compare.write
from befit.config.load import load_experiment
from befit.protocol.registry import method_names
from tests.quicker import make_quicker

make_quicker()
method_names()  # imports every method
load_experiment({"benchmark": "digits", "method": "fedit"})  # the schema, with pydantic
get_checkpoint_conversion_mapping("vit")  # a thousand patterns of transformers, for models of all kinds

# PEFT imports bitsandbytes where it is there, and that PyTorch's compiler: a second or two, for backbones of few bits,
# which no process here has.
sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
import peft  # noqa: E402

del sys.modules["bitsandbytes"]

__all__ = ["befit", "peft", "rich", "transformers"]
