"""What every pattern owes its caller at the edges: a call of each, by both ways in."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from dilabench.attention import (
    DilatedAttention,
    MultiheadDilatedAttention,
    NativeSparseAttention,
    attention,
    block_sparse_attention,
    call,
    dilated_attention,
    native_sparse_attention,
    ring_attention,
    sequence_shards,
)
from dilabench.backends import math as math_backend
from dilabench.compat.torchscale import DilatedAttention as FromTorchscale
from dilabench.patterns import TopKBlocksPattern
from tests.attention.every_pattern import BOUNDS, CASES, SPANS, Case, N
from tests.conftest import slow

cases = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
# In the default set alternately as a batch and packed.
ALTERNATE = [name for at, name in enumerate(CASES) if at // 2 % 2 == at % 2]
alternate_cases = pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name in ALTERNATE else pytest.mark.slow) for name, case in CASES.items()],
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(params=["eager", "operator"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Calls run by the autograd function, or by the operator that compilers see."""
    if request.param == "operator":
        monkeypatch.setattr(call, "is_plain_eager_call", lambda *_: False)
    name: str = request.param
    return name


@pytest.fixture
def by_rules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same kernels, which add in one order on a GPU, without a measurement of others."""
    monkeypatch.setenv("DILABENCH_FIRST_USE", "0")
    if not torch.cuda.is_available():
        # torch loads its compiler to switch it on.
        yield
        return
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def leaves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors that get a gradient."""
    return {name: x.requires_grad_() for name, x in tensors.items() if x.is_floating_point()}


def on_device(case: Case, dtype: torch.dtype, device: str, of_indices: torch.dtype = torch.int64) -> dict[str, Tensor]:
    """The tensors of a case on a device, numbers of blocks in this dtype."""
    tensors = case.tensors(dtype)
    if "indices" in tensors:
        tensors["indices"] = tensors["indices"].to(of_indices)
    return {name: x.to(device) for name, x in tensors.items()}


def gradients(case: Case, tensors: dict[str, Tensor], written_to: str | None = None) -> tuple[Tensor, ...]:
    """Of every floating tensor; another one is overwritten between the forward and the backward pass."""
    learned = leaves(tensors)
    out = case(tensors)
    if written_to is not None:
        tensors[written_to].detach().fill_(0)
    return torch.autograd.grad((out.double() ** 2).sum(), tuple(learned.values()))


# Kernels read int32, and for others make lists or copies.
WRITTEN = [
    *(pytest.param(case, torch.float64, "cpu", torch.int64, id=name) for name, case in CASES.items()),
    *(
        pytest.param(case, torch.float32, "cpu", torch.int32, id=f"{name}, int32")
        for name, case in CASES.items()
        if "indices" in case.takes
    ),
    *(
        pytest.param(case, *kinds, id=f"{name}, {kinds[-1]}, on cuda", marks=pytest.mark.gpu)
        for name, case in CASES.items()
        for kinds in ((torch.bfloat16, "cuda", torch.int32), (torch.float32, "cuda", torch.int64))
        if "indices" in case.takes or kinds[-1] == torch.int32
    ),
]


@pytest.mark.parametrize(("case", "dtype", "device", "of_indices"), WRITTEN)
@pytest.mark.usefixtures("way", "by_rules")
def test_a_tensor_that_is_written_to_changes_no_gradient_in_silence(
    case: Case, dtype: torch.dtype, device: str, of_indices: torch.dtype
) -> None:
    """torch's rule: backward refuses it, unless it reads a copy."""
    given = functools.partial(on_device, case, dtype, device, of_indices)
    right = gradients(case, given())
    refused = set()
    for name in case.tensors():
        found, error = None, ""
        try:
            found = gradients(case, given(), name)
        except RuntimeError as refusal:
            error = str(refusal)
        if found is None:
            assert "modified" in error
            assert "inplace" in error
            refused.add(name)
        elif device == "cpu":
            assert [*map(torch.equal, found, right)] == [True] * len(right), name
        else:
            # torch's memory-efficient kernel adds dq in any order.
            torch.testing.assert_close(found, right)
    assert {"query", "key", "value"} <= refused


def hidden_key_changes(
    case: Case, dtype: torch.dtype, number: float, backend: str = "auto", device: str = "cpu"
) -> list[int]:
    """The rows before the last key that another last key changes, under a causal mask."""
    found = []
    for last in (None, number):
        tensors = on_device(case, dtype, device)
        tensors["query"] *= 8
        tensors["query"].select(-3, 3).mul_(1e3)
        if last is not None:
            for name in {"key", "window_key"} & {*tensors}:
                tensors[name].select(-3, -1).fill_(last)
        with torch.no_grad():
            out = case(tensors) if backend == "auto" else case(tensors, backend=backend)
        found.append(out.flatten(0, -3))
    assert found[0].isfinite().all()
    return [row for row in range(N - 1) if not torch.equal(found[0][row], found[1][row])]


CAUSAL = {name: case for name, case in CASES.items() if case.options.get("causal", True)}


@pytest.mark.parametrize("case", CAUSAL.values(), ids=CAUSAL)
@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        *(pytest.param(dtype, "cpu", id=str(dtype)) for dtype in DTYPES),
        *(pytest.param(dtype, "cuda", id=f"{dtype}, on cuda", marks=pytest.mark.gpu) for dtype in DTYPES[1:]),
    ],
)
@pytest.mark.usefixtures("by_rules")
def test_no_row_changes_with_a_key_that_it_does_not_see(case: Case, dtype: torch.dtype, device: str) -> None:
    for number in (math.nan, math.inf, -math.inf, torch.finfo(dtype).max):
        assert hidden_key_changes(case, dtype, number, device=device) == [], number


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        *itertools.product(("math", "sdpa-flash"), DTYPES),
        # It has no float64.
        *itertools.product(("flash-cpu",), DTYPES[1:]),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["dense", "window", "dilated", "dilated window", "window packed"])
def test_no_backend_on_a_cpu_adds_infinities_to_keys(name: str, backend: str, dtype: torch.dtype) -> None:
    for number in (math.nan, math.inf, -math.inf, torch.finfo(dtype).max):
        assert hidden_key_changes(CASES[name], dtype, number, backend) == [], number


@pytest.mark.parametrize("options", [{"window": (5, 0)}, CASES["window_sink"].options], ids=["window", "sinks"])
def test_rows_that_see_a_large_key_are_those_of_a_softmax_over_visible_keys(options: dict[str, Any]) -> None:
    """1e200 is seen by few rows, whose scores with it are finite, and NaN by the last one."""
    tensors = CASES["window"].tensors()
    q, k, v = (tensors[name] for name in ("query", "key", "value"))
    q[:, :, :, 0] = 1e-202
    k[:, 20] = 0
    k[:, 20, :, 0] = 1e200
    dout = torch.randn_like(q)
    dout[:, -1] = 0
    found = []
    for last in (0.5, math.nan):
        k[:, -1] = last
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        out, lse = attention(*given, return_lse=True, **{"causal": True, **options})
        dq, dk, dv = torch.autograd.grad(out, given, dout)
        found.append([x[:, :-1] for x in (out.detach(), dq)] + [lse[..., :-1], dk[:, 2 : N - 6], dv[:, 2 : N - 6]])
    assert [*map(torch.equal, *found)] == [True] * 5
    want = attention(q, k, v, backend="math", **{"causal": True, **options}) if "pattern" not in options else None
    if want is not None:
        torch.testing.assert_close(found[1][0], want[:, :-1])


class Gain:
    """A caller's function, equal to every other one."""

    def __init__(self, gain: float) -> None:
        self.gain = gain

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Gain)

    def __hash__(self) -> int:
        return 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        out, lse = math_backend.attend(q, k, v, **options)
        return self.gain * out, lse


OVER_FUNCTIONS = {
    name: case for name, case in CASES.items() if name.partition(" ")[0] in {"dense", "whole", "window", "dilated"}
}


@pytest.mark.parametrize("case", OVER_FUNCTIONS.values(), ids=OVER_FUNCTIONS)
@pytest.mark.usefixtures("way")
def test_functions_that_compare_equal_are_not_taken_for_each_other(case: Case) -> None:
    tensors = {name: x for name, x in case.tensors().items() if name != "sink"}
    single, double = (case(tensors, backend=Gain(gain)) for gain in (1.0, 2.0))
    torch.testing.assert_close(double, 2 * single)


class Model(torch.nn.Module):
    """A case as a module of its tensors."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.case = case

    def forward(self, tensors: dict[str, Tensor]) -> Tensor:
        return self.case(tensors)


def held(case: Case) -> tuple[Case, dict[str, Tensor]]:
    """The case with bounds as numbers, which a graph holds, and its other tensors."""
    tensors = case.tensors()
    if tensors.pop("cu_seqlens", None) is not None:
        case = case._replace(options={**case.options, "cu_seqlens": [*BOUNDS]})
    return case, tensors


READ = """
import sys
import torch
import dilabench.attention
given = torch.load(sys.argv[1] + "/given.pt")
for name, (tensors, want) in given.items():
    torch.testing.assert_close(torch.export.load(f"{sys.argv[1]}/{name}.pt2").module()(tensors), want, msg=name)
"""


@alternate_cases
def test_what_make_fx_accepts_runs_for_other_numbers(case: Case) -> None:
    case, tensors = held(case)
    graph = make_fx(case)(tensors)
    gc.collect()
    more = {name: x for name, x in case.tensors(seed=1).items() if name in tensors}
    torch.testing.assert_close(graph(more), case(more), rtol=0, atol=0)


@pytest.mark.parametrize("everything", [False, slow(True)])
def test_what_export_accepts_runs_in_another_process(everything: bool, tmp_path: Path) -> None:
    """Every pattern, in the default set alternately as a batch and packed."""
    given = {}
    for name in CASES if everything else ALTERNATE:
        case, tensors = held(CASES[name])
        program = torch.export.export(Model(case), (tensors,))
        torch.export.save(program, tmp_path / f"{name}.pt2")
        given[name] = tensors, case(tensors)
    torch.save(given, tmp_path / "given.pt")
    subprocess.run([sys.executable, "-c", READ, str(tmp_path)], check=True)


def forget() -> None:
    """Empty the caches of results of the library, which a call made before would be served from.

    Caches without a bound hold what is done once, such as a registration of torch. The others are looked for in modules
    and classes, because `tests/conftest.py` hides from `gc.get_objects()` what collection made.
    """
    folders = tuple(f"dilabench.{name}" for name in ("attention", "impls", "kernels", "backends", "patterns"))
    modules = [module for name, module in sys.modules.items() if name.startswith(folders)]
    values = [value for module in modules for value in vars(module).values()]
    classes = [value for value in values if isinstance(value, type) and value.__module__.startswith(folders)]
    for cache in itertools.chain(values, *(vars(owner).values() for owner in classes)):
        is_ours = isinstance(cache, functools._lru_cache_wrapper) and cache.__module__.startswith(folders)
        if is_ours and cache.cache_parameters()["maxsize"] is not None:
            cache.cache_clear()


class DefaultDtype:
    """`torch.set_default_dtype` for a while."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.before = dtype, torch.get_default_dtype()

    def __enter__(self) -> None:
        torch.set_default_dtype(self.dtype)

    def __exit__(self, *_: object) -> None:
        torch.set_default_dtype(self.before)


FOREIGN = {
    "meta": lambda: torch.device("meta"),
    "float64": lambda: DefaultDtype(torch.float64),
}
_BRANCHES: dict[str, Any] = {"segment_lengths": (16, 48), "dilation_rates": (1, 2)}
_NATIVE = NativeSparseAttention(32, 4, 2, **SPANS, top_k=2)
_DILATED = MultiheadDilatedAttention(32, 4, **_BRANCHES)
_TORCHSCALE = FromTorchscale(
    SimpleNamespace(
        segment_length=[16, 48],
        dilated_ratio=[1, 2],
        multiway=False,
        layernorm_eps=1e-5,
        xpos_rel_pos=True,
        xpos_scale_base=512,
    ),
    32,
    4,
    self_attention=True,
)


def _embedded(x: dict[str, Tensor]) -> Tensor:
    """[1, N, 32] of a case's keys."""
    return x["key"].flatten(2).float()


# The public functions and modules that are not cases themselves.
MORE: dict[str, Callable[[dict[str, Tensor]], Tensor]] = {
    "block_sparse_attention": lambda x: block_sparse_attention(**x, block_size=16, density=0.5),
    "dilated_attention": lambda x: dilated_attention(**x, **_BRANCHES, causal=True),
    "zero keys": lambda x: dilated_attention(**x, segment_lengths=(16, 48), dilation_rates=(2, 5), padding="zero_key"),
    "grouped": lambda x: dilated_attention(**x, **_BRANCHES, heads="grouped", offset="blocked"),
    "DilatedAttention": lambda x: DilatedAttention(**_BRANCHES)(**x),
    "selecting": lambda x: native_sparse_attention(**x, gates=x["query"][..., :3].sigmoid(), **SPANS, top_k=2),
    "math": lambda x: attention(**x, causal=True, backend="math"),
    "sdpa-flash": lambda x: attention(**x, causal=True, window=(5, 0), backend="sdpa-flash"),
    "function": lambda x: attention(**x, causal=True, backend=Gain(2.0)),
    "MultiheadDilatedAttention": lambda x: _DILATED(_embedded(x)),
    "NativeSparseAttention": lambda x: _NATIVE(_embedded(x)),
    "torchscale": lambda x: _TORCHSCALE(*[_embedded(x)] * 3)[0],
}


@pytest.mark.parametrize(
    ("name", "foreign", "dtype"),
    [
        # By default half of them: each name with each foreign default, in alternate dtypes.
        pytest.param(name, foreign, dtype, marks=pytest.mark.slow if (at + device + single) % 2 else ())
        for at, name in enumerate([*CASES, *MORE])
        for device, foreign in enumerate(FOREIGN)
        for single, dtype in enumerate((torch.float64, torch.float32))
    ],
    ids=str,
)
def test_results_depend_on_no_default_of_torch(name: str, foreign: str, dtype: torch.dtype) -> None:
    found = []
    for context in (FOREIGN[foreign], contextlib.nullcontext):
        case = CASES.get(name, CASES["whole"])
        tensors = case.tensors(dtype)
        learned = leaves(tensors)
        forget()
        with context():
            out = case(tensors) if name in CASES else MORE[name](tensors)
            found.append((out, *torch.autograd.grad(out, tuple(learned.values()), out.detach(), allow_unused=True)))
    for here, there in zip(*found, strict=True):
        assert (here is None) == (there is None)
        assert here is None or (here.dtype == there.dtype and torch.equal(here, there))


@cases
def test_causal_is_a_bool_for_every_pattern(case: Case) -> None:
    tensors = case.tensors()
    for causal in (None, 2, 1, 0, 0.5, "yes", [], torch.tensor(True)):
        if "causal" not in case.options:
            # Native sparse attention is causal, and has no such option.
            with pytest.raises(TypeError, match="unexpected keyword argument 'causal'"):
                case(tensors, causal=causal)
            continue
        wrong = case._replace(options={**case.options, "causal": causal})
        # Twice, and beside the right one: nothing is kept of what is refused.
        for _ in range(2):
            case(tensors)
            with pytest.raises(
                ValueError, match=r"(?s)causal .* (must be a bool; give True or False|give causal\.item\(\))"
            ):
                wrong(tensors)


@cases
@pytest.mark.usefixtures("way")
def test_a_scale_is_a_number_above_zero_for_every_pattern(case: Case) -> None:
    tensors = case.tensors()
    for scale in (0, -1.0, math.inf, math.nan, "1", torch.tensor(1.0), [], {}):
        with pytest.raises(ValueError, match=r"(?s)scale .*(should be a finite number|give)"):
            case(tensors, scale=scale)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "causal" in case.options])
@pytest.mark.usefixtures("way")
def test_a_window_is_two_integers_for_every_pattern(name: str) -> None:
    case = CASES[name]
    for window in (None, 3, (1,), (1, 0, 0), "ab", (1.5, 0)):
        wrong = case._replace(options={**case.options, "window": window})
        with pytest.raises(ValueError, match=r"window .*(must be two integers|should be a valid integer)"):
            wrong(case.tensors())


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if "causal" in case.options])
@pytest.mark.usefixtures("way")
def test_a_bool_of_numpy_is_one(name: str) -> None:
    case = CASES[name]
    numpys = case._replace(options={**case.options, "causal": np.bool_(case.options["causal"])})
    assert torch.equal(numpys(case.tensors()), case(case.tensors()))


def changed(case: Case, **changes: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    tensors = case.tensors(torch.float32)
    return {name: changes[name](x) if name in changes else x for name, x in tensors.items()}


QKV = ("query", "key", "value")


@cases
def test_shapes_that_do_not_fit_are_refused_with_the_layout(case: Case) -> None:
    def first(heads: int) -> Callable[[Tensor], Tensor]:
        return lambda x: x.narrow(-2, 0, heads)

    layout = r"\[(T|B, [MN]), H, D\]"
    for change in (
        {"query": first(0)},
        {"key": first(0), "value": first(0)},
        {"query": first(0), "key": first(0), "value": first(0)},
        {"query": first(3)},
        {name: lambda x: x[..., :0] for name in QKV},
        {"query": lambda x: x[..., None]},
        {"key": lambda x: x[..., :4], "value": lambda x: x[..., :4]},
    ):
        with pytest.raises(ValueError, match=layout):
            case(changed(case, **change))


def nested(layout: torch.layout) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.nested.nested_tensor([x[0], x[0][:2]], layout=layout)


def sharded(x: Tensor) -> Tensor:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    return distribute_tensor(x, init_device_mesh("cpu", (1,)), [Shard(0)])


@pytest.fixture(scope="module")
def single_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path_factory.mktemp("ranks") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@cases
@pytest.mark.parametrize(
    ("change", "way_out"),
    [
        (Tensor.to_sparse, r"layout torch.sparse_coo and must be torch.strided; give {}.to_dense\(\)"),
        (nested(torch.jagged), r"nested tensor; give .*{}.values\(\).*cu_seqlens={}.offsets\(\)"),
        pytest.param(
            nested(torch.strided),
            r"nested tensor; give .*{}.values\(\).*cu_seqlens={}.offsets\(\)",
            marks=pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
        ),
        (sharded, r"DTensor, .*give {}.full_tensor\(\), or .*{}.to_local\(\) to ring_attention"),
        (Tensor.tolist, r"list; give a tensor"),
    ],
    ids=["sparse", "jagged", "nested", "sharded", "list"],
)
@pytest.mark.usefixtures("single_rank")
def test_tensors_without_all_of_their_numbers_are_refused(
    case: Case, change: Callable[[Tensor], Tensor], way_out: str
) -> None:
    for name in QKV:
        with pytest.raises(ValueError, match=rf"{name} (has|is a) " + way_out.replace("{}", name)):
            case(changed(case, **{name: change}))


@alternate_cases
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_forward_mode_is_refused_with_a_way_out(case: Case) -> None:
    tensors = case.tensors()
    others = {name: x for name, x in tensors.items() if name != "query"}

    def loss(query: Tensor) -> Tensor:
        return case({"query": query, **others}).sum()

    q = tensors["query"]
    for derive in (
        lambda: torch.func.hessian(loss)(q),
        lambda: torch.func.jacfwd(loss)(q),
        lambda: torch.func.jvp(loss, (q,), (q,)),
        lambda: torch.func.jvp(torch.func.grad(loss), (q,), (q,)),
        lambda: torch.autograd.functional.hessian(loss, q),
    ):
        with pytest.raises(RuntimeError, match=r"attention has (no forward-mode|first) derivatives.* use "):
            derive()


@pytest.mark.parametrize("case", OVER_FUNCTIONS.values(), ids=OVER_FUNCTIONS)
@pytest.mark.parametrize(
    ("out", "lse"),
    [(torch.float32, torch.float64), (torch.float64, torch.float16), (torch.float16, torch.int64)],
    ids=str,
)
@pytest.mark.usefixtures("way")
def test_a_function_that_returns_another_dtype_is_refused(case: Case, out: torch.dtype, lse: torch.dtype) -> None:
    def wrong(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
        results = math_backend.attend(*tensors, **options)
        return results[0].to(out), results[1].to(lse)

    tensors = {name: x for name, x in case.tensors().items() if name != "sink"}
    with pytest.raises(ValueError, match=rf"returned out {out} and lse {lse} of query torch.float64; give out.to"):
        case(tensors, backend=wrong)


@pytest.mark.parametrize("size", [1, 8, 16, 24, 40, 100])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_packed_blocks_of_queries_have_any_size(size: int, dtype: torch.dtype) -> None:
    """As two batches of one, without a bound that is a multiple."""
    lengths = 3 * size + size // 2, 2 * size
    generator = torch.Generator().manual_seed(0)
    drawn = (torch.randn(sum(lengths), heads, 16, generator=generator, dtype=torch.float64) for heads in (4, 2, 2))
    q, k, v = (x.to(dtype).requires_grad_() for x in drawn)
    counts = [-(-length // size) for length in lengths]
    blocks = [torch.randint(-1, count, (2, count, 2), generator=generator) for count in counts]
    options: Any = {"pattern": TopKBlocksPattern(block_size=size, selector="random"), "causal": True}
    packed = attention(q, k, v, indices=torch.cat(blocks, 1), cu_seqlens=(0, lengths[0], sum(lengths)), **options)
    parts = zip(*(x.split(lengths) for x in (q, k, v)), blocks, strict=True)
    alone = torch.cat([attention(*(x[None] for x in part), indices=own, **options)[0] for *part, own in parts])
    dout = torch.randn(packed.shape, generator=generator, dtype=torch.float64).to(dtype)
    found, want = ((out, *torch.autograd.grad(out, (q, k, v), dout)) for out in (packed, alone))
    for got, right in zip(found, want, strict=True):
        # Differences of scores cancel where a token sees few keys.
        assert (got - right).double().norm() <= 4 * torch.finfo(dtype).eps * (
            right.double().norm() + dout.double().norm()
        )


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.usefixtures("single_rank")
def test_shards_take_bounds_as_attention_does(dtype: torch.dtype) -> None:
    bounds = torch.tensor([0, 2, 2, 6], dtype=dtype)
    assert sequence_shards(cu_seqlens=bounds).bounds == sequence_shards(cu_seqlens=[0, 2, 2, 6]).bounds == (0, 2, 6)
    for wrong in (bounds.double(), bounds[None], bounds[:0], bounds - 1):
        with pytest.raises(ValueError, match="rise from 0"):
            sequence_shards(cu_seqlens=wrong)


@pytest.mark.parametrize(
    "options", [{"causal": None}, {"causal": 2}, {"causal": "yes"}, {"causal": torch.tensor(True)}], ids=str
)
@pytest.mark.usefixtures("single_rank")
def test_ring_attention_has_the_rules_of_attention(options: dict[str, Any]) -> None:
    tensors = [x.float() for x in CASES["whole"].tensors().values()]
    shards = sequence_shards(N)
    with pytest.raises(ValueError, match=r"causal .*(must be a bool|give causal\.item)"):
        ring_attention(*tensors, shards, **options)
    for wrong in (Tensor.to_sparse, sharded, lambda x: x[:, :, :0], lambda x: x[..., None]):
        with pytest.raises(ValueError, match=r"query .*(to_dense|to_local|\[B, N(_local)?, H, D\])|num_heads=0"):
            ring_attention(wrong(tensors[0]), *tensors[1:], shards)


TRACED = """
import sys
import torch
from tests.attention.every_pattern import CASES
wrong = []
dtype = getattr(torch, sys.argv[1])
for name, case in CASES.items():
    tensors = {key: x.to(sys.argv[2]) for key, x in case.tensors(dtype).items()}
    if case.packed:
        case = case._replace(options={**case.options, "cu_seqlens": tensors.pop("cu_seqlens").tolist()})
    names = list(tensors)
    # A trace is made for gradients, too, with which detached merges are computed in another order.
    tensors["query"].requires_grad_()
    traced = torch.jit.trace(lambda *given: case(dict(zip(names, given))), tuple(tensors.values()), check_trace=False)
    if not torch.equal(traced(*tensors.values()), case(tensors)):
        wrong.append(name)
print(wrong)
"""


@pytest.mark.parametrize(
    ("dtype", "device"),
    [
        ("float64", "cpu"),
        slow("float32", "cpu"),
        slow("bfloat16", "cpu"),
        slow("float16", "cpu"),
        pytest.param("bfloat16", "cuda", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.usefixtures("by_rules")
def test_a_first_call_inside_a_trace_gives_every_bit(dtype: str, device: str) -> None:
    """Modules are imported while torch traces, and constants keep their precision."""
    root = Path(__file__).parents[2]
    command = [sys.executable, "-W", "ignore", "-c", TRACED, dtype, device]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr
