"""Tasks: image and text classification, language modelling, preferences among answers, questions about images. Torch
comes with the first."""

from typing import TYPE_CHECKING

from befit.core.lazy import lazy
from befit.core.metrics import CLASS_METRICS
from befit.tasks.lm_records import FIELDS as LM_FIELDS
from befit.tasks.lm_records import lm_input, lm_record
from befit.tasks.preference_records import preference_record
from befit.tasks.registry import TaskKind, get_task, make_task, register_task, task_names
from befit.tasks.text_metrics import GENERATED, METRICS
from befit.tasks.vqa_metrics import VQA_METRICS
from befit.tasks.vqa_records import FIELDS, vqa_input, vqa_record

if TYPE_CHECKING:
    from befit.tasks.base import Task
    from befit.tasks.causal_lm import CausalLM
    from befit.tasks.image_classification import ImageClassification
    from befit.tasks.preference import Preference
    from befit.tasks.text_classification import TextClassification
    from befit.tasks.vqa import VQA

__all__ = [
    "VQA",
    "CausalLM",
    "ImageClassification",
    "Preference",
    "Task",
    "TaskKind",
    "TextClassification",
    "get_task",
    "make_task",
    "register_task",
    "task_names",
]

__getattr__, __dir__ = lazy(__name__, __file__)

register_task(
    "text-classification",
    auto_class="AutoModelForSequenceClassification",
    peft_type="SEQ_CLS",
    fields=("text", "label"),
    optional=("text_pair",),
    metrics=CLASS_METRICS,
)("befit.tasks.text_classification:TextClassification")

register_task(
    "image-classification",
    auto_class="AutoModelForImageClassification",
    processor="images",
    fields=("image", "label"),
    metrics=CLASS_METRICS,
)("befit.tasks.image_classification:ImageClassification")

register_task(
    "causal-lm",
    auto_class="AutoModelForCausalLM",
    peft_type="CAUSAL_LM",
    fields=("instruction", "output"),
    optional=("input",),
    lists=("choices", "choice_names", "references"),
    answer="output",
    has_classes=False,
    writes_text=True,
    metrics=METRICS,
    other_fields=LM_FIELDS,
    other_record=lm_record,
    other_input=lm_input,
)("befit.tasks.causal_lm:CausalLM")

register_task(
    "preference",
    auto_class="AutoModelForCausalLM",
    peft_type="CAUSAL_LM",
    fields=("instruction", "chosen", "rejected"),
    optional=("input",),
    answer="chosen",
    has_classes=False,
    writes_text=True,
    metrics=("preference_accuracy", *(name for name in GENERATED if name != "choice_parse")),
    other_fields=("prompt",),
    other_record=preference_record,
    other_input=lm_input,
)("befit.tasks.preference:Preference")

register_task(
    "vqa",
    auto_class="AutoModelForImageTextToText",
    processor="images and text",
    optional=FIELDS,
    has_classes=False,
    writes_text=True,
    metrics=(*METRICS, *VQA_METRICS),
    read_record=vqa_record,
    read_input=vqa_input,
)("befit.tasks.vqa:VQA")
