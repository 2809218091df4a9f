"""Steps of torchscale's LongNet models over a package with their signatures: what is right passes, near misses fail."""

from pathlib import Path

import pytest
import torch

from dilabench.compat.torchscale import DilatedAttention
from dilabench.compat.torchscale_model import build_dilabench
from dilabench.contracts import BuildContext
from dilabench.engine.call.inputs import InputStore
from dilabench.engine.call.prepared_call import PreparedCall
from dilabench.engine.call.specs import BackendSpec, CaseSpec, SecondSpec
from dilabench.engine.verify.case_verifier import CaseVerifier
from dilabench.plugins.builtin.model_presets import MODELS
from dilabench.plugins.builtin.models import TORCHSCALE_STEPS
from dilabench.record import Case
from dilabench.workload.model import ITSELF
from dilabench.workload.spec import WorkloadRequest
from tests.conftest import slow

CPU = torch.device("cpu")
RECORDED = Path(__file__).parents[1] / "impls" / "peers" / "recorded"
MATH = BackendSpec(
    name="math", target="dilabench.backends.math:attend", backward_target="dilabench.backends.math:attend_backward"
)
TARGETS = {model.name: model.target for model in TORCHSCALE_STEPS}
TINY = next(preset.fields for preset in MODELS if preset.name == "longnet_tiny")
SMALL = {
    "num_heads": 2,
    "head_dim": 8,
    "segment_lengths": (96, 384),
    "model": {**TINY["model"], "width": 16, "inner": 24},
}


@pytest.fixture(autouse=True)
def recorded(monkeypatch):
    monkeypatch.setenv("DILABENCH_PEERS", str(RECORDED))
    monkeypatch.syspath_prepend(RECORDED)


def verified(target, **fields):
    asked = {**TINY, **SMALL, "seq_len": 200, "dtype": "float32", **fields}
    workload = WorkloadRequest(**asked).resolve("float32")
    eager = SecondSpec(name="torchscale-eager-model", target=TARGETS["torchscale-eager-model"])
    case = Case(implementation="own", workload=workload)
    backend = MATH if target == TARGETS["torchscale-model"] else None
    spec = CaseSpec(case=case, target=target, takes="model", seconds=(eager,), seed=3, backend=backend)
    return CaseVerifier(CPU).verify(PreparedCall(spec, CPU, InputStore(CPU)))


FORMS = [{}, slow({"causal": False}), slow({"mode": "forward"}), slow({"batch_size": 2})]


@pytest.mark.parametrize("fields", FORMS, ids=str)
@pytest.mark.parametrize("name", [slow("torchscale-model"), "torchscale-dilabench-model"])
def test_attentions_that_are_right_pass(name, fields):
    verification, why = verified(TARGETS[name], **fields)
    assert verification.passed, why


@pytest.mark.slow
def test_values_are_the_attention_of_each_token_alone():
    verification, why = verified(TARGETS["torchscale-identity-model"], window=ITSELF)
    assert verification.passed, why
    assert not verified(TARGETS["torchscale-identity-model"])[0].passed


CHOSEN = [None]


@pytest.fixture
def chosen():
    yield CHOSEN
    CHOSEN[0] = None


class Missing(DilatedAttention):
    """dilabench's module with one mistake."""

    def forward(self, query, key, value, *given, is_causal=False, **named):
        """As torchscale's."""
        if CHOSEN[0] == "not causal":
            is_causal = False
        if CHOSEN[0] == "a branch is missing":
            self.args.segment_length, self.args.dilated_ratio = (
                self.args.segment_length[:1],
                self.args.dilated_ratio[:1],
            )
        return super().forward(query, key, value, *given, is_causal=is_causal, **named)


def build_near_miss(workload, context):
    step = build_dilabench(workload, context)
    for part in step.modules():
        if isinstance(part, DilatedAttention):
            part.__class__ = Missing
            part.merge_grad = "exact" if CHOSEN[0] == "the exact gradient of the merge" else "detached"
    return step


@pytest.mark.slow
@pytest.mark.parametrize("miss", ["not causal", "a branch is missing", "the exact gradient of the merge"])
def test_near_misses_are_refused(miss, chosen):
    verification, why = verified(f"{__name__}:build_near_miss")
    assert verification.passed, f"without a mistake: {why}"
    chosen[0] = miss
    assert not verified(f"{__name__}:build_near_miss")[0].passed


def test_without_torchscale_it_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr("dilabench.impls.peers.private_import.importlib.util.find_spec", lambda _: None)
    workload = WorkloadRequest(**TINY).resolve("float32")
    with pytest.raises(ModuleNotFoundError, match="torchscale is not installed; clone it"):
        build_dilabench(workload, BuildContext(device=CPU))
