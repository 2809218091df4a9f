"""Every cache in dilabench, with its bound and the reason that it is there."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

PACKAGE = Path(__file__).parents[1] / "dilabench"
FEWER_THAN = 100
PROPERTY, UNBOUNDED = "property", None
KINDS = ("lru_cache", "cache", "cached_property")


class Cache(NamedTuple):
    """A line of the table. few: for an unbounded cache with arguments, why there are few of them."""

    bound: int | str | None
    why: str
    few: str = ""


# By module below dilabench, and qualified name.
CACHES = {
    # The library: a repeated call finds what the first one chose.
    "attention/call.py:_of_shapes": Cache(64, "the computation of a call's shapes, read in every call"),
    "attention/call.py:_of_packing": Cache(8, "the same of packed sequences, whose lists grow with the tokens"),
    "attention/call.py:_packings": Cache(64, "the choice that packings of similar length share"),
    "attention/dilated.py:_kept_branches": Cache(256, "the pattern of dilated_attention, validated once"),
    "attention/function.py:_of_blocks": Cache(64, "the pattern of block_sparse_attention, validated once"),
    "attention/given_blocks.py:_standing": Cache(64, "the pattern that stands for given blocks, validated once"),
    "attention/given_blocks.py:_of_given_blocks": Cache(64, "the workload of given blocks, whose indices change"),
    "attention/operands.py:_warn_of_layout": Cache(256, "a warning that is given once for a shape"),
    "impls/call.py:_requested": Cache(256, "the pattern of a traced call, from text"),
    "impls/call.py:read_call": Cache(256, "the options of a traced call, from text"),
    "impls/operator_rules.py:_untraced.compilers_own": Cache(UNBOUNDED, "one wrapped function, of one identity"),
    "impls/operator_rules.py:_register_flop_formulas": Cache(
        UNBOUNDED, "torch registers a formula once", few="one function of the package"
    ),
    "impls/union/branches.py:fewest_runs": Cache(256, "each rank plans for all ranks, and packings share heads"),
    # Backends.
    "backends/adapt.py:_call": Cache(256, "the arguments of a backend's kernel, read in every call"),
    "backends/flash_cpu.py:_mask": Cache(256, "the mask of a C++ call, read in every call"),
    "backends/flex.py:_compiled": Cache(64, "compiled kernels: compilation takes seconds"),
    "backends/flex.py:_block_mask": Cache(32, "block lists on the device"),
    "backends/flex.py:_packed_mask": Cache(2, "block lists of a packing, up to 1 GiB each"),
    "backends/sdpa/cudnn.py:_unread": Cache(UNBOUNDED, "a number that no kernel reads", few="devices of the process"),
    "backends/sdpa/flash_cpu.py:_kept_mask": Cache(16, "additive masks, which take memory"),
    # Choice.
    "choice/computation.py:_machine": Cache(16, "one machine for a kind of device, which takes a probe"),
    "choice/descriptors.py:installed_version": Cache(
        UNBOUNDED, "reads metadata files", few="names of descriptors' requirements"
    ),
    "choice/descriptors.py:_distributions_by_module": Cache(UNBOUNDED, "reads the files of every distribution"),
    "choice/measured.py:TuneFile.by_configuration": Cache(PROPERTY, "an index of hundreds of cells"),
    "choice/measured.py:_tune_file": Cache(4, "a file, read again if it changes"),
    "choice/measured.py:kernel_hash": Cache(UNBOUNDED, "reads all kernel sources"),
    "choice/ways.py:own_ways": Cache(UNBOUNDED, "the registries of the library, made once", few="a bool"),
    # Ranks.
    "distributed/row_assignment.py:balanced_rows": Cache(64, "a search over cuts, for one packing on every layer"),
    "distributed/sharding.py:Shards.rows": Cache(PROPERTY, "read in every call over ranks"),
    "distributed/transport/copies.py:_driver": Cache(UNBOUNDED, "the CUDA driver's library, loaded once"),
    # Verification: each value takes a computation over the sampled rows.
    "cli/terminal.py:_nowhere": Cache(UNBOUNDED, "one open file for what nobody can read"),
    "engine/device/device.py:device_of": Cache(UNBOUNDED, "one object for a device", few="devices of the process"),
    "engine/verify/across_ranks.py:RanksOracle._heads": Cache(PROPERTY, "rows fetched from all ranks"),
    "engine/verify/oracle/blocks.py:blocks_cached.cached": Cache(4, "blocks of small workloads inside a context"),
    "engine/verify/oracle/oracle.py:Oracle.full_dout": Cache(PROPERTY, "one gradient for all calls"),
    "engine/verify/oracle/oracle.py:Oracle.sampled_dout": Cache(PROPERTY, "one gradient for all calls"),
    "engine/verify/oracle/oracle.py:Oracle.expected": Cache(PROPERTY, "serves all implementations of a workload"),
    "engine/verify/oracle/oracle.py:Oracle.exact": Cache(PROPERTY, "serves results and gradients"),
    "engine/verify/oracle/oracle.py:Oracle._plain": Cache(PROPERTY, "serves results and gradients"),
    "engine/verify/oracle/oracle.py:Oracle.gradients": Cache(PROPERTY, "serves all implementations of a workload"),
    "engine/verify/oracle/oracle.py:Oracle.planes": Cache(PROPERTY, "drawn once, for inputs and expectations"),
    "engine/verify/oracle/oracle.py:Oracle.second": Cache(PROPERTY, "serves all implementations of a workload"),
    "engine/verify/oracle/oracle.py:Oracle.large_expected": Cache(PROPERTY, "serves all implementations of a workload"),
    # Kernels.
    "kernels/combine.py:_cache": Cache(256, "launches of a few kilobytes, no tables on the device"),
    "kernels/cpu/aten_flash.py:_multiplies": Cache(
        UNBOUNDED, "asks torch, which a trace of a call cannot", few="dtypes"
    ),
    "kernels/cpu/compiled.py:why_unavailable": Cache(UNBOUNDED, "a failed compilation is reported once"),
    "kernels/cpu/compiled.py:library": Cache(UNBOUNDED, "the C++ library, loaded once"),
    "kernels/cpu/compiled.py:openmp_parallel": Cache(UNBOUNDED, "a symbol's address, read in every call"),
    "kernels/cpu/flash.py:room_of": Cache(256, "asks the C++, read in every call"),
    "kernels/fused/branch_group.py:BranchGroup.covers_every_row": Cache(PROPERTY, "read in every call"),
    "kernels/fused/branch_group.py:BranchGroup.largest_tile": Cache(PROPERTY, "read in every call of ragged lengths"),
    "kernels/fused/branch_group.py:_covered_keys": Cache(256, "common to all lengths of a pattern"),
    "kernels/fused/partials.py:partial_places": Cache(32, "holds tables on the device"),
    "kernels/fused/residue_plan.py:residue_plan": Cache(256, "equal plans are one object, by which launches are kept"),
    "kernels/fused/residue_plan.py:capped_plan": Cache(64, "the same for plans with a softcap"),
    "kernels/fused/residue_plan.py:_document_plan": Cache(256, "the same for packings of as many tokens"),
    "kernels/fused/residue_plan.py:_cheapest_cut": Cache(256, "a search that all lengths up to a power of two share"),
    "kernels/fused/residue_plan.py:_frames": Cache(1024, "common to all lengths of a pattern, and to many cuts"),
    "kernels/fused/row_layout.py:on_hopper": Cache(16, "asks the driver, read in every call"),
    "kernels/fused/row_layout.py:_float32_products": Cache(16, "asks the driver, read in every call"),
    "kernels/fused/sm90/tile_walk.py:shared_layout": Cache(64, "one layout for a tile, read in every launch"),
    "kernels/fused/tile_lists.py:_entries_in_squares": Cache(256, "powers of two share their whole super-segments"),
    "kernels/fused/tile_lists.py:partners_of": Cache(256, "common to all lengths and tiles of a pattern"),
    "kernels/fused/tile_tables.py:_made_together": Cache(256, "common to all lengths of a pattern"),
    "kernels/fused/tile_tables.py:_load_operators": Cache(
        UNBOUNDED, "torch loads operators once on a device", few="devices of the process"
    ),
    "kernels/launch_cache.py:LaunchCache.of": Cache(32, "launches of a layout, which hold tables on the device"),
    "kernels/lse.py:has_kernel": Cache(UNBOUNDED, "asks the driver, read in every call", few="dtypes"),
    "kernels/merge.py:_cache": Cache(256, "launches of a layout, which hold no table"),
    "kernels/streams.py:_stream_of": Cache(UNBOUNDED, "one stream for a device", few="devices of the process"),
    # What the machine is.
    "atomic_file.py:_without_home": Cache(UNBOUNDED, "one folder for the process: it may be a new temporary one"),
    "machine.py:_accelerator_by_process": Cache(UNBOUNDED, "starts a process"),
    "machine.py:_first_working": Cache(UNBOUNDED, "runs compilers", few="values of $CXX and $PATH in a process"),
    "predict/memory/plan.py:_sources_hash": Cache(UNBOUNDED, "reads the sources that a trace runs"),
    # Patterns: arrays of a sequence, and numbers counted from them.
    "patterns/block_masks.py:_kept_small": Cache(256, "drawn masks"),
    "patterns/block_masks.py:_kept_large": Cache(8, "drawn masks that take much memory"),
    "patterns/block_masks.py:_from_file": Cache(8, "a file, by its digest"),
    "patterns/block_masks.py:_pairs_of_blocks": Cache(4096, "heads and masks share distances: a loop over rows"),
    "patterns/block_sparse.py:_pairs_of_masks": Cache(4096, "segments and heads share masks"),
    "patterns/dilated.py:rows_on": Cache(4096, "heads share residues"),
    "patterns/hidden_rows.py:hidden_once": Cache(8, "arrays of a sequence that every derived answer reads"),
    "patterns/native_sparse.py:_summands": Cache(8, "drawn gates that every derived answer reads"),
    "patterns/answers.py:counted_once": Cache(4096, "pairs, which every case over a workload reads"),
    "patterns/selected_blocks.py:_row_labels": Cache(16, "every case over a workload reads them: seconds at 64K"),
    "patterns/selected_blocks.py:_selection": Cache(2, "the indices of all tokens, which take memory"),
    "patterns/selected_blocks.py:_thresholds": Cache(32, "ranks of all rows, read key by key"),
    "patterns/selected_blocks.py:_from_file": Cache(4, "a file, by its pattern's digest"),
    "patterns/token_selectors.py:stand_ins": Cache(16, "drawn queries and keys, read in pieces of rows"),
    "patterns/token_selectors.py:indexer_stand_ins": Cache(16, "drawn queries and keys, read in pieces of rows"),
    "patterns/topk_blocks.py:_selected": Cache(8, "indices and mask of a sequence, which every answer reads"),
    "plugins/pattern_guard.py:checked_pattern": Cache(UNBOUNDED, "one class for a plug-in's class", few="plug-ins"),
    # Records and reports.
    "record/__init__.py:Case.case_id": Cache(PROPERTY, "a hash of the whole case, read for each pairing"),
    "record/__init__.py:Case.group_id": Cache(PROPERTY, "a hash of the whole case, read for each pairing"),
    "report/plots/plots.py:_picture": Cache(32, "a page and a file show the same drawing"),
    "report/tidy.py:_csv_line": Cache(64, "turns repeat their reasons"),
    "stats/samples/location.py:_median_rank": Cache(4096, "as long as all samples; simulations repeat it"),
    "store/archive.py:_fields_of_models": Cache(UNBOUNDED, "read for every part of every row", few="classes"),
}


class Use(NamedTuple):
    """A cache in the source: its bound, and whether it takes arguments."""

    bound: int | str | None
    has_arguments: bool


def caches_of(source: str) -> dict[str, Use]:
    """The caches of a module by qualified name: decorated functions, and names assigned from `lru_cache(...)(f)`.

    Raises ValueError for a cache that neither has a name nor decorates.
    """
    if "functools" not in source:
        return {}
    tree = ast.parse(source)
    names = {
        alias.asname or alias.name: alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "functools"
        for alias in node.names
    }
    modules = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "functools"
    }
    numbers = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }

    def kind_of(node: ast.AST) -> str:
        """The name in functools that an expression is."""
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            return node.attr
        return names.get(node.id, "") if isinstance(node, ast.Name) else ""

    def bound_of(node: ast.expr) -> tuple[bool, int | str | None]:
        """Whether a decorator makes a cache, and its bound."""
        call = node if isinstance(node, ast.Call) else None
        kind = kind_of(call.func if call else node)
        if kind == "cached_property":
            return True, PROPERTY
        if kind == "cache":
            return True, UNBOUNDED
        if kind != "lru_cache":
            return False, None
        given = [*call.args, *(word.value for word in call.keywords if word.arg == "maxsize")] if call else []
        if not given:
            return True, 128
        bound = given[0]
        return True, numbers[bound.id] if isinstance(bound, ast.Name) else ast.literal_eval(bound)

    uses: dict[str, Use] = {}
    known: set[ast.AST] = set()

    def note(name: str, decorator: ast.expr, has_arguments: bool) -> None:
        is_cache, bound = bound_of(decorator)
        if is_cache:
            assert name not in uses, name
            uses[name] = Use(bound, has_arguments)
            known.update(ast.walk(decorator))

    def visit(node: ast.AST, path: str) -> None:
        for child in ast.iter_child_nodes(node):
            inner = path
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                for decorator in child.decorator_list:
                    takes = isinstance(child, ast.ClassDef) or any(ast.iter_child_nodes(child.args))
                    note(path + child.name, decorator, takes)
                inner = f"{path}{child.name}."
            elif isinstance(child, ast.Assign):
                for name, value in assigned(child):
                    if isinstance(value, ast.Call):
                        note(path + name, value.func, has_arguments=True)
            visit(child, inner)

    visit(tree, "")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and kind_of(node.func) in KINDS and node.func not in known:
            raise ValueError(f"line {node.lineno}: a cache without a name")
    return uses


def assigned(node: ast.Assign) -> Iterator[tuple[str, ast.expr]]:
    """Names and their values, of `a = x` and `a, b = x, y`."""
    for target in node.targets:
        if (
            isinstance(target, ast.Tuple)
            and isinstance(node.value, ast.Tuple)
            and len(target.elts) == len(node.value.elts)
        ):
            pairs = zip(target.elts, node.value.elts, strict=True)
        else:
            pairs = zip([target], [node.value], strict=True)
        yield from ((name.id, value) for name, value in pairs if isinstance(name, ast.Name))


USES = {
    f"{path.relative_to(PACKAGE).as_posix()}:{name}": use
    for path in sorted(PACKAGE.rglob("*.py"))
    for name, use in caches_of(path.read_text()).items()
}


def test_the_table_lists_every_cache() -> None:
    assert sorted(USES.keys() - CACHES.keys()) == [], "give each a line with its bound and reason, or delete it"
    assert sorted(CACHES.keys() - USES.keys()) == [], "these are gone: delete their lines"
    assert len(USES) < FEWER_THAN


@pytest.mark.parametrize("name", sorted(USES.keys() & CACHES.keys()))
def test_a_cache_is_as_its_line_says(name: str) -> None:
    use, line = USES[name], CACHES[name]
    assert use.bound == line.bound
    assert line.why
    may_grow = use.bound is UNBOUNDED and use.has_arguments
    assert bool(line.few) == may_grow, "only an unbounded cache with arguments says why there are few of them"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("from functools import cache\n@cache\ndef f(): ...", {"f": Use(None, False)}),
        ("from functools import cache\n@cache\ndef f(x): ...", {"f": Use(None, True)}),
        ("from functools import cache as once\n@once\ndef f(*, x): ...", {"f": Use(None, True)}),
        ("import functools\n@functools.lru_cache\ndef f(x): ...", {"f": Use(128, True)}),
        ("import functools as ft\n@ft.lru_cache(8)\ndef f(x): ...", {"f": Use(8, True)}),
        ("from functools import lru_cache\n@lru_cache(maxsize=None)\ndef f(x): ...", {"f": Use(None, True)}),
        ("from functools import lru_cache\nN = 9\n@lru_cache(maxsize=N)\ndef f(x): ...", {"f": Use(9, True)}),
        (
            "from functools import cached_property\nclass A:\n  @cached_property\n  def f(self): ...",
            {"A.f": Use("property", True)},
        ),
        (
            "from functools import cache\ndef g():\n  if True:\n    @cache\n    def f(): ...",
            {"g.f": Use(None, False)},
        ),
        (
            "from functools import lru_cache\na, b = lru_cache(maxsize=2)(f), lru_cache(f)",
            {"a": Use(2, True), "b": Use(128, True)},
        ),
        ("def cache(f): ...\n@cache\ndef f(): ...", {}),
        ("from functools import cache\ndef f(cache): return cache.x", {}),
    ],
)
def test_each_form_of_a_cache_is_seen(source: str, expected: dict[str, Use]) -> None:
    assert caches_of(source) == expected


@pytest.mark.parametrize(
    "source",
    [
        "from functools import lru_cache\ndef f(): return lru_cache(maxsize=2)(g)",
        "import functools\nkept = [functools.cache(f)]",
    ],
)
def test_a_cache_without_a_name_is_refused(source: str) -> None:
    with pytest.raises(ValueError, match="without a name"):
        caches_of(source)
